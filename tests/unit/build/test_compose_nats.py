"""What compose does with a NATS server that runs and does not work: its health check, run by a
shell as the container's engine runs it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.bus.server_config.server_users import accounts_configuration, server_configuration
from topobus.bus.server_config.streams import total_bytes

ROOT = Path(__file__).resolve().parents[3]
_NATS = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["nats"]


class _Container:
    """A place for the script: its counter, a wget that answers as the test says, and a process that
    stands for the server.
    """

    def __init__(self, folder: Path, server: int) -> None:
        kind, script = _NATS["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        assert script.count("kill 1;") == 1
        self._script = (
            script.replace("$$", "$")
            .replace("/dev/shm/sick", str(folder / "sick"))
            .replace("kill 1;", f"kill {server};")
        )
        self._bin = folder / "bin"
        self._bin.mkdir()

    def look(self, *, is_healthy: bool) -> int:
        """Run the check once; gives its exit status."""
        wget = self._bin / "wget"
        wget.write_text(f"#!/bin/sh\nexit {0 if is_healthy else 1}\n")
        wget.chmod(0o755)
        return subprocess.run(
            ["/bin/sh", "-c", self._script], env={"PATH": f"{self._bin}:/bin:/usr/bin"}, check=False
        ).returncode


@pytest.mark.parametrize(
    ("was_healthy", "is_ended"), [(True, True), (False, False)], ids=["healthy-once", "never-healthy"]
)
def test_server_is_ended_when_it_was_healthy_and_stays_sick(tmp_path: Path, was_healthy: bool, is_ended: bool) -> None:
    """Sixteen sick looks in a row end a server that was healthy once.

    One that only takes long to start is left alone.
    """
    with subprocess.Popen(["sleep", "600"]) as server:
        container = _Container(tmp_path, server.pid)
        if was_healthy:
            assert container.look(is_healthy=True) == 0
        for _ in range(15):
            assert container.look(is_healthy=False) == 1
            assert server.poll() is None
        if was_healthy:
            # One healthy look between them, and the count begins anew.
            container.look(is_healthy=True)
            for _ in range(15):
                container.look(is_healthy=False)
            assert server.poll() is None
        container.look(is_healthy=False)
        if not is_ended:
            server.kill()
        server.wait()

    assert server.returncode == (-15 if is_ended else -9)


def test_server_has_a_store_of_a_fixed_size_when_compose_starts_it() -> None:
    """Its configuration is the shipped one, whose store holds all streams, whatever is free on the
    disk at a restart.
    """
    assert "./deploy/nats:/etc/nats:ro" in _NATS["volumes"]
    assert _NATS["command"][0] == "/etc/nats/${TOPOBUS_NATS_CONF:-with-users.conf}"
    assert "include nats-server.conf\n" in (ROOT / "deploy/nats/with-users.conf").read_text(encoding="utf-8")
    assert "max_file_store: 4GB" in (ROOT / "deploy/nats/nats-server.conf").read_text(encoding="utf-8")
    assert "max_file_store: 4GB" in (ROOT / "deploy/kubernetes/nats.yaml").read_text(encoding="utf-8")
    assert total_bytes() < 4e9


class _Started:
    """What compose runs in NATS' container, here in folders of a test: the script, the shipped
    configurations, and a `nats-server` that says how it was called.
    """

    def __init__(self, folder: Path) -> None:
        self.store = folder / "data"
        self._etc = folder / "etc" / "nats"
        self._etc.mkdir(parents=True)
        for file in (ROOT / "deploy/nats").iterdir():
            (self._etc / file.name).write_bytes(file.read_bytes())
        (folder / "etc" / "nats-users").mkdir()
        self.users = folder / "etc" / "nats-users" / "users.conf"
        server = folder / "bin" / "nats-server"
        server.parent.mkdir()
        server.write_text('#!/bin/sh\necho "started with $*"\n')
        server.chmod(0o755)

    def make_stream(self, account: str) -> None:
        """Make what a server leaves of a stream."""
        folder = self.store / "jetstream" / account / "streams" / "KV_topobus_ledgers"
        folder.mkdir(parents=True)
        (folder / "meta.inf").write_text(account)

    def accounts(self) -> dict[str, str]:
        """Give the accounts that have streams, each with whose they were."""
        return {file.parts[-4]: file.read_text() for file in self.store.glob("jetstream/*/streams/*/meta.inf")}

    def run(self, configuration: str, *more: str, pid_file: str = "") -> subprocess.CompletedProcess[str]:
        """Start the server as compose does, or with what Kubernetes adds to it."""
        command = [
            *_NATS["entrypoint"][:-1],
            self._etc / Path(_NATS["entrypoint"][-1]).name,
            self._etc / configuration,
            self.store,
            *more,
        ]
        assert _NATS["command"][1] == "/data"
        environment = {
            "PATH": f"{self._etc.parents[1] / 'bin'}:/bin:/usr/bin",
            **({"PID_FILE": pid_file} if pid_file else {}),
        }
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("has_empty", [False, True], ids=["new", "empty-folder"])
@pytest.mark.parametrize(
    ("before", "configuration", "after"),
    [("$G", "with-users.conf", "NODE"), ("NODE", "nats-server.conf", "$G")],
    ids=["to-accounts", "to-open"],
)
def test_streams_are_brought_to_the_account_that_the_server_will_have(
    tmp_path: Path, before: str, configuration: str, after: str, has_empty: bool
) -> None:
    """A ledger that an earlier start stored with other users is there after the next one, and a
    further start changes nothing.
    """
    started = _Started(tmp_path)
    started.users.write_text(accounts_configuration(dict.fromkeys(PRINCIPALS, "p0123456789abcdef")))
    started.make_stream(before)
    if has_empty:
        (started.store / "jetstream" / after / "streams").mkdir(parents=True)
    for _ in range(2):
        done = started.run(configuration)

        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == f"started with -c {tmp_path / 'etc' / 'nats' / configuration}"
        assert started.accounts() == {after: before}


@pytest.mark.parametrize(
    ("before", "configuration", "after"),
    [("$G", "with-users.conf", "CORE"), ("NODE", "with-users.conf", "CORE"), ("CORE", "nats-server.conf", "$G")],
    ids=["open-to-hub", "central-to-hub", "hub-to-open"],
)
def test_streams_are_brought_to_the_hubs_account_when_the_server_becomes_one(
    tmp_path: Path, before: str, configuration: str, after: str
) -> None:
    """In Kubernetes the account of a hub is named, and the server writes its PID where its
    neighbour reads it.
    """
    started = _Started(tmp_path)
    started.users.write_text(accounts_configuration(dict.fromkeys(PRINCIPALS, "p0123456789abcdef")))
    started.make_stream(before)
    done = started.run(configuration, "CORE", pid_file="/tmp/nats.pid")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].endswith(f"/{configuration} -P /tmp/nats.pid")
    assert started.accounts() == {after: before}


def test_nothing_is_moved_when_two_other_accounts_have_streams(tmp_path: Path) -> None:
    """Neither of two ledgers becomes the hub's by itself."""
    started = _Started(tmp_path)
    started.users.write_text(accounts_configuration(dict.fromkeys(PRINCIPALS, "p0123456789abcdef")))
    started.make_stream("$G")
    started.make_stream("NODE")

    done = started.run("with-users.conf", "CORE")

    assert (done.returncode, done.stdout) == (78, "")
    assert "streams of two accounts, $G and NODE" in done.stderr
    assert started.accounts() == {"$G": "$G", "NODE": "NODE"}


def test_server_is_not_started_when_two_accounts_have_streams(tmp_path: Path) -> None:
    """Nobody is given one of two ledgers without a word: it says what to do, and both stay."""
    started = _Started(tmp_path)
    started.users.write_text(accounts_configuration(dict.fromkeys(PRINCIPALS, "p0123456789abcdef")))
    started.make_stream("$G")
    started.make_stream("NODE")

    done = started.run("with-users.conf")

    assert (done.returncode, done.stdout) == (78, "")
    assert "streams of two accounts, NODE and $G" in done.stderr
    assert started.accounts() == {"$G": "$G", "NODE": "NODE"}


def test_streams_stay_when_users_share_one_account(tmp_path: Path) -> None:
    """A file of users that somebody made without accounts is taken as it is, and a first start has
    nothing to move.
    """
    started = _Started(tmp_path)
    started.users.write_text(server_configuration(dict.fromkeys(PRINCIPALS, "p0123456789abcdef")))
    assert started.run("with-users.conf").returncode == 0
    started.make_stream("$G")

    assert started.run("with-users.conf").returncode == 0
    assert started.accounts() == {"$G": "$G"}
