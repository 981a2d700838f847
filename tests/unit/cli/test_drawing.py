"""The drawing of a machine."""

from __future__ import annotations

import io

import pytest
from msgspec import structs
from rich.console import Console

from topobus.cli.render.machine_drawing import draw_machine
from topobus.cli.render.output import THEME
from topobus.domain.device import Device, DeviceRole, Inventory, KeptFunction
from topobus.domain.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.ledger import Allocation, Holding, Ledger
from topobus.domain.machine import Cpu, Machine, NumaNode, PciDevice
from topobus.domain.pci import PciAddress
from topobus.domain.request import Owner, OwnerKind


def machine_of(nodes: int, cores: int, *, sockets: int = 2, memory_only: int = 0) -> Machine:
    """Build a machine with two threads a core, numbered as Linux does: first all first threads, then all second ones."""
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


def drawn(machine: Machine, *inventories: Inventory, ledger: Ledger | None = None, width: int = 100) -> list[str]:
    """Render without colour and give the lines."""
    console = Console(file=io.StringIO(), theme=THEME, width=width, color_system=None)
    console.print(draw_machine(machine, inventories, ledger, width=width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO, made just above


@pytest.mark.parametrize(
    ("nodes", "cores", "memory_only"),
    [(1, 4, 0), (2, 56, 0), (8, 16, 0), (64, 2, 0), (2, 72, 32), (2, 512, 0)],
    ids=["laptop", "dgx", "epyc", "itanium", "gb200", "thousand-cores"],
)
def test_draw_machine_stays_within_the_width_when_the_machine_is_large_or_small(nodes: int, cores: int, memory_only: int) -> None:
    """No line is longer than 100 columns, whatever the machine."""
    lines = drawn(machine_of(nodes, cores, memory_only=memory_only), inventory_of(*(gpu(bus) for bus in range(0x17, 0x27))))

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
    """One capital letter a core that is held whole, a small one where a thread is free, and the legend says whose letter it is."""
    lines = drawn(machine_of(2, 4), ledger=ledger_of("trainer", "0,1,9"))

    assert any(line.startswith("│ ") and line.split("│")[1].strip() == "tT··" for line in lines)
    assert any(line.startswith(" T ") and "pod default/trainer" in line and "3 cpus 0-1,9" in line for line in lines)
    assert any("8 (4 cores x 2), 5 free" in line for line in lines)


def test_draw_machine_marks_held_devices_by_letter_when_a_pod_holds_them() -> None:
    """A held device carries its owner's letter and a free one a dot, without any colour."""
    lines = drawn(machine_of(2, 4), inventory_of(gpu(0x17), gpu(0x18)), ledger=ledger_of("trainer", gpus=("gpu-0000-17-00-0",)))

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
    lines = [" ".join(line.split()).strip("│ ") for line in drawn(machine_of(1, 4, sockets=1), inventory_of(gpu(0x17), gpu(0x18)))]

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

    title = next(number for number, line in enumerate(lines) if "NUMA node not told" in line)
    assert next(number for number, line in enumerate(lines) if "gpu-0000-17-00-0" in line) > title


def test_draw_machine_sums_up_memory_only_nodes_when_nothing_else_is_there() -> None:
    """32 nodes without CPUs and devices are one line, not 32 boxes."""
    lines = drawn(machine_of(2, 4, memory_only=32))

    assert any("memory-only NUMA nodes 2-33: 32 nodes, 2 TiB" in line for line in lines)


def test_draw_machine_shows_pci_functions_when_no_service_has_looked() -> None:
    """Without inventories GPUs, NICs and disks are drawn as the kernel names them, bridges and other functions are not."""
    functions = tuple(
        PciDevice(address=PciAddress(0, bus, 0, 0), vendor=0x10DE, device=0x2330, class_code=code, root="pci0000:15", numa_node=1)
        for bus, code in ((0x17, 0x030200), (0x18, 0x020000), (0x19, 0x0C0330))
    )
    machine = machine_of(2, 4)

    lines = drawn(Machine(node="n1", numa_nodes=machine.numa_nodes, cpus=machine.cpus, pci_devices=functions))

    assert any("display 17:00.0 [10de:2330]" in line for line in lines)
    assert any("nic 18:00.0" in line for line in lines)
    assert not any("19:00.0" in line for line in lines)


def test_draw_machine_says_the_scale_when_cores_do_not_fit() -> None:
    """When one sign stands for several cores, the drawing says how many, and a held core still shows."""
    lines = drawn(machine_of(2, 512), ledger=ledger_of("trainer", "0"))

    assert any("cores a sign)" in line for line in lines)
    assert any("t···" in line for line in lines)


def test_drawing_tells_what_a_function_is_for_when_it_is_not_offered() -> None:
    """A GPU of a virtual machine stands where it sits, with what it is for; a NIC for passthrough says so beside its model."""
    function = PciDevice(address=PciAddress(0, 0x18, 0, 0), vendor=1, device=1, numa_node=0, root="pci0000:15")
    kept = KeptFunction(pci=function.address, role=DeviceRole.PASSTHROUGH, why="kernel driver vfio-pci holds it for passthrough")
    nic = Device(
        name="nic-0", device_class="nic", model="ConnectX-7", role=DeviceRole.PASSTHROUGH, numa_nodes=NodeSet(0), pcie_root="pci0000:15"
    )
    machine = structs.replace(machine_of(1, 4), pci_devices=(function,))

    lines = drawn(
        machine,
        Inventory(node="n1", device_class="gpu", generation=1, kept=(kept,)),
        Inventory(node="n1", device_class="nic", generation=1, devices=(nic,)),
    )

    assert any("gpu 18:00.0 passthrough: kernel driver vfio-pci holds it" in line for line in lines)
    assert any("nic-0 passthrough ConnectX-7" in line for line in lines)


def test_drawing_leaves_a_management_function_out_when_its_card_is_drawn() -> None:
    """A card's own management function is no news; one whose card shows nothing else is drawn with what it is for."""
    card, alone = PciAddress(0, 0x38, 0, 1), PciAddress(0, 0x39, 0, 0)
    functions = tuple(
        PciDevice(address=address, vendor=1, device=1, numa_node=0, root="pci0000:15")
        for address in (card, PciAddress(0, 0x38, 0, 0), alone)
    )
    kept = tuple(KeptFunction(pci=function.address, role=DeviceRole.MANAGEMENT, why="it flashes the card") for function in functions[1:])
    fpga = Device(name="fpga-0000-38-00-0", device_class="fpga", pci=card, numa_nodes=NodeSet(0), pcie_root="pci0000:15")

    lines = drawn(
        structs.replace(machine_of(1, 4), pci_devices=functions),
        Inventory(node="n1", device_class="fpga", generation=1, devices=(fpga,), kept=kept),
    )

    assert [line for line in lines if "fpga 38:00.0" in line] == []
    assert any("fpga 39:00.0 management: it flashes the card" in line for line in lines)
