"""`topobus migrate`: what stands on stdout, on stderr and in the exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.formats.kubernetes import parse_manifest

CLASS = """\
apiVersion: resource.k8s.io/{version}
kind: ResourceClass
metadata: {{name: gpu}}
driverName: gpu.topobus.dev
{more}
"""
NODES = "suitableNodes: {nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: In, values: [a]}]}]}"


def _write(folder: Path, text: str) -> str:
    file = folder / "classic.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("version", ["v1alpha1", "v1alpha2"])
def test_migrate_writes_a_manifest_when_all_can_be_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    """Exit 0, nothing on stderr, and what is written is read strictly by ours."""
    code = run(["migrate", _write(tmp_path, CLASS.format(version=version, more=""))])
    written = capsys.readouterr()

    (made,) = parse_manifest(written.out, where="out.yaml")
    assert (code, written.err, made.kind, made.api_version) == (0, "", "DeviceClass", "resource.k8s.io/v1")


def test_migrate_reads_standard_input_when_a_dash_stands_for_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As help says; an option that there is not stays one."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(CLASS.format(version="v1alpha2", more="").encode())))
    code = run(["migrate", "-"])
    refused = run(["migrate", "--jsn", "-"])
    written = capsys.readouterr()

    assert (code, refused) == (0, 2)
    assert "DeviceClass" in written.out
    assert 'there is no option --jsn, did you mean "--json"?' in written.err


def test_migrate_ends_with_no_and_tells_on_stderr_when_something_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script sees the exit code, a person the object, the field and what to do."""
    code = run(["migrate", _write(tmp_path, CLASS.format(version="v1alpha2", more=NODES))])
    written = capsys.readouterr()

    assert code == 1
    assert "lost ResourceClass gpu: suitableNodes: has no counterpart in a DeviceClass" in written.err
    assert parse_manifest(written.out, where="out.yaml")


def test_migrate_writes_one_document_when_json_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Objects and notes with their severity."""
    code = run(["migrate", _write(tmp_path, CLASS.format(version="v1alpha2", more=NODES)), "--json"])
    printed = json.loads(capsys.readouterr().out)

    assert (code, printed["isComplete"]) == (1, False)
    assert [api_object["kind"] for api_object in printed["objects"]] == ["DeviceClass"]
    assert [(note["object"], note["path"], note["severity"]) for note in printed["notes"]] == [
        ("ResourceClass gpu", "suitableNodes", "lost")
    ]


@pytest.mark.parametrize(
    ("text", "code", "wanted"),
    [
        (CLASS.format(version="v1alpha2", more="parameterRef: {}"), 65, 'unknown field, did you mean "parametersRef"?'),
        (": :", 65, "YAML"),
        ("", 65, "no object"),
    ],
)
def test_migrate_refuses_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, wanted: str
) -> None:
    """A typing error in a classic object is no note: it is to be corrected first."""
    assert run(["migrate", _write(tmp_path, text)]) == code
    assert wanted in capsys.readouterr().err


def test_migrate_names_the_file_when_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 66, as for every missing file."""
    assert run(["migrate", str(tmp_path / "none.yaml")]) == 66
    assert "none.yaml" in capsys.readouterr().err


def test_example_of_the_page_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """examples/classic is what the how-to names: all of it has a counterpart."""
    example = Path(__file__).resolve().parents[3] / "examples" / "classic" / "gpus.yaml"
    assert run(["migrate", str(example), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)

    assert [made["kind"] for made in answer["objects"]] == ["DeviceClass", "ResourceClaim", "Pod"]
    assert [note for note in answer["notes"] if note["severity"] != "info"] == []
