"""The gateway as its own process: how it ends when its state cannot be used, and how two of them
hand the node over, also by SIGKILL.
"""

# ruff: noqa: ASYNC240  (a test may read a small file)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, claim, device
from support.running import Service, service
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER

pytestmark = pytest.mark.integration

EX_CONFIG = 78


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A GPU, a claim for it and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        await made.plane.store(claim("training", "u-1", "gpu-0"))
        async with made.kubelet:
            yield made


def settings(rig: Rig, instance: str = "") -> Mapping[str, str]:
    """The rig's folders as a process's environment."""
    kubelet = rig.settings.kubelet
    return {
        "TOPOBUS_ALL__NODE": NODE,
        "TOPOBUS_GATEWAY__INSTANCE": instance,
        "TOPOBUS_GATEWAY__KUBELET__DEVICE_PLUGIN_DIR": kubelet.device_plugin_dir,
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_REGISTRY_DIR": kubelet.plugins_registry_dir,
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR": kubelet.plugins_dir,
        "TOPOBUS_GATEWAY__POD_RESOURCES_SOCKET": rig.settings.pod_resources_socket,
        "TOPOBUS_GATEWAY__RUNTIME__SOCKET": rig.settings.runtime.socket,
        "TOPOBUS_GATEWAY__CDI_DIR": rig.settings.cdi_dir,
        "TOPOBUS_GATEWAY__CHECKPOINT_PATH": rig.settings.checkpoint_path,
        "TOPOBUS_GATEWAY__EDITS": msgspec.json.encode(rig.settings.edits).decode(),
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{broken", "cannot read this"),
        ('{"version":2,"entries":[]}', "has version 2, which a newer gateway wrote; wanted 1"),
    ],
)
async def test_process_ends_with_78_and_one_line_when_its_checkpoint_cannot_be_used(
    rig: Rig, text: str, part: str
) -> None:
    """An operator reads which file it is, what is wrong and what to do.

    No traceback, and the file is as it was.
    """
    path = Path(rig.settings.checkpoint_path)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    async with service("gateway", rig.url, settings(rig)) as gateway:
        status = await asyncio.wait_for(gateway.process.wait(), 60)
    (said,) = [line for line in gateway.raw if line.startswith("topobus-gateway: ")]

    assert status == EX_CONFIG
    assert str(path) in said
    assert part in said
    assert "move it away" in said
    assert not [line for line in gateway.raw if "Traceback" in line]
    assert path.read_text(encoding="utf-8") == text


async def test_second_process_ends_at_once_when_it_could_not_take_over(rig: Rig) -> None:
    """A process that cannot read the checkpoint stops the roll-over: the gateway that works is
    never ended for it.
    """
    training = ClaimReference(name="training", uid="u-1", drivers=(DRIVER,))
    async with service("gateway", rig.url, settings(rig, "pod-1")) as first:
        await rig.kubelet.wait_for_driver(DRIVER)
        await first.until_ready()
        Path(rig.settings.checkpoint_path).write_text('{"version":2,"entries":[]}', encoding="utf-8")
        async with service("gateway", rig.url, settings(rig, "pod-2")) as second:
            status = await asyncio.wait_for(second.process.wait(), 60)
        (prepared,) = await rig.kubelet.prepare_claims([training])

    assert status == EX_CONFIG
    assert any("has version 2, which a newer gateway wrote" in line for line in second.raw)
    assert not [line for line in second.lines if line.get("event") == "driver.served"]
    assert prepared.error == ""


async def passes_on(gateway: Service) -> None:
    """Wait until a gateway stands by and is ready."""
    await gateway.logged("twin.found")
    await gateway.logged("driver.registered")
    await gateway.until_ready()


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
async def test_second_process_goes_on_when_the_first_one_is_gone(rig: Rig, *, is_killed: bool) -> None:
    """Ready beside the first one, it has the node as soon as that has ended, by SIGTERM or SIGKILL.

    Claims and sockets are its own.
    """
    training = ClaimReference(name="training", uid="u-1", drivers=(DRIVER,))
    async with service("gateway", rig.url, settings(rig, "pod-1")) as first:
        await rig.kubelet.wait_for_driver(DRIVER)
        async with service("gateway", rig.url, settings(rig, "pod-2")) as second:
            await passes_on(second)
            (before,) = await rig.kubelet.prepare_claims([training])
            if is_killed:
                first.process.kill()
            else:
                first.process.terminate()
            status = await asyncio.wait_for(first.process.wait(), 60)
            (after,) = await rig.kubelet.prepare_claims([training])
            await second.logged("twin.gone")
            await rig.kubelet.wait_for_event("Register.ok", count=2)
            left = sorted(path.name for path in (rig.kubelet.plugins_dir / DRIVER).iterdir())
            await second.until_ready()
            entries = Checkpoint.load(Path(rig.settings.checkpoint_path)).entries()

    assert (status, before.error) == (-9 if is_killed else 0, "")
    assert after == before
    assert [claim_entry.uid for claim_entry in entries if claim_entry.is_running] == ["u-1"]
    assert left == ["dra-pod-2.sock"]
