"""What compose does with a NATS server that runs and does not work: its health check, run by a shell as the container's engine runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from topobus.contracts.streams import total_bytes

ROOT = Path(__file__).resolve().parents[3]
_NATS = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["nats"]


class _Container:
    """A place for the script: its counter, a wget that answers as the test says, and a process that stands for the server."""

    def __init__(self, folder: Path, server: int) -> None:
        kind, script = _NATS["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        assert script.count("kill 1;") == 1
        self._script = script.replace("$$", "$").replace("/dev/shm/sick", str(folder / "sick")).replace("kill 1;", f"kill {server};")
        self._bin = folder / "bin"
        self._bin.mkdir()

    def look(self, *, is_healthy: bool) -> int:
        """Run the check once; gives its exit status."""
        wget = self._bin / "wget"
        wget.write_text(f"#!/bin/sh\nexit {0 if is_healthy else 1}\n")
        wget.chmod(0o755)
        return subprocess.run(["/bin/sh", "-c", self._script], env={"PATH": f"{self._bin}:/bin:/usr/bin"}, check=False).returncode


@pytest.mark.parametrize(("was_healthy", "is_ended"), [(True, True), (False, False)], ids=["healthy-once", "never-healthy"])
def test_server_is_ended_when_it_was_healthy_and_stays_sick(tmp_path: Path, was_healthy: bool, is_ended: bool) -> None:
    """Sixteen sick looks in a row end a server that was healthy once; one that only takes long to start is left alone."""
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
    """Its configuration is the shipped one, whose store holds all streams, whatever is free on the disk at a restart."""
    assert "./deploy/nats:/etc/nats:ro" in _NATS["volumes"]
    assert _NATS["command"] == ["-c", "/etc/nats/${TOPOBUS_NATS_CONF:-with-users.conf}"]
    assert "include nats-server.conf\n" in (ROOT / "deploy/nats/with-users.conf").read_text(encoding="utf-8")
    assert "max_file_store: 4GB" in (ROOT / "deploy/nats/nats-server.conf").read_text(encoding="utf-8")
    assert "max_file_store: 4GB" in (ROOT / "deploy/kubernetes/nats.yaml").read_text(encoding="utf-8")
    assert total_bytes() < 4e9
