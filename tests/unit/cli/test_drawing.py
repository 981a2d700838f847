"""The drawing of a machine."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.printed import printed
from topobus.cli.render.machine_drawing import draw_machine
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Cpu, L3Cache, Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind


def machine_of(nodes: int, cores: int, *, sockets: int = 2, memory_only: int = 0) -> Machine:
    """Build a machine with two threads a core, numbered as Linux does: first all first threads,
    then all second ones.
    """
    total = nodes * cores
    cpus = tuple(
        Cpu(
            id=number,
            online=True,
            core=number % total,
            socket=(number % total) * sockets // total,
            numa_node=(number % total) // cores,
        )
        for number in range(2 * total)
    )
    return Machine(
        node="n1",
        numa_nodes=tuple(
            NumaNode(id=node, cpus=CpuSet.of(cpu.id for cpu in cpus if cpu.numa_node == node), memory_bytes=64 << 30)
            for node in range(nodes + memory_only)
        ),
        cpus=cpus,
    )


def gpu(bus: int, node: int | None = 0, *, switch: int | None = 0x16, health: DeviceHealth | None = None) -> Device:
    """Build a GPU below a switch of root complex 0000:15."""
    return Device(
        name=f"gpu-0000-{bus:02x}-00-0",
        device_class="gpu",
        model="NVIDIA H100",
        numa_nodes=None if node is None else NodeSet(node),
        pcie_root="pci0000:15",
        pcie_switch=None if switch is None else PciAddress(0, switch, 0, 0),
        health=health or DeviceHealth(),
    )


def inventory_of(*devices: Device) -> Inventory:
    """Wrap GPUs into the inventory of n1."""
    return Inventory(node="n1", device_class="gpu", generation=1, devices=devices)


def ledger_of(name: str, cpus: str = "", gpus: tuple[str, ...] = ()) -> Ledger:
    """Build a ledger in which one pod holds something."""
    owner = Owner(kind=OwnerKind.POD, name=name, uid="1")
    holding = Holding(container="main", cpus=CpuSet.parse(cpus), devices={"gpu": gpus})
    return Ledger(node="n1", allocations={owner.key: Allocation(owner=owner, holdings=(holding,))})


def with_caches(machine: Machine, cores: int, size_bytes: int) -> Machine:
    """Give every so many cores a level-3 cache of this size."""
    cpus = tuple(structs.replace(cpu, l3=(cpu.core or 0) // cores * cores) for cpu in machine.cpus)
    return structs.replace(
        machine,
        cpus=cpus,
        l3_caches=tuple(L3Cache(cpu=first, size_bytes=size_bytes) for first in sorted({cpu.l3 for cpu in cpus})),
    )


def card(bus: int, class_code: int, *, driver: str = "") -> PciDevice:
    """Build a function on NUMA node 0."""
    return PciDevice(
        address=PciAddress(0, bus, 0, 0),
        vendor=0x10DE,
        device=0x2330,
        class_code=class_code,
        root="pci0000:15",
        numa_node=0,
        driver=driver,
    )


def drawn(
    machine: Machine,
    *inventories: Inventory,
    ledger: Ledger | None = None,
    width: int = 100,
    names: dict[tuple[int, int], str] | None = None,
) -> list[str]:
    """Render without colour and give the lines."""
    return printed(draw_machine(machine, inventories, ledger, width=width, names=names), width).splitlines()


@pytest.mark.parametrize(
    ("nodes", "cores", "memory_only"),
    [(1, 4, 0), (2, 56, 0), (8, 16, 0), (64, 2, 0), (2, 72, 32), (2, 512, 0)],
    ids=["laptop", "dgx", "epyc", "itanium", "gb200", "thousand-cores"],
)
def test_draw_machine_stays_within_the_width_when_the_machine_is_large_or_small(
    nodes: int, cores: int, memory_only: int
) -> None:
    """No line is longer than 100 columns, whatever the machine."""
    lines = drawn(
        machine_of(nodes, cores, memory_only=memory_only), inventory_of(*(gpu(bus) for bus in range(0x17, 0x27)))
    )

    assert max(len(line) for line in lines) <= 100
    assert any("NUMA node 0" in line for line in lines)


def test_draw_machine_stands_sockets_side_by_side_when_there_are_two() -> None:
    """Two sockets make two columns: their titles stand in one line."""
    lines = drawn(machine_of(2, 4))

    assert any("socket 0 · NUMA node 0" in line and "socket 1 · NUMA node 1" in line for line in lines)


def test_draw_machine_stacks_a_socket_s_nodes_when_it_has_several() -> None:
    """Nodes 0 to 3 are in the left column and 4 to 7 in the right one."""
    lines = drawn(machine_of(8, 4))

    assert any("NUMA node 1 " in line and "NUMA node 5 " in line for line in lines)


def test_draw_machine_marks_held_cpus_by_letter_when_a_pod_holds_them() -> None:
    """One capital letter a core that is held whole, a small one where a thread is free, and the
    legend says whose letter it is.
    """
    lines = drawn(machine_of(2, 4), ledger=ledger_of("trainer", "0,1,9"))

    assert any(line.startswith("│ ") and line.split("│")[1].strip() == "tT··" for line in lines)
    assert any(line.startswith(" T ") and "pod default/trainer" in line and "3 cpus 0-1,9" in line for line in lines)
    assert any("8 (4 cores x 2), 5 free" in line for line in lines)


def test_draw_machine_marks_held_devices_by_letter_when_a_pod_holds_them() -> None:
    """A held device carries its owner's letter and a free one a dot, without any colour."""
    lines = drawn(
        machine_of(2, 4), inventory_of(gpu(0x17), gpu(0x18)), ledger=ledger_of("trainer", gpus=("gpu-0000-17-00-0",))
    )

    assert any("T gpu-0000-17-00-0" in " ".join(line.split()) for line in lines)
    assert any("· gpu-0000-18-00-0" in " ".join(line.split()) for line in lines)


