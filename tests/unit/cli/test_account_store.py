"""How the folder of a server's streams gets the name of the account that the next start has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topobus.local_system.account_store import bring_store
from topobus.values.errors import ConfigError

_ACCOUNTS = ("$G", "NODE")


def _make_stream(store: Path, account: str) -> Path:
    file = store / "jetstream" / account / "streams" / "KV_topobus_ledgers" / "meta.inf"
    file.parent.mkdir(parents=True)
    file.write_text(account)
    return file


def _owners(store: Path) -> dict[str, str]:
    return {file.parts[-4]: file.read_text() for file in store.glob("jetstream/*/streams/*/meta.inf")}


@pytest.mark.parametrize("account", _ACCOUNTS)
def test_nothing_is_brought_when_there_is_nothing(tmp_path: Path, account: str) -> None:
    """A first start, a start after one of the same kind, and one after a server that stored
    nothing, leave the folder as it is.
    """
    assert not bring_store(tmp_path, account)
    (tmp_path / "jetstream" / "$G" / "streams").mkdir(parents=True)
    assert not bring_store(tmp_path, account)
    if account == "NODE":
        _make_stream(tmp_path, account)
        assert not bring_store(tmp_path, account)
        assert _owners(tmp_path) == {"NODE": "NODE"}


@pytest.mark.parametrize("account", _ACCOUNTS)
def test_streams_are_brought_when_the_other_account_has_them(tmp_path: Path, account: str) -> None:
    """Also over the empty folder that a server made of its own, and once."""
    other = next(name for name in _ACCOUNTS if name != account)
    _make_stream(tmp_path, other)
    (tmp_path / "jetstream" / account / "streams").mkdir(parents=True)

    assert bring_store(tmp_path, account)
    assert _owners(tmp_path) == {account: other}
    assert not bring_store(tmp_path, account)


def test_both_stay_when_two_accounts_have_streams(tmp_path: Path) -> None:
    """Which ledger is the present one the user says, by a command that the error names."""
    for account in _ACCOUNTS:
        _make_stream(tmp_path, account)

    with pytest.raises(ConfigError) as caught:
        bring_store(tmp_path, "NODE")

    assert "streams of two accounts, 'NODE' and '$G'" in caught.value.message
    assert "mv" in str(caught.value.next_step)
    assert _owners(tmp_path) == {"$G": "$G", "NODE": "NODE"}


def test_streams_stay_when_the_folder_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of another user, as a container leaves it: nothing is half done, and the command to
    run is said.
    """
    _make_stream(tmp_path, "$G")

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(self), None, str(target))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ConfigError) as caught:
        bring_store(tmp_path, "NODE")

    home = tmp_path / "jetstream"
    assert caught.value.next_step == f"as who owns it: mv '{home / '$G'}' '{home / 'NODE'}'"
    assert _owners(tmp_path) == {"$G": "$G"}


def test_streams_are_brought_by_the_next_start_when_the_first_was_killed_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only step that is not the rename itself removes an empty folder: whoever comes later
    finds all streams, and brings them.
    """
    _make_stream(tmp_path, "$G")
    (tmp_path / "jetstream" / "NODE" / "streams").mkdir(parents=True)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            bring_store(tmp_path, "NODE")
    assert _owners(tmp_path) == {"$G": "$G"}

    assert bring_store(tmp_path, "NODE")
    assert _owners(tmp_path) == {"NODE": "$G"}


def test_folder_counts_as_full_when_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody can look into is not passed over as if it were empty."""
    _make_stream(tmp_path, "$G")
    _make_stream(tmp_path, "NODE")

    def refuse(path: object = ".") -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ConfigError):
        bring_store(tmp_path, "NODE")
