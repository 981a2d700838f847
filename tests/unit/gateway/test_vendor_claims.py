"""Claims as the users of the vendors' DRA drivers write them, allocated from our slices: each gets
the devices that the vendor's sample promises.

The machines are simulated or captured ones, read by the real drivers and shown by the gateway with
all profiles on; the classes are those of examples/claims/vendor-classes.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from support.driver_roots import VERSION
from support.fake_mig import A100_40
from support.fake_nvml import GIB, FakeGpu, fake_nvml, needs_gcc
from support.kfd_machines import KfdMachine
from support.mig_node import mig_node
from support.sysfs_trees import write
from support.why_objects import asks, card, nvidia_gpus, partitions, slice_of
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, ClaimToAllocate, Node
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.pool_slices import pool_slices
from topobus.formats.kubernetes.resource import ClaimSpec, DeviceClassSpec, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.kubernetes.slices import slice_device
from topobus.gateway.config import GatewaySettings
from topobus.gpu.plugins.amd import AmdDriver
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Device
from topobus.values.idset import NodeSet
from topobus.values.pci import PciAddress

ROOT = Path(__file__).parents[3]
NODE = "node-1"
SETTINGS = GatewaySettings(node=NODE, profiles=("nvidia", "amd", "intel", "intel-sriov"))
CASES: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/data/vendor_claims/claims.yaml").read_text())


def nvidia(folder: Path) -> Sequence[Device]:
    """An H100 with 80 GiB and an L4 with 24 GiB, described by NVML and the kernel module."""
    recorded = build(ROOT / "tests/data/profiles/h100-pair.toml", folder / "machine")
    first, second = recorded.pci("h100")
    write_version(recorded.root)
    other = FakeGpu(address=second, name="NVIDIA L4", uuid="GPU-l4", minor=1, total_bytes=24 * GIB)
    with fake_nvml(folder / "lib", FakeGpu(address=first), other) as library:
        tree = Tree(HardwareSettings(root=str(recorded.root), library_path=str(library.folder)))
        return NvidiaDriver().discover(tree, read_machine(tree, NODE)).devices


def nvidia_mig(folder: Path) -> Sequence[Device]:
    """An A100 that is cut into four instances, and a whole L4."""
    with mig_node(folder, A100_40) as node:
        write_version(node.recorded.root)
        for profile, start in (("1g.5gb", 0), ("1g.5gb", 1), ("2g.10gb", 2), ("3g.20gb", 4)):
            node.make(profile, start)
        return tuple(node.discover().values())


def amd_partitions(folder: Path) -> Sequence[Device]:
    """Two MI300X, each in eight parts."""
    machine = KfdMachine(folder, "mi300x-cpx", mode="CPX", memory_mode="NPS1", most_cards=2)
    return AmdDriver().discover(machine.tree, machine.machine).devices


def amd(folder: Path) -> Sequence[Device]:
    """Four MI210, each on a NUMA node of its own."""
    tree = epyc(folder)
    return AmdDriver().discover(tree, read_machine(tree, NODE)).devices


def intel(folder: Path) -> Sequence[Device]:
    """A Max 1550 and a Flex 170 as the Intel driver describes them."""
    models = {
        "3a": ("Intel Data Center GPU Max 1550", "0bd5", 128),
        "3b": ("Intel Data Center GPU Flex 170", "56c0", 16),
    }
    return tuple(
        Device(
            name=f"gpu-0000-{bus}-00-0",
            device_class="gpu",
            vendor="intel",
            model=model,
            pci=PciAddress.parse(f"0000:{bus}:00.0"),
            pcie_root=f"pci0000:{bus}",
            numa_nodes=NodeSet(0),
            attributes={"type": "gpu", "kernelDriver": "i915", "pciID": f"8086:{device_id}"},
            capacity={"memory": memory_gib * GIB},
        )
        for bus, (model, device_id, memory_gib) in models.items()
    )


def sriov(folder: Path) -> Sequence[Device]:
    """Two E810 with four virtual functions each, those of the second one in a pool."""
    tree = epyc(folder)
    return tuple(
        structs.replace(device, pool="nic-eth1-resource" if device.parent == "nic-0000-c2-00-0" else "")
        for device in PciNetdevDriver().discover(tree, read_machine(tree, NODE)).devices
    )


MACHINES: dict[str, Callable[[Path], Sequence[Device]]] = {
    "nvidia": nvidia,
    "nvidia-mig": nvidia_mig,
    "amd-partitions": amd_partitions,
    "amd": amd,
    "intel": intel,
    "sriov": sriov,
}


def epyc(folder: Path) -> Tree:
    """The simulated machine with MI210 and E810 cards."""
    return Tree(HardwareSettings(root=str(build("epyc-8numa", folder / "machine").root)))


def write_version(root: Path) -> None:
    """Give the machine NVIDIA's kernel module."""
    write(root, {"proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  now"})


