"""Brings what a NATS server stored for one account to the account that its next start has, so that
nobody begins with an empty ledger without a word.

Flows in: the store's folder of a server that does not run. Flows out: the same folder with the
streams below the account's name, or an error with the commands to run. A server keeps the streams
of an account below `jetstream/<account>`, and nothing in them names the account (tried on
nats-server 2.9.10, 2.10.27 and 2.15.1), so one rename of that folder moves all of them: whole or
not at all, whenever this process or the machine ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from topobus.bus.server_config.nats_accounts import DEFAULT_ACCOUNT, STREAMS_ACCOUNT
from topobus.values.errors import ConfigError

__all__ = ["bring_store"]


def bring_store(store: Path, account: str) -> bool:
    """Rename the folder of the other account's streams to this account's.

    Gives whether there was anything to rename.

    Shapes: account — `NODE` for a server with accounts, `$G` for one without.
    Errors: raises ConfigError when both accounts have streams, for nobody but the user knows which
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
    """Say whether an account's folder has a stream: each is a folder of its own.

    A folder that cannot be read counts: what is in it must not be passed over.
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