def test_draw_machine_names_the_fault_when_a_device_is_sick() -> None:
    """A sick device shows a sign and the reason instead of its model."""
    condition = Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus")
    sick = gpu(0x17, health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(condition,)))

    lines = drawn(machine_of(2, 4), inventory_of(sick))

    assert any("!gpu-0000-17-00-0 fell-off-bus" in line for line in lines)


def test_draw_machine_groups_devices_by_root_and_switch_when_the_machine_tells() -> None:
    """Root complex, then switch, then devices, each below the other."""
    lines = [
        " ".join(line.split()).strip("│ ")
        for line in drawn(machine_of(1, 4, sockets=1), inventory_of(gpu(0x17), gpu(0x18)))
    ]

    start = lines.index("root complex 0000:15")
    assert lines[start : start + 4] == [
        "root complex 0000:15",
        "└─ switch 16:00.0",
        "├─ · gpu-0000-17-00-0 NVIDIA H100",
        "└─ · gpu-0000-18-00-0 NVIDIA H100",
    ]


def test_draw_machine_sets_devices_apart_when_their_node_is_unknown() -> None:
    """A device whose NUMA node the machine does not tell is never drawn inside node 0."""
    lines = drawn(machine_of(2, 4), inventory_of(gpu(0x17, node=None)))

    title = next(number for number, line in enumerate(lines) if "NUMA node not reported" in line)
    assert next(number for number, line in enumerate(lines) if "gpu-0000-17-00-0" in line) > title


def test_draw_machine_says_what_it_lacks_before_it_is_looked_at() -> None:
    """A warning below a drawing of half a machine is read too late."""
    lines = drawn(structs.replace(machine_of(2, 4), warnings=("NUMA nodes 1,3 are outside our cpuset; left out",)))

    assert lines[1] == " warning: NUMA nodes 1,3 are outside our cpuset; left out"
    assert lines[2].startswith("╭─")


def test_draw_machine_sums_up_memory_only_nodes_when_nothing_else_is_there() -> None:
    """32 nodes without CPUs and devices are one line, not 32 boxes."""
    lines = drawn(machine_of(2, 4, memory_only=32))

    assert any("memory-only NUMA nodes 2-33: 32 nodes, 2 TiB" in line for line in lines)


def test_draw_machine_says_the_scale_when_cores_do_not_fit() -> None:
    """When one sign stands for several cores, the drawing says how many, and a held core still
    shows.
    """
    lines = drawn(machine_of(2, 512), ledger=ledger_of("trainer", "0"))

    assert any("cores a sign)" in line for line in lines)
    assert any("t···" in line for line in lines)


