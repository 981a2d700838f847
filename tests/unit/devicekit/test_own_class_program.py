"""`topobus-device`: what its arguments must be, before anything is connected."""

from __future__ import annotations

import pytest

from topobus.device import main as program


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["topobus-device", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "got no --class"),
        (("--class",), "got no --class"),
        (("--class", "gpu"), "class gpu has a service of its own\n  next: topobus-gpu"),
        (("--class=smart-card",), "wanted 1 to 20 lowercase letters and digits"),
        (("--class", "gateway"), "belongs to another process of Topobus"),
    ],
)
def test_class_is_refused_when_the_program_cannot_serve_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Two lines, the second of which says what to do; status 64."""
    assert _run(monkeypatch, *arguments) == 64
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 2
    assert "\n  next: " in error


@pytest.mark.parametrize("arguments", [("--class", "npu", "--check-config"), ("--check-config", "--class=npu")])
def test_settings_are_those_of_the_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """A variable of the class counts, and a wrong one is named with the class."""
    assert _run(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out == "npu: the settings are good\n"
    monkeypatch.setenv("TOPOBUS_NPU__DRIVERS__ALLOW", "nobody")
    assert _run(monkeypatch, *arguments) == 78
    assert "TOPOBUS_NPU__DRIVERS__ALLOW" in capsys.readouterr().err


def test_help_needs_no_class(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows the option that the program lacks elsewhere."""
    assert _run(monkeypatch, "--help") == 0
    assert "--class NAME" in capsys.readouterr().out
