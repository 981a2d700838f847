"""Moves the streams that a NATS server stored for one account to the account that its next start
uses, so that it does not silently begin with an empty ledger.

The server must not run. It keeps the streams of an account below `jetstream/<account>`, and nothing
in them names the account (tried on nats-server 2.9.10, 2.10.27 and 2.15.1), so one rename of that
folder moves all of them: whole or not at all, whenever this process or the machine ends. Where that
is not possible, the error has the commands to run.
"""

from __future__ import annotations

import os
from pathlib import Path

from topobus.bus.server_config.nats_accounts import DEFAULT_ACCOUNT, STREAMS_ACCOUNT
from topobus.values.errors import ConfigError

__all__ = ["bring_store"]


def bring_store(store: Path, account: str) -> bool:
    """Rename the folder of the other account's streams to this account's.

    Return whether there was anything to rename.

    Shapes: account — `NODE` for a server with accounts, `$G` for one without.
    Errors: raises ConfigError when both accounts have streams, because only the user knows which
    ledger is the present one, and when the folder cannot be renamed.
    """
    home = store / "jetstream"
    wanted, other = home / account, home / (DEFAULT_ACCOUNT if account == STREAMS_ACCOUNT else STREAMS_ACCOUNT)
    if not _has_streams(other):
        return False
    if _has_streams(wanted):
        raise ConfigError(
            f"NATS' store {home} has streams of two accounts, {wanted.name!r} and {other.name!r}: two "
            "ledgers, of which this start would take the first",
            next_step=f"move away the one that is not to be used: mv '{wanted}' or '{other}' to another folder, and "
            "keep it until the nodes are well",
        )
    try:
        _remove_empty(wanted)
        other.rename(wanted)
        _sync(home)
    except OSError as err:
        raise ConfigError(
            f"NATS' store {other} cannot be brought to account {account!r}: {err.strerror}",
            next_step=f"as who owns it: mv '{other}' '{wanted}'",
        ) from err
    return True


def _has_streams(account: Path) -> bool:
    """Return whether an account's folder has a stream: each is a folder of its own.

    A folder that cannot be read counts, because its streams must not be ignored.
    """
    try:
        return any((account / "streams").iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _remove_empty(account: Path) -> None:
    """Remove the folders that a server makes for an account without streams.

    A rename replaces an empty folder alone.
    """
    for folder in (account / "streams", account):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