def test_draw_machine_sets_cores_apart_when_they_have_different_caches() -> None:
    """Cores that share a level-3 cache stand together, and a line says how many caches there are
    and how large.
    """
    lines = drawn(with_caches(machine_of(2, 8), 4, 32 << 20), ledger=ledger_of("trainer", "4,20"))

    assert any(line.split("│")[1].strip() == "···· T···" for line in lines if "····" in line)
    assert any("L3      2 x 32 MiB for 4 cores each" in line for line in lines)


def test_draw_machine_lays_whole_caches_into_rows_when_a_node_has_many() -> None:
    """Twelve caches of eight cores are three rows of four; no cache is broken over two rows."""
    lines = drawn(with_caches(machine_of(2, 96), 8, 32 << 20))

    assert [line.split("│")[1].split() for line in lines if "········" in line] == [["········"] * 4] * 3


def test_draw_machine_leaves_the_gaps_out_when_there_are_too_many_caches() -> None:
    """Where gaps would need more than four rows, the cores are drawn without them.

    The caches are still said.
    """
    lines = drawn(with_caches(machine_of(2, 256), 2, 4 << 20))

    assert any("L3      128 x 4 MiB for 2 cores each" in line for line in lines)
    assert not any("·· ··" in line for line in lines)


def test_draw_machine_says_nothing_of_caches_when_the_machine_does_not_tell() -> None:
    """No line about caches is better than a guess.

    A cache without a size is one of unknown size.
    """
    untold = drawn(machine_of(2, 8))
    without_sizes = drawn(structs.replace(with_caches(machine_of(2, 8), 8, 1), l3_caches=()))

    assert not any("L3" in line for line in untold)
    assert any("L3      ?" in line for line in without_sizes)


@pytest.mark.parametrize(
    ("nodes", "width", "columns"),
    [
        (8, 100, 2),
        (8, 160, 2),
        (8, 200, 4),
        (8, 400, 8),
        (4, 200, 4),
        (3, 150, 3),
        (6, 150, 3),
        (2, 200, 2),
        (64, 100, 4),
        (64, 200, 8),
        (8, 60, 1),
    ],
)
def test_draw_machine_uses_a_wide_terminal_when_there_are_nodes_for_it(nodes: int, width: int, columns: int) -> None:
    """As many panels stand in a row as have room, every row has as many, and no line is longer than
    the terminal.
    """
    lines = drawn(machine_of(nodes, 4), inventory_of(gpu(0x17)), width=width)

    assert [line.count("╭") for line in lines if "╭" in line] == [columns] * (nodes // columns)
    assert max(map(len, lines)) <= width


def test_draw_machine_keeps_a_socket_in_a_row_when_its_nodes_stand_side_by_side() -> None:
    """Four nodes a socket are a row each at 200 columns."""
    rows = [line for line in drawn(machine_of(8, 4), width=200) if "NUMA node" in line and "╭" in line]

    assert ["socket 0" in row for row in rows] == [True, False]
    assert ["socket 1" in row for row in rows] == [False, True]


def test_draw_machine_names_cards_when_names_are_known() -> None:
    """A function has its name and its driver in place of its ids."""
    machine = structs.replace(machine_of(1, 4), pci_devices=(card(0x17, 0x030200, driver="nvidia"),))

    lines = drawn(machine, names={(0x10DE, 0x2330): "NVIDIA H100 SXM5 80GB"})

    assert any("display 17:00.0 NVIDIA H100 SXM5 80GB (nvidia)" in line for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_legend_is_folded_when_the_terminal_is_narrow(width: int) -> None:
    """What holders have and what the signs mean is whole at any width."""
    machine = machine_of(2, 16)
    ledger = ledger_of("a-pod-of-a-rather-long-name", cpus="0,2,4,6,8,10,12,14,16,18,20,22", gpus=("gpu-0000-18-00-0",))

    lines = drawn(machine, inventory_of(gpu(0x18)), ledger=ledger, width=width)

    legend = lines[max(number for number, line in enumerate(lines) if line.startswith("╰")) + 1 :]
    text = " ".join(" ".join(legend).split())
    assert max(map(len, legend)) <= width
    assert "…" not in text
    wanted = ("a-pod-of-a-rather-long-name", "gpu", "0,2,4", "~ degraded", "small letter: one thread of the core")
    assert [word for word in wanted if word not in text] == []
