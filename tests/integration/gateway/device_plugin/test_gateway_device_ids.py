"""A pool whose devices kubelet knows by PCI address: what pods, Multus and the ledger see, over
restarts of both sides.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.looks import until
from support.node_plane import device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.device import Device
from topobus.values.idset import NodeSet
from topobus.values.pci import PciAddress

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

NIC = "topobus.dev/nic"
ONE = Pod(name="one", namespace="default", uid="p-1", containers=(Container(name="main", resources={NIC: 1}),))
TWO = Pod(name="two", namespace="default", uid="p-2", containers=(Container(name="main", resources={NIC: 2}),))
ADDRESSES = ("0000:3b:00.1", "0000:3b:00.2", "0000:5e:00.1")


def function(address: str, node: int) -> Device:
    """A virtual function of the card's first."""
    name = "nic-" + address.replace(":", "-").replace(".", "-")
    parent = name[:-1] + "0"
    return structs.replace(device(name, node), pci=PciAddress.parse(address), parent=parent)


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Three virtual functions, and a running kubelet."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        await made.plane.show("nic", *(function(address, int(address.startswith("0000:5e"))) for address in ADDRESSES))
        made.settings = structs.replace(
            made.settings,
            ids={"nic": "pci"},
            device_info_dir=str(made.root / "devinfo"),
            default_exposure="device-plugin",
        )
        async with made.kubelet:
            yield made


def files(rig: Rig) -> dict[str, dict[str, object]]:
    """Multus' files."""
    return {path.name: json.loads(path.read_text()) for path in sorted((rig.root / "devinfo").glob("*"))}


async def admit(rig: Rig, pod: Pod) -> Admission:
    """Admit a pod."""
    answer = await rig.kubelet.admit(pod)
    assert isinstance(answer, Admission), answer
    return answer


async def until_gone(folder: Path, name: str) -> None:
    """Wait until a file is removed."""
    await until(lambda: not (folder / name).exists())


async def test_pod_has_addresses_when_the_pool_is_named_by_them(rig: Rig) -> None:
    """Kubelet's ids, both variables, a file a device; the ledger has our names."""
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(NIC, allocatable=3)
        listed = rig.kubelet.devices(NIC)
        grant = (await admit(rig, TWO)).container("main")
        pods = await rig.pods()

    # Two of one NUMA node: the choice of the topology service came back as kubelet's ids.
    assert sorted(listed) == list(ADDRESSES)
    assert grant.devices[NIC] == ("0000:3b:00.1", "0000:3b:00.2")
    assert grant.edits.env["PCIDEVICE_TOPOBUS_DEV_NIC"] == "0000:3b:00.1,0000:3b:00.2"
    assert sorted(json.loads(grant.edits.env["PCIDEVICE_TOPOBUS_DEV_NIC_INFO"])) == ["0000:3b:00.1", "0000:3b:00.2"]
    assert files(rig)["topobus.dev-nic-0000:3b:00.1-device.json"] == {
        "type": "pci",
        "version": "1.1.0",
        "pci": {"pci-address": "0000:3b:00.1", "pf-pci-address": "0000:3b:00.0"},
    }
    assert [held.name for held in pods.containers[0].devices] == ["nic-0000-3b-00-1", "nic-0000-3b-00-2"]
    assert pods.containers[0].devices[0].numa_nodes == NodeSet(0)


async def test_device_stays_held_and_its_file_stays_when_the_gateway_starts_again(rig: Rig) -> None:
    """PodResources names addresses: read as names, nothing is released while the pod runs.

    All of it goes with the pod.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(NIC, allocatable=3)
        address = (await admit(rig, ONE)).container("main").devices[NIC][0]
    name = f"topobus.dev-nic-{address}-device.json"
    (rig.root / "devinfo" / "topobus.dev-nic-0000:99:00.0-device.json").write_text("{}")
    (rig.root / "devinfo" / "intel.com-sriov-0000:99:00.0-device.json").write_text("{}")

    async with rig.gateway():
        await until_gone(rig.root / "devinfo", "topobus.dev-nic-0000:99:00.0-device.json")
        during = (sorted(files(rig)), [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()])
        # Until kubelet has seen the end of the old gateway's list, it counts that.
        await rig.kubelet.wait_for_event("ListAndWatch.closed", subject=NIC)
        await rig.kubelet.wait_for_resource(NIC, allocatable=3)
        restarted = await rig.kubelet.restart_container(ONE, "main")
        await rig.kubelet.remove(ONE)
        await until_gone(rig.root / "devinfo", name)
        await rig.plane.asks.wait_for("released")
        after = (sorted(files(rig)), rig.plane.ledger.allocations)

    assert restarted == ""
    assert during == (["intel.com-sriov-0000:99:00.0-device.json", name], [NIC])
    assert after == (["intel.com-sriov-0000:99:00.0-device.json"], {})


async def test_pod_runs_when_multus_folder_cannot_be_written(rig: Rig) -> None:
    """A pod without Multus needs no file."""
    (rig.root / "devinfo").write_text("no folder")

    async with rig.gateway():
        await rig.kubelet.wait_for_resource(NIC, allocatable=3)
        grant = (await admit(rig, ONE)).container("main")

    assert "PCIDEVICE_TOPOBUS_DEV_NIC" in grant.edits.env
