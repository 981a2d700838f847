"""The folder that a run of the whole system keeps its things in."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from topobus.cli.system import state_folder
from topobus.domain.errors import ConfigError


def test_state_folder_is_fresh_and_goes_when_none_is_wanted() -> None:
    """Without a wish each run has a folder of its own, removed afterwards with all that is in it."""
    with state_folder(None) as first, state_folder(None) as second:
        (first / "logs").mkdir()
        assert first != second

    assert not first.exists()
    assert not second.exists()


def test_state_folder_goes_when_the_run_fails() -> None:
    """A failure leaves no folder behind."""
    with pytest.raises(RuntimeError), state_folder(None) as folder:
        raise RuntimeError("no luck")

    assert not folder.exists()


def test_state_folder_removes_another_when_its_run_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed run left goes at the next start; a folder in use, a young one and one of somebody else's making stay."""
    home = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    killed, young, foreign = (home / f"topobus-{name}" for name in ("killed00", "young000", "foreign0"))
    for folder in (killed, young, foreign):
        (folder / "logs").mkdir(parents=True)
    (killed / "lock").touch()
    (young / "lock").touch()
    with state_folder(None) as used:
        for folder in (killed, used):
            os.utime(folder / "lock", (0, 0))
        with state_folder(None):
            left = {one.name for one in home.iterdir()}
            assert left >= {used.name, young.name, foreign.name}
            assert killed.name not in left
    shutil.rmtree(home)


def test_state_folder_goes_when_sigterm_comes_before_anything_runs() -> None:
    """SIGTERM unwinds like Ctrl-C, so that the folder is removed."""
    with pytest.raises(KeyboardInterrupt), state_folder(None) as folder:
        signal.raise_signal(signal.SIGTERM)

    assert not folder.exists()


def test_state_folder_is_short_enough_for_sockets_when_the_temporary_folder_is_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep TMPDIR is passed over, since unix sockets below it could not be bound."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 80)))

    with state_folder(None) as folder:
        assert folder.parent == Path("/tmp")


def test_state_folder_is_refused_when_sockets_would_not_fit(tmp_path: Path) -> None:
    """A folder that somebody wants and that is too deep is an error with both lengths, before anything starts."""
    with pytest.raises(ConfigError, match=r"of \d+ bytes, wanted at most 107"), state_folder(tmp_path / ("x" * 80)):
        pass


def test_state_folder_is_refused_when_another_run_uses_it(tmp_path: Path) -> None:
    """Two runs never share a folder; the second one is told so, and may have it afterwards."""
    home = Path(f"/tmp/tsf-{tmp_path.name[-20:]}")
    try:
        with state_folder(home), pytest.raises(ConfigError, match="in use"), state_folder(home):
            pass
        with state_folder(home) as again:
            assert again == home
    finally:
        (home / "lock").unlink()
        home.rmdir()


def test_state_folder_is_refused_when_it_cannot_be_made(tmp_path: Path) -> None:
    """A file in the way is named."""
    file = Path("/dev/null/x")

    with pytest.raises(ConfigError, match="/dev/null/x"), state_folder(file):
        pass
