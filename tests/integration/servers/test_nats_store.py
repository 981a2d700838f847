"""The store of `topobus up` on disks of their own: sized by the disk, and working again by itself
after the disk was full.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.values import inventory
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.local_system.nats_store import probe_jetstream, size_store, write_config
from topobus.local_system.supervision import ProgramState, Supervisor
from topobus.local_system.system import Layout, start_nats
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.values.errors import ConfigError, PeerUnavailable

pytestmark = pytest.mark.integration

_LIMIT_S = 120.0
_KEY = {"node": "n1", "device_class": "gpu"}


@contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Path]:
    """Mount a disk of this size.

    A machine that does not let us fails the test: nothing else fills a
    disk without filling somebody's.
    """
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(
            f"this test needs the right to mount a tmpfs (run it as root): {done.stderr.strip()}", pytrace=False
        )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for block in (1024 * 1024, 4096, 1):
            try:
                while file.write(b"x" * block) == block:
                    pass
            except OSError:
                continue
    return ballast


async def test_nats_stores_again_when_its_full_disk_has_room_again(
    nats_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server makes of a full disk, it stores again once there is room, what it had is
    there, and nobody had to restart it.
    """
    monkeypatch.setenv("TOPOBUS_NATS_SERVER", str(nats_binary))
    with small_disk(tmp_path / "disk", 400) as disk:
        layout = Layout(state=disk)
        layout.nats.mkdir()
        size = size_store(layout.nats)
        async with Supervisor(tmp_path / "logs", stop_grace_s=1.0) as supervisor:
            url = await start_nats(supervisor, layout, size, lambda _: None, is_open=True)
            async with Bus.session(NatsSettings(url=url, timeout_s=2.0, store_mib=size.store_mib), name="test") as bus:
                await bus.provision()
                await bus.put(INVENTORY, inventory(1), **_KEY)
                ballast = fill(disk)
                await _until_refused(bus)
                ballast.unlink()
                async with asyncio.timeout(_LIMIT_S):
                    while not await _is_stored(bus):
                        # What failed was given up by a timeout of its own; the
                        # server's return is what is waited for.
                        await bus.wait_connected()
                    async for _ in supervisor.changes(at_least_every_s=1.0):
                        if supervisor.status("nats").state is ProgramState.READY:
                            break

                assert await bus.get(INVENTORY, node="n2", device_class="gpu") is not None
                assert await bus.get(INVENTORY, **_KEY) is not None


async def _until_refused(bus: Bus) -> None:
    for number in range(100):
        try:
            await bus.put(INVENTORY, inventory(number, padding_bytes=400_000), **_KEY)
        except PeerUnavailable:
            return
    raise AssertionError("a full disk took everything")


async def _is_stored(bus: Bus) -> bool:
    try:
        await bus.put(INVENTORY, inventory(7, node="n2"), node="n2", device_class="gpu")
    except PeerUnavailable:
        return False
    return True


async def test_probe_fails_when_the_server_greets_and_does_not_answer(own_nats_server: NatsServer) -> None:
    """A greeting is no answer: a server that stands still, has no JetStream or no monitoring does
    not store.
    """
    assert not await probe_jetstream("127.0.0.1", own_nats_server.port, free_port())

    own_nats_server.pause()
    is_storing = await probe_jetstream("127.0.0.1", own_nats_server.port, free_port())
    own_nats_server.resume()

    assert not is_storing


def test_store_is_sized_by_the_disk_when_the_disk_is_small(tmp_path: Path) -> None:
    """A small disk gives smaller streams, the next run on it no smaller ones, and a disk that is
    too small is named with what is there and wanted.
    """
    with small_disk(tmp_path / "small", 1024) as disk:
        small = size_store(disk)
        write_config(disk, small)
        ballast = fill(disk)
        again = size_store(disk)
        ballast.unlink()
    with (
        small_disk(tmp_path / "tiny", 64) as disk,
        pytest.raises(ConfigError, match=r"tiny: its disk has 6\d MiB for it, wanted at least 341 MiB"),
    ):
        size_store(disk)

    assert 0 < small.store_mib * 2**20 < small.max_file_store < 1024 * 2**20
    assert again == small
