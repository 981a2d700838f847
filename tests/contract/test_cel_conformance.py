"""Selectors are refused, true, false, in error and too dear exactly where Kubernetes 1.36.2 has
them so, in every recorded case.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lab.conformance.allocator_checks import CelSelectors
from lab.conformance.recorded_answers import kinds, main, run_file

_FOLDER = Path(__file__).parent.parent / "data" / "conformance"
RECORDED = {"random": _FOLDER / "cel-selectors.jsonl.gz", "corners": _FOLDER / "cel-selectors-corners.jsonl.gz"}
DEVICE = {
    "driver": "d.io",
    "attributes": {"n": {"int": 1}, "big": {"bigint": "9007199254740993"}},
    "capacity": {"memory": "1Gi"},
}


def _write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("file", RECORDED.values(), ids=RECORDED)
def test_selectors_are_answered_as_upstream_answers(file: Path) -> None:
    """Refused or not, the verdict, that there is an error, and whether the estimate is above the
    limit: all as recorded; and each estimate is the very number.
    """
    check = CelSelectors()

    different = [(case_id, got, expected) for case_id, expected, got in run_file(file, check) if got != expected]

    assert different == []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        estimates = sum("maxCost" in json.loads(line).get("expect", ()) for line in lines)
    assert check.remarks()[0] == f"estimates: {estimates} equal, 0 cheaper, 0 dearer"


def test_runner_knows_the_kind_and_reports_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command finds the kind by the file's name, passes what agrees, and tells costs apart
    without failing a case by them.
    """
    file = _write(
        tmp_path / "cel-selectors-more.jsonl",
        {"device": DEVICE},
        {"expression": "device.attributes['d.io'].n == 1", "expect": {"maxCost": 5, "cost": 5, "match": True}},
        {
            "expression": "device.attributes['d.io'].big == 9007199254740992.0",
            "expect": {"maxCost": 99, "cost": 5, "match": True},
        },
        {
            "expression": "device.attributes['d.io'].none",
            "expect": {"maxCost": 4, "cost": 4, "error": "no such key: none"},
        },
        {"expression": "1 +", "expect": {"refused": "Syntax error"}},
    )

    status = main([str(file)])

    out = capsys.readouterr().out
    assert status == 0
    assert out.splitlines()[0] == "cel-selectors-more.jsonl: 4 passed, 0 failed"
    assert "estimates: 2 equal, 1 cheaper, 0 dearer" in out
    assert "costs of a run: 2 equal, 0 cheaper, 0 dearer" in out


@pytest.mark.parametrize(
    ("expression", "expect"),
    [
        ("device.driver == 'd.io'", {"maxCost": 4, "cost": 3, "match": False}),
        ("device.driver == 'd.io'", {"maxCost": 4, "cost": 3, "error": "no such key"}),
        ("device.driver == 'd.io'", {"maxCost": 1_000_001, "cost": 3, "match": True}),
        ("device.driver == 'd.io'", {"refused": "undeclared reference"}),
        ("undeclared", {"maxCost": 4, "cost": 3, "match": True}),
    ],
)
def test_runner_fails_a_case_that_differs(tmp_path: Path, expression: str, expect: dict[str, Any]) -> None:
    """Another verdict, an error, a refusal, or an estimate on the other side of the limit is a
    failure.
    """
    file = _write(tmp_path / "cel-selectors.jsonl", {"device": DEVICE}, {"expression": expression, "expect": expect})

    assert main([str(file)]) == 1


def test_runner_cannot_use_a_file_without_its_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose first line is a case, or a device of an unknown type, ends with status 2 and
    says why.
    """
    headless = _write(
        tmp_path / "cel-selectors.jsonl", {"expression": "true", "expect": {"maxCost": 0, "cost": 0, "match": True}}
    )
    strange = _write(tmp_path / "cel-selectors-2.jsonl", {"device": {**DEVICE, "attributes": {"n": {"float": 1.5}}}})

    assert main([str(headless)]) == 2
    assert main([str(strange)]) == 2

    errors = capsys.readouterr().err
    assert "line 1 is a case" in errors
    assert "unknown type of an attribute: 'float'" in errors


def test_each_run_has_a_check_of_its_own() -> None:
    """The device of one file is not that of another: the registered class is made anew."""
    assert kinds()["cel-selectors"] is not kinds()["cel-selectors"]
