"""The conformance runner, and all recorded answers of kubelet 1.36.2."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lab.conformance.recorded_answers import main

DATA = Path(__file__).parents[2] / "data" / "conformance"
CASE = {
    "id": "one",
    "nodes": [0, 1],
    "distances": {"0": [10, 20], "1": [20, 10]},
    "policy": "restricted",
    "preferClosest": False,
    "providers": [{"cpu": [{"nodes": [1], "preferred": True}]}],
    "expect": {"nodes": [1], "preferred": True, "admit": True},
}


@pytest.mark.parametrize(
    ("name", "cases"),
    [("topology-merge", 2500), ("device-hints", 1500), ("cpu-static-policy", 1500), ("memory-hints", 1200)],
)
def test_conformance_passes_when_run_on_kubelets_recorded_answers(
    name: str, cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every recorded answer of kubelet's own code is ours, too."""
    assert main([str(DATA / f"{name}.jsonl.gz")]) == 0
    assert capsys.readouterr().out == f"{name}.jsonl.gz: {cases} passed, 0 failed\n"


@pytest.mark.parametrize("is_gzip", [True, False], ids=["gzip", "plain"])
def test_conformance_shows_the_case_and_fails_when_an_answer_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_gzip: bool
) -> None:
    """A differing case is named with both answers, and the status is 1."""
    wrong = {**CASE, "id": "two", "expect": {"nodes": [0], "preferred": True, "admit": True}}
    text = "".join(json.dumps(case) + "\n" for case in (CASE, wrong)).encode()
    file = tmp_path / "topology-merge-other.jsonl"
    file.write_bytes(gzip.compress(text) if is_gzip else text)

    assert main([str(file)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("topology-merge-other.jsonl: 1 passed, 1 failed\n  two\n")
    assert '"nodes": [0]' in out
    assert '"nodes": [1]' in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("novelty.jsonl", json.dumps(CASE), id="unknown-kind"),
        pytest.param("topology-merge.jsonl", "{", id="no-json"),
        pytest.param("topology-merge.jsonl", "[]", id="no-case"),
        pytest.param("topology-merge.jsonl", '{"expect": {}}', id="fields-missing"),
        pytest.param("topology-merge.jsonl", None, id="no-file"),
    ],
)
def test_conformance_exits_with_two_when_a_file_cannot_be_used(
    name: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no file of cases is named on standard error, without a traceback."""
    file = tmp_path / name
    if text is not None:
        file.write_text(text)

    assert main([str(file)]) == 2
    assert name in capsys.readouterr().err
