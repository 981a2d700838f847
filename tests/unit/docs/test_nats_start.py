"""deploy/nats/start.sh: what NATS stored is brought to the account that its configuration has, and
of two ledgers the one that is named is moved away.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.kustomize import DEPLOY

_SCRIPT = DEPLOY / "nats" / "start.sh"
_STREAM = "KV_topobus_ledgers"
_IN_A_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A server's folder, and beside it a configuration with accounts.

    The server itself only says that it was started.
    """
    for folder in ("bin", "nats", "nats-users", "data/jetstream"):
        (tmp_path / folder).mkdir(parents=True)
    server = tmp_path / "bin" / "nats-server"
    server.write_text('#!/bin/sh\necho "started with $2"\n', encoding="utf-8")
    server.chmod(0o755)
    (tmp_path / "nats" / "nats.conf").write_text("include ../nats-users/users.conf\n", encoding="utf-8")
    (tmp_path / "nats-users" / "users.conf").write_text("accounts {\n}\n", encoding="utf-8")
    return tmp_path / "data"


def _lay_streams(store: Path, *accounts: str) -> None:
    """Give each account a stream, whose file names it."""
    for account in accounts:
        stream = store / "jetstream" / account / "streams" / _STREAM
        stream.mkdir(parents=True)
        (stream / "of").write_text(account, encoding="utf-8")


def _owners(store: Path) -> dict[str, str]:
    """Say whose stream each folder has: by the folder's path below the store."""
    return {str(path.parents[2].relative_to(store)): path.read_text(encoding="utf-8") for path in store.glob("**/of")}


def _start(store: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    configuration = store.parent / "nats" / "nats.conf"
    path = f"{store.parent / 'bin'}:/usr/bin:/bin"
    words = ["/bin/sh", str(_SCRIPT), str(configuration), str(store), *arguments]
    return subprocess.run(
        words, env={"PATH": path, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("stored", "arguments", "wanted"),
    [("$G", (), "NODE"), ("CORE", (), "NODE"), ("NODE", ("CORE",), "CORE"), ("NODE", (), "NODE")],
    ids=["without-accounts", "hub-to-central", "central-to-hub", "as-it-is"],
)
def test_streams_are_brought_to_the_account_of_the_configuration(
    store: Path, stored: str, arguments: tuple[str, ...], wanted: str
) -> None:
    """Whatever account one ledger lies in, it is in the wanted one when the server starts."""
    _lay_streams(store, stored)

    done = _start(store, *arguments)

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"started with {store.parent / 'nats' / 'nats.conf'}")
    assert _owners(store) == {f"jetstream/{wanted}": stored}


@pytest.mark.parametrize(
    ("environment", "hint", "other_hint"),
    [({}, "docker compose run", "kubectl"), (_IN_A_CLUSTER, "kubectl -n topobus set env statefulset/nats", "docker")],
    ids=["compose", "kubernetes"],
)
def test_two_ledgers_are_refused_with_a_command_of_where_the_server_runs(
    store: Path, environment: dict[str, str], hint: str, other_hint: str
) -> None:
    """The server is not started, nothing is moved, and the next step is one for this place."""
    _lay_streams(store, "$G", "NODE")

    done = _start(store, **environment)

    assert (done.returncode, done.stdout) == (78, "")
    assert "has streams of two accounts, NODE and $G" in done.stderr
    assert hint in done.stderr
    assert other_hint not in done.stderr
    assert _owners(store) == {"jetstream/$G": "$G", "jetstream/NODE": "NODE"}


@pytest.mark.parametrize(
    ("away", "kept"),
    [("NODE", {"jetstream/NODE": "$G"}), ("$G", {"jetstream/NODE": "NODE"})],
    ids=["wanted-account", "other-account"],
)
def test_ledger_that_is_named_is_moved_away_and_kept(store: Path, away: str, kept: dict[str, str]) -> None:
    """With MOVE_AWAY the other ledger is the server's, and the named one stays in a folder beside
    it.
    """
    _lay_streams(store, "$G", "NODE")

    done = _start(store, **_IN_A_CLUSTER, MOVE_AWAY=away)

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"started with {store.parent / 'nats' / 'nats.conf'}")
    assert _owners(store) == {**kept, f"{away}-before": away}


def test_only_ledger_stays_when_its_account_is_named_once_more(store: Path) -> None:
    """A MOVE_AWAY that somebody forgot to take back moves nothing at the next start."""
    _lay_streams(store, "$G", "NODE")
    _start(store, MOVE_AWAY="NODE")
    before = _owners(store)

    done = _start(store, MOVE_AWAY="NODE")

    assert done.returncode == 0
    assert _owners(store) == before == {"jetstream/NODE": "$G", "NODE-before": "NODE"}


def test_ledger_that_was_moved_away_before_is_not_written_over(store: Path) -> None:
    """A second one of the same account is refused as without MOVE_AWAY: the first one is kept until
    somebody removes it.
    """
    _lay_streams(store, "$G", "NODE")
    (store / "NODE-before").mkdir()

    done = _start(store, **_IN_A_CLUSTER, MOVE_AWAY="NODE")

    assert (done.returncode, done.stdout) == (78, "")
    assert _owners(store) == {"jetstream/$G": "$G", "jetstream/NODE": "NODE"}