def slices_of(devices: Sequence[Device]) -> tuple[Slice, ...]:
    """The slices that the gateway publishes."""
    shown = [device for device in map(SETTINGS.shown, devices) if device is not None]
    specs = pool_slices(NODE, [slice_device(device) for device in shown])
    return tuple(Slice(f"{index:03x}", spec) for index, spec in specs.items())


def classes(file: str = "claims/vendor-classes.yaml") -> dict[str, DeviceClassSpec]:
    """The example classes of a file by their names."""
    documents = yaml.safe_load_all((ROOT / "examples" / file).read_text())
    return {
        document["metadata"]["name"]: read_as(document["spec"], DeviceClassSpec, where="class")
        for document in documents
    }


@needs_gcc
@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_sample_gets_the_devices_that_it_promises_when_profiles_are_on(case: dict[str, Any], tmp_path: Path) -> None:
    """A claim written for a vendor's driver is served unchanged, and refused where no device fits."""
    slices = slices_of(MACHINES[case["machine"]](tmp_path))
    spec = {"devices": {"requests": case["requests"], "constraints": case.get("constraints", [])}}
    wanted = ClaimToAllocate("default/sample", read_as(spec, ClaimSpec, where="claim"))

    outcome = allocate(
        AllocationInput(node=Node(NODE), claims=(wanted,), classes=classes(), slices=slices), CelCompiler()
    )

    results = outcome.results[0].devices.results if isinstance(outcome, Allocated) else ()
    assert [granted.device for granted in results] == case["gets"], outcome


@needs_gcc
@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES if "nvidia" in case["machine"]])
def test_sample_gets_the_same_devices_by_the_classes_of_a_migration(case: dict[str, Any], tmp_path: Path) -> None:
    """While nodes have one of two drivers, our nodes serve NVIDIA's claims as they do afterwards."""
    slices = slices_of(MACHINES[case["machine"]](tmp_path))
    spec = {"devices": {"requests": case["requests"], "constraints": case.get("constraints", [])}}
    wanted = ClaimToAllocate("default/sample", read_as(spec, ClaimSpec, where="claim"))
    both = classes("migration/nvidia-classes.yaml")

    outcome = allocate(AllocationInput(node=Node(NODE), claims=(wanted,), classes=both, slices=slices), CelCompiler())

    results = outcome.results[0].devices.results if isinstance(outcome, Allocated) else ()
    assert [granted.device for granted in results] == case["gets"], outcome


def test_vendors_own_devices_are_served_by_the_classes_of_a_migration() -> None:
    """A node that has NVIDIA's driver: its GPU and its MIG instance, each by its class."""
    published = (
        slice_of("gpu.nvidia.com", NODE, [*nvidia_gpus(1), *partitions("1g.10gb")], slices=2),
        slice_of("gpu.nvidia.com", NODE, counters=[card()], slices=2),
    )
    slices = tuple(
        Slice(f"{index}", read_as(each["spec"], SliceSpec, where="slice")) for index, each in enumerate(published)
    )
    requests = [asks("gpu.nvidia.com"), asks("mig.nvidia.com")]
    wanted = ClaimToAllocate("default/sample", read_as({"devices": {"requests": requests}}, ClaimSpec, where="claim"))

    outcome = allocate(
        AllocationInput(
            node=Node(NODE), claims=(wanted,), classes=classes("migration/nvidia-classes.yaml"), slices=slices
        ),
        CelCompiler(),
    )

    assert isinstance(outcome, Allocated), outcome
    assert [granted.device for granted in outcome.results[0].devices.results] == ["gpu-0", "gpu-0-mig-1g-10gb-0"]


@needs_gcc
@pytest.mark.parametrize("machine", MACHINES)
def test_server_accepts_the_slices_when_profiles_are_on(machine: str, tmp_path: Path) -> None:
    """The vendor's names break no limit of the API, whatever a device has already."""
    slices = slices_of(MACHINES[machine](tmp_path))

    assert [problem for published in slices for problem in check_slice(published.spec)] == []
