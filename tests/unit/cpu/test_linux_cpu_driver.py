"""CPUs as devices: which ones, how described, what when one goes offline, and what a container
learns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from topobus.cpu.plugins.linux_cpu import LinuxCpuDriver
from topobus.devicekit.driver import PrepareContext
from topobus.formats.messages.codec import encode
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.device import Inventory
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

CONTEXT = PrepareContext(owner=Owner(kind=OwnerKind.CLAIM, name="c", uid="u"))
EMPTY = Tree(HardwareSettings(root="/nonexistent"))


def machine(*offline: int, cores: int = 2) -> Machine:
    """Make a machine of one socket whose CPUs n and n + cores are siblings.

    Topology of offline CPUs is hidden, as Linux does.
    """
    cpus = tuple(
        Cpu(id=index, online=False)
        if index in offline
        else Cpu(id=index, online=True, core=index % cores, socket=0, die=0, numa_node=0, l3=0, kind="performance")
        for index in range(2 * cores)
    )
    online = CpuSet.of(cpu.id for cpu in cpus if cpu.online)
    return Machine(node="n", numa_nodes=(NumaNode(id=0, cpus=online, memory_bytes=1),), cpus=cpus)


def tree(root: Path, online: str) -> Tree:
    """Make a tree that lists these CPUs as online."""
    path = root / "sys/devices/system/cpu/online"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(online, encoding="utf-8")
    return Tree(HardwareSettings(root=str(root)))


def test_discover_lists_every_online_cpu_with_its_place() -> None:
    """Each device tells the CPU, its core, cache, socket, node and siblings."""
    devices = LinuxCpuDriver().discover(EMPTY, machine()).devices

    assert [device.name for device in devices] == ["cpu-0", "cpu-1", "cpu-2", "cpu-3"]
    last = devices[-1]
    assert (last.cpu, last.core, last.socket, last.l3, last.numa_nodes) == (3, 1, 0, 0, NodeSet(0))
    assert last.attributes == {
        "core": 1,
        "socket": 0,
        "die": 0,
        "l3": 0,
        "numaNode": 0,
        "kind": "performance",
        "siblings": "1,3",
    }


def test_discover_leaves_unknown_facts_out_when_the_machine_does_not_tell() -> None:
    """A CPU without socket, cache or node has no such attribute: never -1, never 0."""
    bare = Machine(node="n", numa_nodes=(), cpus=(Cpu(id=0, online=True),))

    (device,) = LinuxCpuDriver().discover(EMPTY, bare).devices

    assert (device.attributes, device.numa_nodes) == ({}, None)


def test_discover_lists_no_cpu_that_is_offline() -> None:
    """With SMT switched off, half of the CPUs are no devices and nobody is alarmed."""
    assert [device.name for device in LinuxCpuDriver().discover(EMPTY, machine(2, 3)).devices] == ["cpu-0", "cpu-1"]


def test_observe_is_unhealthy_when_a_known_cpu_is_offline(tmp_path: Path) -> None:
    """Presence is the dimension, and the neighbours are healthy."""
    driver = LinuxCpuDriver()
    devices = driver.discover(EMPTY, machine()).devices

    seen = driver.observe(tree(tmp_path, "0-2"), devices)

    assert {
        name: [(observation.dimension, observation.state, observation.reason) for observation in observations]
        for name, observations in seen.items()
    } == {"cpu-3": [(Dimension.PRESENCE, HealthState.UNHEALTHY, "device-gone")]}


def test_each_look_sees_which_cpus_are_online_then(tmp_path: Path) -> None:
    """Looks at the same devices share what does not change between them; the list of CPUs may."""
    driver = LinuxCpuDriver()
    devices = driver.discover(EMPTY, machine()).devices

    seen = [list(driver.observe(tree(tmp_path, online), devices)) for online in ("0-3", "0-2", "0-2", "0,2-3", "0-3")]

    assert seen == [[], ["cpu-3"], ["cpu-3"], ["cpu-1"], []]


def test_observe_finds_nothing_when_the_tree_does_not_list_cpus(tmp_path: Path) -> None:
    """A recording without the file is no evidence against any CPU."""
    driver = LinuxCpuDriver()

    assert driver.observe(Tree(HardwareSettings(root=str(tmp_path))), driver.discover(EMPTY, machine()).devices) == {}


def test_observe_names_the_file_when_it_is_garbled(tmp_path: Path) -> None:
    """A list that is none is an error with path and text, for the host to
    make the devices Unknown.
    """
    driver = LinuxCpuDriver()

    with pytest.raises(HardwareError, match=r"cpu/online.*0-x"):
        driver.observe(tree(tmp_path, "0-x"), driver.discover(EMPTY, machine()).devices)


def test_prepare_tells_the_list_and_each_cpu(tmp_path: Path) -> None:
    """The container reads all its CPUs in one variable.

    Each CPU has edits of its own, as CDI demands.
    """
    driver = LinuxCpuDriver()
    devices = driver.discover(EMPTY, machine()).devices

    edits = driver.prepare(tree(tmp_path, "0-3"), devices[1:], CONTEXT)

    assert not isinstance(edits, Refusal)
    assert edits[""].env == {"TOPOBUS_CPUS": "1-3"}
    assert {name: edit.env for name, edit in edits.items() if name} == {
        f"cpu-{cpu}": {f"TOPOBUS_CPU_{cpu}": "1"} for cpu in (1, 2, 3)
    }


def test_prepare_refuses_when_a_cpu_is_offline(tmp_path: Path) -> None:
    """A container is never told of a CPU that cannot run it."""
    driver = LinuxCpuDriver()

    refusal = driver.prepare(tree(tmp_path, "0-2"), driver.discover(EMPTY, machine()).devices, CONTEXT)

    assert isinstance(refusal, Refusal)
    assert [(reason.code, reason.facts["cpus"]) for reason in refusal.reasons] == [("cpu-offline", "3")]


def test_inventory_stays_far_below_the_bucket_s_limit_when_the_machine_has_224_cpus() -> None:
    """The demo machine's CPUs fit into half of what one value of the bucket may hold."""
    devices = LinuxCpuDriver().discover(EMPTY, machine(cores=112)).devices

    size = len(encode(Inventory(node="demo-node", device_class="cpu", generation=1, devices=tuple(devices))))

    assert len(devices) == 224
    assert size < 256 * 1024
