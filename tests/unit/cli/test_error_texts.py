"""Errors of `topobus` say what to do next, in the words that the help uses, with the exit code that
the reference promises.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from topobus.cli.application import run
from topobus.cli.render import output as output_module
from topobus.cli.render.output import Output
from topobus.cli.render.picture import recording_console

_CLAIM = """apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: a}
spec: {devices: {requests: [{name: x, exactly: {deviceClassName: gpu.topobus.dev}}]}}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with manifests that are wrong in one way each, and the working directory."""
    (tmp_path / "kind.yaml").write_text("apiVersion: v1\nkind: Podd\nmetadata: {name: a}\n")
    (tmp_path / "yaml.yaml").write_text("a: [\n")
    (tmp_path / "field.yaml").write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers: [{name: c, imag: x}]\n"
    )
    (tmp_path / "claim.yaml").write_text(_CLAIM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "said", "next_step"),
    [
        ("place kind.yaml", 65, "kind: got 'Podd', wanted one of Pod, ", "docs/reference/pods.md"),
        ("apply -f kind.yaml", 65, "wanted one of Pod, DeviceClass", "docs/reference/pods.md"),
        ("place yaml.yaml", 65, "neither YAML nor JSON", "docs/reference/pods.md"),
        ("place field.yaml", 65, 'did you mean "image"?', "docs/reference/pods.md"),
        (
            "place claim.yaml",
            66,
            "wanted a Pod or a workload, got 1 ResourceClaim",
            "`topobus apply -f` allocates claims",
        ),
        ("explain --file yaml.yaml", 65, "cannot read this as DecisionEvent", "correct the file"),
        (
            "apply -f https://example.com/x.yaml",
            66,
            "https://example.com/x.yaml: URLs are not read",
            "curl -fsSL https://example.com/x.yaml",
        ),
        ("simulate --machine nope --pods claim.yaml", 66, "no folder, no file and no profile", "dgx"),
        ("machine --root nope", 66, "nope is no folder, no file and no profile", "a folder with sys and proc"),
        ("oci", 2, "whose devices", "topobus oci --help"),
        ("record", 2, "parameter FOLDER requires an argument", "topobus record --help"),
        ("keys secrets show", 2, "parameter NAMESPACE requires an argument", "topobus keys secrets show --help"),
        ("health gpu --class nic", 2, "two classes are named: gpu and nic", "one of them"),
        ("up --nats foo", 2, "'foo', which is no URL", "nats://foo:4222"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_error_says_what_is_wrong_and_what_to_do_next(
    files: Path, arguments: str, code: int, said: str, next_step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines, whatever the kind of the error."""
    assert files.is_dir()

    ended = run(arguments.split())

    error, step = capsys.readouterr().err.splitlines()[-2:]
    assert ended == code
    assert error.startswith("error: ")
    assert said in error
    assert step.startswith("  next: ")
    assert next_step in step


def test_allocate_is_a_plan_without_being_told(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    """It never writes: --dry-run need not be said.

    Here it gets as far as asking a system that is not there.
    """
    assert files.is_dir()

    assert run(["allocate", "-f", "claim.yaml", "--nats", "nats://127.0.0.1:1"]) == 69
    assert "connection refused" in capsys.readouterr().err


def test_help_of_a_class_is_taken_by_position_and_by_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`health gpu` and `health --class gpu`, `inventory gpu` and `inventory --class gpu`: all get
    as far as the system.
    """
    lines = [
        [command, *words, "--nats", "nats://127.0.0.1:1"]
        for command in ("health", "inventory")
        for words in (["gpu"], ["--class", "gpu"])
    ]

    codes = [run(line) for line in lines]

    assert codes == [69] * 4
    assert capsys.readouterr().err.count("connection refused") == 4


def test_migrate_says_its_notes_once_when_it_prints_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stand in the document, and not on standard error a second time."""
    (files / "classic.yaml").write_text(
        "apiVersion: resource.k8s.io/v1alpha2\nkind: ResourceClaim\nmetadata: {name: a}\nspec: "
        "{resourceClassName: none}\n"
    )

    run(["migrate", "classic.yaml", "--json"])

    said = capsys.readouterr()
    assert '"notes"' in said.out
    assert said.err == ""


_ADDRESS = "0000:ab:00.0 and 0000:cd:00.0, then :bus:"


def test_texts_are_written_as_they_are_when_a_pci_address_reads_as_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the buses are names of pictures to the library that writes: answers, notes, errors
    and drawings keep their letters.
    """
    output = Output()
    recorded = recording_console()

    output.show(_ADDRESS)
    output.note(_ADDRESS)
    output.errors.print(_ADDRESS)
    recorded.print(_ADDRESS)

    assert capsys.readouterr() == (f"{_ADDRESS}\n", f"{_ADDRESS}\n" * 2)
    assert recorded.export_text().strip() == _ADDRESS


def test_consoles_are_opened_in_one_place_when_the_source_is_read() -> None:
    """One that is opened elsewhere would draw pictures again."""
    room = Path(output_module.__file__).parents[1]

    opened = {
        path.relative_to(room).as_posix()
        for path in room.rglob("*.py")
        if re.search(r"(?<![\w.])Console\(", path.read_text())
    }

    assert opened == {"render/output.py"}
