"""The folder that a run of the whole system keeps its things in."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from topobus.local_system.state_folder import state_folder
from topobus.values.errors import ConfigError


def test_state_folder_is_fresh_and_goes_when_none_is_wanted() -> None:
    """Without a wish each run has a folder of its own, removed
    afterwards with all that is in it.
    """
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
    """What a killed run left goes at the next start.

    A folder in use, a young one and one of somebody else's making stay.
    """
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
            left = {path.name for path in home.iterdir()}
            assert left >= {used.name, young.name, foreign.name}
            assert killed.name not in left
    shutil.rmtree(home)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may write to, as /tmp is."""
    home = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))
    home.chmod(0o1777)
    yield home
    shutil.rmtree(home)


def _plant(folder: Path, target: Path) -> None:
    """Lay a folder as one of ours, with an old link where its lock would be and more links beside
    it.
    """
    (folder / "logs").mkdir(parents=True)
    for name in ("lock", "logs/gpu.log", "state"):
        (folder / name).symlink_to(target)
        os.utime(folder / name, (0, 0), follow_symlinks=False)


def test_planted_link_reaches_no_file_when_a_run_starts(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link where an abandoned run's lock would lie is neither opened nor followed: the file
    behind it keeps its bytes, whoever runs this.
    """
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    precious = tmp_path / "precious"
    precious.write_text("bytes")
    os.utime(precious, (0, 0))
    _plant(shared / "topobus-aaaaaaaa", precious)
    (shared / "topobus-bbbbbbbb").symlink_to(tmp_path)
    (tmp_path / "lock").symlink_to(precious)
    fifo = shared / "topobus-cccccccc"
    fifo.mkdir()
    os.mkfifo(fifo / "lock")
    os.utime(fifo / "lock", (0, 0))

    with state_folder(None):
        pass

    assert precious.read_text() == "bytes"
    assert (shared / "topobus-aaaaaaaa" / "lock").is_symlink()
    assert (tmp_path / "lock").is_symlink()


def test_abandoned_folder_is_left_when_others_may_write_to_it(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others can change is not deleted: by the time of the deletion
    it may be something else.
    """
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    open_to_all = shared / "topobus-aaaaaaaa"
    open_to_all.mkdir()
    (open_to_all / "lock").touch()
    os.utime(open_to_all / "lock", (0, 0))
    open_to_all.chmod(0o777)

    with state_folder(None):
        pass

    assert open_to_all.exists()


def test_abandoned_folder_goes_and_what_its_links_lead_to_stays(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run's folder is deleted with its links, and never through them."""
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    killed = shared / "topobus-killed00"
    killed.mkdir(mode=0o700)
    (killed / "machine").symlink_to(tmp_path / "kept")
    (killed / "lock").touch()
    os.utime(killed / "lock", (0, 0))

    with state_folder(None):
        pass

    assert not killed.exists()
    assert (tmp_path / "kept" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_planted_link_of_another_user_reaches_no_file_of_roots(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report's attack: a folder of nobody's with a link to root's file.

    Root starts a run and the file keeps its bytes.
    """
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    precious = tmp_path / "precious"
    precious.write_text("bytes")
    precious.chmod(0o600)
    os.utime(precious, (0, 0))
    planted = shared / "topobus-aaaaaaaa"
    _plant(planted, precious)
    for path in (planted, *planted.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)

    with state_folder(None):
        pass
    with pytest.raises(ConfigError, match="belongs to user 65534"), state_folder(planted):
        pass

    assert precious.read_text() == "bytes"
    assert planted.exists()


def test_state_folder_is_refused_when_others_may_write_to_it(shared: Path) -> None:
    """A predictable folder that everybody may write to, or whose lock is a link, is no place for a
    run.
    """
    with pytest.raises(ConfigError, match=r"may be written by others \(mode 1777\)"), state_folder(shared):
        pass

    shared.chmod(0o755)
    (shared / "lock").symlink_to("/dev/null")
    with pytest.raises(ConfigError, match=r"Too many levels of symbolic links"), state_folder(shared):
        pass


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
    """A folder that somebody wants and that is too deep is an error with both lengths, before
    anything starts.
    """
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
