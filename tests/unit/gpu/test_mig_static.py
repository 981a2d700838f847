"""MIG instances that exist as devices: what they are, what a container gets, whose fault is whose,
and what is refused.

Through the real pynvml.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from support.driver_roots import VERSION, driver_root
from support.fake_mig import as_somebody
from support.fake_nvml import needs_gcc
from support.mig_node import MigNode, mig_node
from topobus.devicekit.driver import HostServices
from topobus.devicekit.settings import PartitionSettings
from topobus.formats.messages.messages import Prepared
from topobus.gateway.containers.rules.edit_limits import SHIPPED_RIGHTS, refuse_forbidden
from topobus.gpu.mig.nvml_mig import destroy_instance
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import DeviceRole
from topobus.values.outcome import Refusal
from topobus.values.partitions import Partitions, partitioned

pytestmark = needs_gcc


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MigNode]:
    """An H100 in MIG mode with no instance yet, and an L4."""
    with mig_node(tmp_path) as made:
        yield made


def test_instances_are_devices_beside_a_gpu_without_mig(node: MigNode) -> None:
    """Named by GPU, profile and place, with the attributes of NVIDIA's DRA driver.

    The GPU itself is kept, and the L4 is offered as ever.
    """
    node.make("3g.40gb", 4)
    node.make("1g.10gb+me", 0)

    devices = node.discover()

    half, slice_ = f"{node.parent}-mig-3g-40gb-4", f"{node.parent}-mig-1g-10gb-me-0"
    (other,) = set(devices) - {half, slice_}
    assert devices[other].model == "NVIDIA L4"
    assert devices[other].attributes["migEnabled"] is False
    assert {
        key: devices[half].attributes[key]
        for key in ("type", "profile", "parentUUID", "placement", "memorySlices", "computeSlices")
    } == {
        "type": "mig",
        "profile": "3g.40gb",
        "parentUUID": node.library.gpus[node.first].uuid,
        "placement": 4,
        "memorySlices": 4,
        "computeSlices": 3,
    }
    assert devices[half].attributes["uuid"] == devices[half].uuid
    assert devices[half].uuid.startswith("MIG-")
    assert (devices[half].parent, devices[half].partition_of, str(devices[half].pci)) == (
        node.parent,
        node.parent,
        node.first,
    )
    assert devices[half].capacity == {
        "memory": 40448 << 20, "multiprocessors": 60, "copyEngines": 3, "decoders": 3, "encoders": 0, "jpegEngines": 3, "ofaEngines": 0,  # noqa: E501
    }  # fmt: skip
    assert (devices[slice_].capacity["ofaEngines"], devices[slice_].attributes["profile"]) == (1, "1g.10gb+me")
    assert [(str(kept.pci), kept.role) for kept in node.discovery.kept] == [(node.first, DeviceRole.PARTITION_PARENT)]


def test_parts_of_an_instance_are_devices_of_their_own(node: MigNode) -> None:
    """Two compute instances of one GPU instance have a name, a UUID and capabilities each."""
    gi = node.make("3g.40gb", 0, computes=(0, 1))

    devices = [device for device in node.discover().values() if device.parent]
    edits = node.prepare(*devices)

    assert [device.name for device in devices] == [
        f"{node.parent}-mig-1c-3g-40gb-0-c0",
        f"{node.parent}-mig-2c-3g-40gb-0-c1",
    ]
    assert not isinstance(edits, Refusal)
    paths = [[each.path for each in edits[device.name].device_nodes] for device in devices]
    first = 3 + gi * 9
    assert paths == [
        ["/dev/nvidia0", f"/dev/nvidia-caps/nvidia-cap{first}", f"/dev/nvidia-caps/nvidia-cap{first + 1 + number}"]
        for number in (0, 1)
    ]


def test_container_gets_the_capabilities_of_its_instance_alone(node: MigNode) -> None:
    """The GPU's node, the two capabilities, the driver's shared nodes.

    A sibling's capabilities are not among them.
    """
    own, other = node.make("1g.10gb", 2), node.make("1g.10gb", 3)
    device = node.discover()[f"{node.parent}-mig-1g-10gb-2"]

    edits = node.prepare(device)

    assert not isinstance(edits, Refusal)
    nodes = [each.path for each in (*edits[device.name].device_nodes, *edits[""].device_nodes)]
    assert nodes == [
        "/dev/nvidia0",
        f"/dev/nvidia-caps/nvidia-cap{3 + own * 9}",
        f"/dev/nvidia-caps/nvidia-cap{4 + own * 9}",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    ]
    assert f"/dev/nvidia-caps/nvidia-cap{3 + other * 9}" not in nodes
    assert edits[device.name].env == {f"TOPOBUS_{device.name.upper().replace('-', '_')}": f"{node.first}/{own}/0"}
    assert (
        refuse_forbidden(
            "gpu", Prepared(edits={device.name: edits[device.name]}, common=edits[""]), SHIPPED_RIGHTS["gpu"]
        )
        is None
    )
    # Where NVIDIA's container runtime brings the files, it is told the instance; no
    # container gets a sibling by it.
    assert edits[""].env["NVIDIA_VISIBLE_DEVICES"] == device.uuid


def test_visible_devices_are_void_when_we_bring_the_files(node: MigNode, tmp_path: Path) -> None:
    """The driver's files come with the instance, and NVIDIA's container runtime has nothing to add:
    no sibling, and not the GPU.
    """
    node.make("1g.10gb", 2)
    node.recorded.write(
        "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Mon Sep  1"
    )
    files = DriverFilesSettings(root=str(driver_root(tmp_path / "driver")))
    node.tree = Tree(
        HardwareSettings(root=str(node.recorded.root), library_path=str(node.library.folder), driver_files=files)
    )
    device = node.discover()[f"{node.parent}-mig-1g-10gb-2"]

    edits = node.prepare(device)

    assert not isinstance(edits, Refusal)
    assert edits[""].env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert any(mount.container_path.endswith("libcuda.so.1") for mount in edits[""].mounts)


def test_access_files_are_believed_before_the_list(node: MigNode) -> None:
    """They name the node of an instance that exists.

    A driver that numbers otherwise than its list is followed.
    """
    gi = node.make("1g.10gb", 2)
    for path, minor in ((f"gi{gi}", 77), (f"gi{gi}/ci0", 78)):
        node.recorded.write(
            f"proc/driver/nvidia/capabilities/gpu0/mig/{path}/access",
            f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n",
        )
    device = node.discover()[f"{node.parent}-mig-1g-10gb-2"]

    edits = node.prepare(device)

    assert not isinstance(edits, Refusal)
    assert [each.path for each in edits[device.name].device_nodes] == [
        "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap77", "/dev/nvidia-caps/nvidia-cap78",
    ]  # fmt: skip


def test_prepare_refuses_an_instance_when_the_module_names_no_capability(node: MigNode) -> None:
    """A container would see the GPU and no device in it, so it is refused with the files that were
    looked at.
    """
    (node.recorded.root / "proc/driver/nvidia-caps/mig-minors").unlink()
    node.make("1g.10gb", 2)
    device = node.discover()[f"{node.parent}-mig-1g-10gb-2"]

    answer = node.prepare(device)

    assert isinstance(answer, Refusal)
    assert answer.reasons[0].code == "mig-capability-missing"


@pytest.mark.parametrize("is_created_again", [False, True])
def test_prepare_refuses_an_instance_that_is_not_the_one_that_was_offered(
    node: MigNode, is_created_again: bool
) -> None:
    """Destroyed since the last look, or destroyed and created again: the owner of the old one may
    have left something with that name.
    """
    gi = node.make("2g.20gb", 2)
    device = node.discover()[f"{node.parent}-mig-2g-20gb-2"]
    with as_somebody(node.library.folder):
        destroy_instance(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(node.first), gi)
    if is_created_again:
        node.make("2g.20gb", 2)

    answer = node.prepare(device)

    assert isinstance(answer, Refusal)
    assert answer.reasons[0].code == "device-not-offered"
    assert ("created again" in answer.reasons[0].message) is is_created_again


def test_fault_of_an_instance_is_its_own(node: MigNode) -> None:
    """An Xid with a GPU instance and a compute instance hits what shares that GPU instance, and
    neither its siblings nor the other GPU.
    """
    gi = node.make("3g.40gb", 0, computes=(0, 1))
    node.make("3g.40gb", 4)
    devices = list(node.discover().values())
    node.library.raise_xid(node.first, 109, gi, 1)

    seen = node.observe(devices)

    assert seen == {
        f"{node.parent}-mig-1c-3g-40gb-0-c0": [("xid", "109")],
        f"{node.parent}-mig-2c-3g-40gb-0-c1": [("xid", "109")],
    }


@pytest.mark.parametrize(("xid", "instance"), [(95, True), (119, True), (79, False), (109, False)])
def test_fault_of_the_gpu_is_every_instances(node: MigNode, xid: int, instance: bool) -> None:
    """An uncontained memory error or a dead firmware processor is the whole GPU's also when the
    driver names an instance, and any error is for which it names none.
    """
    gi = node.make("3g.40gb", 0)
    node.make("1g.10gb", 6)
    devices = list(node.discover().values())
    node.library.raise_xid(node.first, xid, *((gi, 0) if instance else ()))

    seen = node.observe(devices)

    assert seen == {f"{node.parent}-mig-{part}": [("xid", str(xid))] for part in ("3g-40gb-0", "1g-10gb-6")}


def test_instance_made_after_the_last_look_has_its_fault(node: MigNode) -> None:
    """A device keeps its name when its instance is made anew with another number.

    The fault finds it.
    """
    node.make("1g.10gb", 6)
    devices = list(node.discover().values())
    node.driver._mig.forget()
    node.library.raise_xid(node.first, 109, 13, 0)

    assert node.observe(devices) == {f"{node.parent}-mig-1g-10gb-6": [("xid", "109")]}


def test_memory_errors_of_the_gpu_are_told_of_every_instance(node: MigNode) -> None:
    """NVML counts uncorrected errors for the whole GPU."""
    node.make("1g.10gb", 0)
    node.make("1g.10gb", 1)
    devices = list(node.discover().values())
    node.observe(devices)
    node.library.set(node.first, rows=(0, 1, 1, 0))

    seen = node.observe(devices)

    assert seen == {f"{node.parent}-mig-1g-10gb-{start}": [("row-remap-pending", "")] for start in (0, 1)}


def test_use_of_an_instance_is_its_own(node: MigNode) -> None:
    """A process of the sibling instance is no leftover of this one."""
    own, other = node.make("1g.10gb", 0), node.make("1g.10gb", 1)
    devices = node.discover()
    node.library.set(node.first, processes=((4711, 1 << 30, own, 0), (4712, 2 << 30, other, 0)))

    use = node.driver.use(node.tree, devices[f"{node.parent}-mig-1g-10gb-1"])

    assert ([process.pid for process in use.processes], use.used_bytes) == ([4712], 2 << 30)


def test_parent_is_offered_beside_its_instances_when_parents_are_counted(node: MigNode) -> None:
    """It has the capabilities of all of them, and is refused when none is left."""
    gis = [node.make("1g.10gb", start) for start in (0, 1)]
    node.driver.configure(HostServices(partitions=PartitionSettings(parents="counted")))
    devices = node.discover()

    good, sets, faults = partitioned(list(devices.values()), ())
    edits = node.prepare(devices[node.parent])

    parts = [device.name for device in good if device.partition_of == node.parent]
    assert (faults, len(parts)) == ({}, 2)
    assert Partitions(good, sets).shortage(parts[:1], parts[1:]) is None
    assert Partitions(good, sets).shortage(parts[:1], [node.parent]) is not None
    assert devices[node.parent].role is DeviceRole.PARTITION_PARENT
    assert not isinstance(edits, Refusal)
    wanted = [f"/dev/nvidia-caps/nvidia-cap{number}" for gi in gis for number in (3 + gi * 9, 4 + gi * 9)]
    assert [each.path for each in edits[node.parent].device_nodes] == ["/dev/nvidia0", *wanted]


def test_instances_have_names_when_nvml_tells_their_places_to_root_alone(node: MigNode) -> None:
    """By the number of the GPU instance, since the place is not known."""
    with_number = node.make("2g.20gb", 2)
    no_permission = pynvml.NVML_ERROR_NO_PERMISSION
    node.library.set(
        node.first,
        refuses=(("nvmlDeviceGetGpuInstanceById", no_permission), ("nvmlDeviceGetGpuInstances", no_permission)),
    )

    devices = [device for device in node.discover().values() if device.parent]

    assert [device.name for device in devices] == [f"{node.parent}-mig-2g-20gb-gi{with_number}-ci0"]
    assert not isinstance(node.prepare(*devices), Refusal)
