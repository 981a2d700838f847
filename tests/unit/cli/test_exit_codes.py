"""What `topobus` answers to command lines that need no server: exit codes, messages, and never a
traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from topobus.cli.application import application, run
from topobus.cli.exits import ExitCode, InputError, NotFoundError, UsageError, code_of
from topobus.cli.main import main
from topobus.values.errors import (
    ConfigError,
    ContractError,
    HardwareError,
    InvariantError,
    PeerUnavailable,
    TopobusError,
)

# Nothing listens at port 1 of the loopback interface (tcpmux is unused since decades); the
# connection is refused at once.
_NOBODY = "nats://127.0.0.1:1"
_POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n    - name: c\n"


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait seconds for a server that is not there."""
    monkeypatch.setenv("TOPOBUS_CLI__CONNECT_TIMEOUT_S", "0.2")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (NotFoundError("x"), 1),
        (ContractError("x"), 65),
        (InputError("x"), 66),
        (PeerUnavailable("x"), 69),
        (InvariantError("x"), 70),
        (TopobusError("x"), 70),
        (HardwareError("x"), 74),
        (ConfigError("x"), 78),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_code_of_gives_the_documented_code_when_an_error_ends_a_command(error: TopobusError, code: int) -> None:
    """Each kind of error has one exit code, the documented one."""
    assert code_of(error) == code


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["plce"], 2, "plce"),
        (["place"], 2, "POD.YAML"),
        (["place", "pod.yaml", "--nod", "x"], 2, "--nod"),
        (["place", "absent.yaml"], 66, "absent.yaml"),
        (["release", "pod", "a/b/c"], 2, "a/b/c"),
        (["explain"], 2, "either"),
        (["explain", "--file", "absent.json"], 66, "absent.json"),
        (["decisions", "--limit", "0"], 2, "limit"),
        (["up", "--profile", "cray"], 2, "dgx"),
        (["up", "--real", "--root", "/"], 2, "exclude"),
        (["up", "--root", "absent"], 66, "absent"),
        (["up", "--open", "--nats", "nats://10.0.0.1:4222"], 2, "loopback"),
        (["machine", "--root", "absent"], 66, "absent"),
        (["inventory", "gpu", "--nats", _NOBODY], 69, _NOBODY),
        (["machine", "--nats", _NOBODY], 69, "topobus up"),
        (["health", "--nats", _NOBODY], 69, _NOBODY),
        (["decisions", "--nats", _NOBODY, "--config", "absent.toml"], 78, "absent.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run_names_the_trouble_when_a_command_cannot_work(
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code is the documented one, stderr names what is wrong, stdout stays empty, and there is
    no traceback.
    """
    monkeypatch.chdir(tmp_path)

    exit_code = run(arguments)

    printed = capsys.readouterr()
    assert exit_code == code
    assert said in printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_POD.replace("containers", "contaners"), 'did you mean "containers"?'),
        (_POD + "      resources: {limits: {topobus.dev/gpu: 1.5}}\n", "whole number"),
        (_POD + "      resources: {limits: {cpus: 1}}\n", 'did you mean "cpu"?'),
        (_POD.replace("Pod", "Deployment"), "Deployment"),
        ("{", "neither YAML nor JSON"),
        ("", "no object"),
    ],
    ids=["unknown-field", "half-a-gpu", "cpus", "deployment", "broken", "empty"],
)
def test_place_names_the_place_when_a_manifest_is_wrong(
    text: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A manifest with a mistake is refused before anything is asked, with the file and what was
    wanted.
    """
    file = tmp_path / "pod.yaml"
    file.write_text(text)

    code = run(["place", str(file), "--nats", _NOBODY])

    printed = capsys.readouterr()
    assert code == ExitCode.DATA
    assert said in printed.err
    assert "pod.yaml" in printed.err


def test_place_reports_a_folder_when_it_is_given_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder in place of a file is an input error, not a defect."""
    assert run(["place", str(tmp_path)]) == ExitCode.NO_INPUT
    assert str(tmp_path) in capsys.readouterr().err


def test_place_reports_binary_when_a_manifest_is_not_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bytes that are no text are refused as content."""
    file = tmp_path / "pod.yaml"
    file.write_bytes(b"\xff\xfe\x00")

    assert run(["place", str(file)]) == ExitCode.DATA
    assert "not text" in capsys.readouterr().err


def test_explain_reports_content_when_the_file_is_no_decision(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A JSON file that is no decision names the missing part."""
    file = tmp_path / "decision.json"
    file.write_text(json.dumps({"id": "x"}))

    assert run(["explain", "--file", str(file)]) == ExitCode.DATA
    assert "decision.json" in capsys.readouterr().err


def test_run_prints_the_version_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` names the program and its version."""
    assert run(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("topobus ")


@pytest.mark.parametrize("option", ["--why", "--who"])
def test_device_refuses_a_text_when_it_has_a_line_break(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is the text, so nobody is asked, and the next step is about it."""
    arguments = {"--why": "fan", "--who": "ann", option: "a\nb"}

    code = run(
        [
            "device",
            "maintain",
            "gpu-0",
            *(word for pair in arguments.items() for word in pair),
            "--nats",
            "nats://127.0.0.1:1",
        ]
    )

    assert code == ExitCode.USAGE
    assert capsys.readouterr().err == (
        f"error: {option} is 'a\\nb', wanted one line of printable text, because lists show it\n"
        "  next: leave out line breaks and control characters\n"
    )


def test_run_keeps_the_traceback_in_a_file_when_topobus_has_a_defect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A defect exits with 70 and two lines; the traceback is in the file that they name."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr("topobus.cli.commands.place.read_wanted", broken)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    code = run(["place", "pod.yaml"])

    printed = capsys.readouterr()
    assert code == ExitCode.INTERNAL
    assert "no such luck" in printed.err
    assert "Traceback" not in printed.err
    kept = list(tmp_path.glob("topobus-defect-*.txt"))
    assert len(kept) == 1
    assert "ZeroDivisionError" in kept[0].read_text()


def test_every_command_has_help_when_the_program_is_assembled(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command can be loaded and says what it does."""
    names = [name for name in application() if not name.startswith("-")]

    for name in names:
        assert run([name, "--help"]) == ExitCode.OK
        assert f"Usage:\n  topobus {name}" in capsys.readouterr().out

    assert {
        "up",
        "machine",
        "inventory",
        "place",
        "release",
        "health",
        "decisions",
        "explain",
        "doctor",
        "demo",
    } <= set(names)


def test_exit_codes_stand_in_the_reference_when_they_exist() -> None:
    """docs/reference/cli.md lists every exit code."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")

    assert [code.value for code in ExitCode if f"| {code.value} |" not in page] == []


def test_main_names_the_package_when_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base installation without the extra `cli` says what to install, without a traceback."""
    monkeypatch.setattr(sys, "argv", ["topobus", "machine"])
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    monkeypatch.delitem(sys.modules, "topobus.cli.application")

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == ExitCode.CONFIG
    assert "pip install '.[cli]' from the checkout" in capsys.readouterr().err
