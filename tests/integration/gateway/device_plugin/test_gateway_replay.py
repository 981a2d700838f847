"""Answers of Allocate that kubelet replays weeks later: checked before each start of a container,
over restarts and reboots.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import IMPATIENT, Rig, make_rig
from support.node_plane import device
from topobus.gateway import boot
from topobus.gateway.containers.live_containers import LiveContainer, LiveContainers, why_lingering
from topobus.gateway.device_plugins.allocation_record import AllocationRecord
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.boot import BOOT_ID_FILE
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.errors import ConfigError
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
POD = Pod(name="p", uid="p-1", containers=(Container(name="main", resources={GPU: 1}),))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One GPU and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        async with made.kubelet:
            yield made


async def admit(rig: Rig) -> None:
    """Admit the pod, with the first start of its container."""
    await rig.kubelet.wait_for_resource(GPU, allocatable=1)
    answer = await rig.kubelet.admit(POD)
    assert isinstance(answer, Admission), answer


async def wait_for_new_plugin(rig: Rig) -> None:
    """Wait for the list of a gateway that was started anew: until kubelet has seen the end of the
    old one's, it counts that.
    """
    await rig.kubelet.wait_for_event("ListAndWatch.closed", subject=GPU)
    await rig.kubelet.wait_for_resource(GPU, allocatable=1)


async def start(rig: Rig) -> str:
    """Start the container (again) as kubelet does: with what it has in its checkpoint.

    The error, empty for none.
    """
    return await rig.kubelet.restart_container(POD, "main")


def store_path(rig: Rig) -> Path:
    """Where it is kept."""
    return Path(rig.settings.checkpoint_path).with_name("given.json")


@contextmanager
def rebooted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let the machine have another boot id."""
    with monkeypatch.context() as patch:
        other = Tree(HardwareSettings(root=str(tmp_path / "rebooted")))
        file = other.path(BOOT_ID_FILE)
        file.parent.mkdir(parents=True)
        file.write_text("another-boot\n")
        patch.setattr(boot, "LIVE", other)
        yield


async def test_container_starts_again_when_its_devices_are_what_they_were(rig: Rig) -> None:
    """Over a restart of the gateway, too.

    Each start makes the devices ready again, as after a reboot nobody else does.
    """
    async with rig.gateway():
        await admit(rig)
    async with rig.gateway():
        await wait_for_new_plugin(rig)
        assert await start(rig) == ""

    assert [request.devices for request in rig.plane.asks.requests("prepare")] == [("gpu-0",)] * 3
    assert list(json.loads(store_path(rig).read_text())["entries"]) == [next(iter(rig.plane.ledger.allocations))]


async def test_container_start_is_refused_when_its_device_was_renumbered(rig: Rig) -> None:
    """Kubelet replays /dev/nvidia0 for what is /dev/nvidia1 after a reboot: the error says what
    changed and what to do.
    """
    async with rig.gateway():
        await admit(rig)
    rig.plane.renumbered["gpu-0"] = "/dev/gpu-7"
    async with rig.gateway():
        await wait_for_new_plugin(rig)
        refused = await start(rig)
        del rig.plane.renumbered["gpu-0"]
        mended = await start(rig)

    assert (
        "gpu-0 changed since they were allocated to the container: device node /dev/gpu-0 is not its own any more"
        in refused
    )
    assert "Delete the pod" in refused
    assert mended == ""


async def test_container_start_is_refused_when_its_device_is_gone(rig: Rig) -> None:
    """A card that was pulled out while the node was down is told by name."""
    async with rig.gateway():
        await admit(rig)
    await rig.plane.show("gpu", device("gpu-1", 0))
    async with rig.gateway():
        await wait_for_new_plugin(rig)
        refused = await start(rig)

    assert "device gpu-0 cannot be used: it is held but no longer in the inventory" in refused


async def test_container_start_waits_for_the_service_after_a_reboot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Silence is no evidence while the machine runs.

    After a reboot it is the very moment when devices have other numbers.
    """
    async with rig.gateway(deadlines=IMPATIENT):
        await admit(rig)
        rig.plane.asks.hung.add("prepare")
        same_boot = await start(rig)
    with rebooted(monkeypatch, tmp_path):
        async with rig.gateway(deadlines=IMPATIENT):
            await wait_for_new_plugin(rig)
            unknown = await start(rig)
            rig.plane.asks.hung.clear()
            good = await start(rig)
            rig.plane.asks.hung.add("prepare")
            again = await start(rig)

    assert (same_boot, good, again) == ("", "", "")
    assert "code = Unavailable" in unknown


async def test_container_of_the_pods_name_holds_nothing_that_was_given_in_the_boot_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a reboot a kubelet with an old checkpoint gives the pod another device: its container is
    no reason to hold the first.
    """
    live = LiveContainer(id="a" * 64, name="main", namespace="default", pod="p", pod_uid="p-1")
    why = []
    for is_rebooted in (False, True):
        with rebooted(monkeypatch, tmp_path) if is_rebooted else nullcontext():
            async with rig.gateway():
                if is_rebooted:
                    await wait_for_new_plugin(rig)
                else:
                    await admit(rig)
            record = AllocationRecord.open(store_path(rig), lambda _: True)
        (allocation,) = rig.plane.ledger.allocations.values()
        named = structs.replace(allocation, pods=(Owner(kind=OwnerKind.POD, name="p", uid=""),))
        containers = LiveContainers()
        containers.is_of_earlier_boot = record.is_of_earlier_boot
        containers.made(live)
        why.append(why_lingering(named, containers))

    assert why == ["container main of pod default/p has it and has not ended, though kubelet has forgotten the pod", ""]


async def test_what_was_given_is_forgotten_when_nobody_holds_it_any_more(rig: Rig) -> None:
    """The file does not grow with every pod that ever was."""
    other = Pod(name="q", uid="q-1", containers=(Container(name="main", resources={GPU: 2}),))
    await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        assert isinstance(await rig.kubelet.admit(POD), Admission)
        await rig.kubelet.remove(POD)
        await rig.plane.asks.wait_for("released")
        assert isinstance(await rig.kubelet.admit(other), Admission)

    assert list(json.loads(store_path(rig).read_text())["entries"]) == list(rig.plane.ledger.allocations)


@pytest.mark.parametrize("text", ["{", '{"version": 2, "entries": {}}'], ids=["corrupt", "newer"])
def test_store_is_refused_when_it_cannot_be_read(tmp_path: Path, text: str) -> None:
    """What containers were given is never taken for nothing.

    The error names the file and the way out.
    """
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        AllocationRecord.open(path, lambda _: True)

    assert str(path) in refused.value.message
    assert "move it away" in refused.value.next_step
