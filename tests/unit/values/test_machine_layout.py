"""The drawing of a machine as a value: what stands where, whose it is, and by which sign."""

from __future__ import annotations

import string

import pytest
from msgspec import structs

from topobus.engine.drawing.layout import MachineLayout, layout_of
from topobus.engine.drawing.letters import COLOUR_COUNT, holders_of
from topobus.values.device import Device, DeviceRole, Inventory, KeptFunction
from topobus.values.device_sharing import HeldShare
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Cpu, HugepagePool, L3Cache, Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress
from topobus.values.request import Owner, OwnerKind

SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="link-down"),),
)
NO_CPUS = CpuSet()


def machine_of(*nodes: int | None, memory_only: int = 0, memory_bytes: int = 2**30, **fields: object) -> Machine:
    """Build a machine with two cores of two threads a NUMA node;
    `nodes` names each one's socket.
    """
    cpus = tuple(
        Cpu(
            id=4 * node + thread,
            online=True,
            core=4 * node + thread // 2 * 2,
            socket=socket,
            numa_node=node,
            l3=4 * node,
        )
        for node, socket in enumerate(nodes)
        for thread in range(4)
    )
    numa_nodes = tuple(
        NumaNode(id=node, cpus=CpuSet.of(cpu.id for cpu in cpus if cpu.numa_node == node), memory_bytes=memory_bytes)
        for node in range(len(nodes) + memory_only)
    )
    return structs.replace(Machine(node="n1", numa_nodes=numa_nodes, cpus=cpus), **fields)


def gpu(name: str, node: int | None = 0, **fields: object) -> Device:
    """Build a GPU below a switch of root complex 0000:15."""
    place = {
        "numa_nodes": None if node is None else NodeSet(node),
        "pcie_root": "pci0000:15",
        "pcie_switch": PciAddress(0, 0x16, 0, 0),
    }
    return Device(name=name, device_class="gpu", model="H100", **{**place, **fields})  # type: ignore[arg-type]  # fields of a device


def inventory_of(*devices: Device, device_class: str = "gpu", **fields: object) -> Inventory:
    """Wrap devices into an inventory of n1."""
    return Inventory(node="n1", device_class=device_class, generation=1, devices=devices, **fields)  # type: ignore[arg-type]


def ledger_of(**owners: Holding) -> Ledger:
    """Build a ledger in which pods of these names hold something."""
    allocations = {}
    for name, holding in owners.items():
        owner = Owner(kind=OwnerKind.POD, name=name, uid=name)
        allocations[owner.key] = Allocation(owner=owner, holdings=(holding,))
    return Ledger(node="n1", allocations=allocations)


def tree_of(layout: MachineLayout) -> list[tuple[str, str, str]]:
    """Give root, switch and name of each device of the first NUMA node."""
    return [
        (root.title, branch.switch, leaf.name)
        for root in layout.panels[0].roots
        for branch in root.switches
        for leaf in branch.leaves
    ]


@pytest.mark.parametrize(
    ("held", "signs"),
    [
        (ledger_of(trainer=Holding(cpus=CpuSet(0, 1))), ["T", "·"]),
        (ledger_of(trainer=Holding(cpus=CpuSet(0))), ["t", "·"]),
        (ledger_of(alpha=Holding(cpus=CpuSet(0)), beta=Holding(cpus=CpuSet(1, 2, 3))), ["*", "B"]),
        (None, ["·", "·"]),
    ],
    ids=["a core", "a thread", "two owners", "nobody"],
)
def test_layout_signs_a_core_with_its_owner_when_cpus_are_held(held: Ledger | None, signs: list[str]) -> None:
    """A capital letter is a whole core, a small one a thread of it, a star two owners, a dot
    nobody.
    """
    layout = layout_of(machine_of(0), (), held)

    assert [core.sign for core in layout.panels[0].cores] == signs
    assert [core.l3 for core in layout.panels[0].cores] == [0, 0]


def test_layout_marks_a_core_when_one_of_its_cpus_is_sick() -> None:
    """A sick CPU makes its core sick, whoever holds it, and is not counted as free.

    One that is well changes nothing.
    """
    cpus = (
        Device(name="cpu-0", device_class="cpu", cpu=0, health=SICK),
        Device(name="cpu-2", device_class="cpu", cpu=2),
    )

    layout = layout_of(
        machine_of(0), [inventory_of(*cpus, device_class="cpu")], ledger_of(trainer=Holding(cpus=CpuSet(1)))
    )

    first, second = layout.panels[0].cores
    assert (first.sign, first.is_sick, second.sign) == ("!", True, "·")
    assert layout.panels[0].cpus_text == "4 (2 cores x 2), 2 free"


def test_layout_groups_devices_by_root_and_switch_when_the_machine_tells() -> None:
    """Root complexes, their switches and devices, sorted.

    What has no address stands under no address.
    """
    devices = (gpu("gpu-1"), gpu("gpu-0"), gpu("gpu-2", pcie_switch=None), gpu("gpu-3", pcie_root="", pcie_switch=None))

    layout = layout_of(machine_of(0), [inventory_of(*devices)])

    assert tree_of(layout) == [
        ("no PCI address", "", "gpu-3"),
        ("root complex 0000:15", "", "gpu-2"),
        ("root complex 0000:15", "0000:16:00.0", "gpu-0"),
        ("root complex 0000:15", "0000:16:00.0", "gpu-1"),
    ]


def test_layout_sets_devices_apart_when_their_node_is_unknown() -> None:
    """A device whose NUMA node is not told, or that the machine lacks, is drawn in none."""
    layout = layout_of(machine_of(0), [inventory_of(gpu("gpu-0", None), gpu("gpu-1", 7))])

    assert layout.elsewhere is not None
    assert [leaf.name for root in layout.elsewhere.roots for branch in root.switches for leaf in branch.leaves] == [
        "gpu-0",
        "gpu-1",
    ]
    assert tree_of(layout) == []


def test_layout_sets_cpus_apart_when_their_node_is_unknown() -> None:
    """CPUs of a node that is offline, or that the machine lacks, stand beside devices of no node,
    with their owners.

    They are in no panel and counted nowhere else.
    """
    machine = machine_of(0, 1)
    nodes = (machine.numa_nodes[1],)
    cpus = tuple(structs.replace(cpu, numa_node=None) if cpu.id == 1 else cpu for cpu in machine.cpus)

    layout = layout_of(
        structs.replace(machine, numa_nodes=nodes, cpus=cpus), (), ledger_of(trainer=Holding(cpus=CpuSet(0, 1, 4)))
    )

    assert [(panel.node.id, panel.cpus_text) for panel in layout.panels] == [(1, "4 (2 cores x 2), 3 free")]
    assert layout.elsewhere is not None
    assert (layout.elsewhere.cpus_text, layout.elsewhere.sockets) == ("4 (2 cores x 2), 2 free", (0,))
    assert [core.sign for core in layout.elsewhere.cores] == ["T", "·"]


def test_layout_stands_nodes_of_one_socket_together_when_there_are_several() -> None:
    """Panels are grouped by socket, those without one first.

    All of them stand in the order of their ids.
    """
    layout = layout_of(machine_of(1, 0, 1, None))

    assert [[panel.node.id for panel in panels] for panels in layout.sockets] == [[3], [1], [0, 2]]
    assert [panel.node.id for panel in layout.panels] == [0, 1, 2, 3]
    assert [panel.socket_text for panel in layout.panels] == ["socket 1", "socket 0", "socket 1", ""]


def test_layout_sums_up_memory_when_nodes_have_nothing_else() -> None:
    """Nodes with memory alone are one sentence.

    One with a device is drawn, and says that it has no CPUs.
    """
    layout = layout_of(machine_of(0, memory_only=3, memory_bytes=2**40), [inventory_of(gpu("gpu-0", 1))])

    assert layout.memory_only == "memory-only NUMA nodes 2-3: 2 nodes, 2 TiB"
    assert layout_of(machine_of(0, memory_only=1, memory_bytes=2**40)).memory_only == "memory-only NUMA node 1: 1 TiB"
    assert [panel.cpus_text for panel in layout.panels] == ["4 (2 cores x 2), 4 free", "0 (0 cores), 0 free"]


def test_layout_tells_the_machine_in_words_when_it_is_drawn() -> None:
    """Sockets, nodes, CPUs, those that are offline, memory, huge pages, devices, distances and
    warnings.
    """
    machine = machine_of(0, 1, distances=((10, 21), (21, 10)), warnings=("numa: odd",), generation=3)
    pools = (HugepagePool(page_bytes=2**21, total=4, free=4), HugepagePool(page_bytes=2**30, total=0, free=0))
    offline = Cpu(id=99, online=False)
    machine = structs.replace(
        machine,
        cpus=(*machine.cpus, offline),
        numa_nodes=(structs.replace(machine.numa_nodes[0], hugepages=pools), machine.numa_nodes[1]),
    )

    layout = layout_of(machine, [inventory_of(gpu("gpu-0"), warnings=("slow",)), inventory_of(device_class="nic")])

    assert layout.summary == "2 sockets, 2 NUMA nodes, 8 CPUs (1 offline), 2 GiB, 1 gpu"
    assert layout.panels[0].memory_text == "1 GiB; huge 4 x 2 MiB"
    assert (layout.generation, layout.warnings, layout.memory_only) == (3, ("numa: odd", "gpu: slow"), "")
    assert layout.distances == "NUMA distance 10 local, 21 to others"


def test_layout_leaves_out_what_the_machine_does_not_tell() -> None:
    """Without sockets and distances none are named.

    CPUs of no node are of none, also where there is only one; cores without numbers are CPUs.
    """
    loose = (Cpu(id=0, online=True), Cpu(id=1, online=True))
    only = Machine(node="n1", numa_nodes=(NumaNode(id=0, cpus=NO_CPUS, memory_bytes=0),), cpus=loose)
    apart = structs.replace(only, numa_nodes=(*only.numa_nodes, NumaNode(id=1, cpus=NO_CPUS, memory_bytes=0)))

    layout, layout_apart = layout_of(only), layout_of(apart)

    assert layout.summary == "1 NUMA node, 2 CPUs, 0 B"
    for drawn in (layout, layout_apart):
        assert (drawn.distances, drawn.panels, drawn.elsewhere and drawn.elsewhere.cpus_text) == (
            "",
            (),
            "2 (2 cores), 2 free",
        )
    assert (
        layout_of(structs.replace(apart, distances=((10, 12, 30),))).distances
        == "NUMA distance 10 local, 12 to 30 to others"
    )


def test_layout_draws_functions_when_no_service_has_looked() -> None:
    """GPUs, NICs and disks are drawn as the kernel names them.

    Bridges, virtual functions and other kinds are not.
    """
    kinds = [
        (0x17, 0x030200, {}),
        (0x18, 0x0C0330, {}),
        (0x19, 0x020000, {"is_bridge": True}),
        (0x1A, 0x020000, {"physfn": PciAddress(0, 1, 0, 0)}),
    ]
    functions = tuple(
        PciDevice(
            address=PciAddress(0, bus, 0, 0),
            vendor=0x10DE,
            device=0x2330,
            class_code=code,
            root="pci0000:15",
            numa_node=0,
            **more,
        )
        for bus, code, more in kinds
    )

    layout = layout_of(machine_of(0, pci_devices=functions))

    (leaf,) = layout.panels[0].roots[0].switches[0].leaves
    assert (leaf.name, leaf.text, leaf.device) == ("display 17:00.0", "[10de:2330]", None)


def test_layout_names_a_function_by_what_the_kernel_calls_behind_it_when_that_is_told() -> None:
    """The interface's name stands before the model.

    A function of the same model without one has the model alone.
    """
    functions = tuple(
        PciDevice(
            address=PciAddress(0, bus, 0, 0), vendor=1, device=2, class_code=0x020000, root="pci0000:15", numa_node=0
        )
        for bus in (0x17, 0x18)
    )

    layout = layout_of(machine_of(0, pci_devices=functions), names={(1, 2): "Intel E810", functions[0].address: "eth0"})

    assert [leaf.text for leaf in layout.panels[0].roots[0].switches[0].leaves] == ["eth0  Intel E810", "Intel E810"]


def test_layout_draws_a_cxl_memory_device_as_what_it_is_when_services_have_looked() -> None:
    """It is nobody's device, and no part of a processor as other memory controllers are: the card
    whose memory is a NUMA node.
    """
    functions = tuple(
        PciDevice(
            address=PciAddress(0, bus, 0, 0),
            vendor=0x8086,
            device=0xD93,
            class_code=code,
            root="pci0000:15",
            numa_node=0,
            driver="cxl_pci",
        )
        for bus, code in ((0x35, 0x050210), (0x36, 0x058000), (0x37, 0x050000))
    )

    layouts = [layout_of(machine_of(0, pci_devices=functions), given) for given in ((), [inventory_of(gpu("gpu-0"))])]

    drawn = [
        [leaf.name for root in each.panels[0].roots for branch in root.switches for leaf in branch.leaves]
        for each in layouts
    ]
    (leaf,) = layouts[0].panels[0].roots[0].switches[0].leaves
    assert drawn == [["cxl 35:00.0"], ["cxl 35:00.0", "gpu-0"]]
    assert leaf.text == "[8086:0d93] (cxl_pci)"


def test_layout_says_what_a_device_is_for_when_it_is_not_for_computing() -> None:
    """A role stands before the model, a fault in its place, and parts are counted and kept with
    their card.
    """
    card = gpu("gpu-0", health=SICK)
    parts = (gpu("gpu-0-p0", parent="gpu-0"), gpu("gpu-0-p1", parent="gpu-0"))
    nic = Device(
        name="nic-0", device_class="nic", vendor="Mellanox", role=DeviceRole.PASSTHROUGH, numa_nodes=NodeSet(0)
    )

    layout = layout_of(machine_of(0), [inventory_of(card, *parts), inventory_of(nic, device_class="nic")])

    leaves = {leaf.name: leaf for root in layout.panels[0].roots for branch in root.switches for leaf in branch.leaves}
    assert {name: leaf.text for name, leaf in leaves.items()} == {
        "nic-0": "passthrough Mellanox",
        "gpu-0": "link-down +2 VF",
    }
    assert [part.name for part in leaves["gpu-0"].parts] == ["gpu-0-p0", "gpu-0-p1"]


def test_layout_draws_a_kept_function_when_no_card_of_it_is_drawn() -> None:
    """What is kept for something else is drawn with that.

    The management function of a card that is drawn is not, nor one that the machine lacks.
    """
    card, other = PciAddress(0, 0x38, 0, 1), PciAddress(0, 0x39, 0, 0)
    functions = tuple(
        PciDevice(address=address, vendor=1, device=1, numa_node=0, root="pci0000:15")
        for address in (card, PciAddress(0, 0x38, 0, 0), other)
    )
    kept = tuple(
        KeptFunction(pci=address, role=role, why="it flashes the card")
        for address, role in (
            (functions[1].address, DeviceRole.MANAGEMENT),
            (other, DeviceRole.PASSTHROUGH),
            (PciAddress(0, 0x77, 0, 0), DeviceRole.PASSTHROUGH),
        )
    )
    fpga = Device(name="fpga-0", device_class="fpga", pci=card, numa_nodes=NodeSet(0), pcie_root="pci0000:15")
    without = Device(name="fpga-1", device_class="fpga", numa_nodes=NodeSet(0), pcie_root="pci0000:15")

    layout = layout_of(
        machine_of(0, pci_devices=functions), [inventory_of(fpga, without, device_class="fpga", kept=kept)]
    )

    leaves = [leaf for root in layout.panels[0].roots for branch in root.switches for leaf in branch.leaves]
    assert [leaf.name for leaf in leaves] == ["fpga 39:00.0", "fpga-0", "fpga-1"]
    assert leaves[0].text == "passthrough: it flashes the card"


def test_holders_have_letters_of_their_names_when_these_are_free() -> None:
    """A letter is of the name, else any free one; who had one has it again.

    More owners than letters share a sign.
    """
    few = holders_of(ledger_of(aa=Holding(), a=Holding()), {})
    a, aa = (holder.allocation.owner.key for holder in few.all)
    had = holders_of(ledger_of(aa=Holding(), a=Holding()), {a: "#", aa: "Q"})
    many = holders_of(ledger_of(**{f"p{number}": Holding() for number in range(40)}))

    assert [holder.letter for holder in few.all] == ["A", "B"]
    assert [holder.letter for holder in had.all] == ["A", "Q"]
    assert sorted({holder.letter for holder in many.all}) == sorted({"#", *string.ascii_uppercase, *string.digits})
    assert {holder.colour for holder in many.all} == set(range(COLOUR_COUNT))


def test_holders_tell_what_they_hold_when_it_is_cpus_devices_or_shares() -> None:
    """In words, by CPU and by device; CPUs are told once, and who has shares is listed."""
    share = HeldShare(amounts={"memory": 1})
    holdings = {
        "trainer": Holding(devices={"gpu": ("gpu-0",), "cpu": ("cpu-0",)}, cpus=CpuSet(0, 1)),
        "reader": Holding(devices={"gpu": ("gpu-1",)}, shared={"gpu": ("gpu-1",)}, shares={"gpu": {"gpu-1": share}}),
        "idle": Holding(),
    }

    holders = holders_of(ledger_of(**holdings))

    assert {holder.name: holder.held_text for holder in holders.all} == {
        "pod default/trainer": "1 gpu, 2 cpus 0-1",
        "pod default/reader": "1 gpu",
        "pod default/idle": "nothing",
    }
    assert holders.by_device["gpu", "gpu-0"].name == holders.by_cpu[1].name == "pod default/trainer"
    assert [(holder.name, held) for holder, held in holders.sharers["gpu", "gpu-1"]] == [("pod default/reader", share)]
    assert holders_of(None).all == ()


@pytest.mark.parametrize(
    ("sizes", "shared", "text"),
    [
        ((0, 4, 8), False, "32 MiB"),
        ((), False, "?"),
        ((0,), True, "32 MiB, shared with node 1"),
    ],
    ids=["one a node", "no size", "of two nodes"],
)
def test_layout_says_which_caches_a_node_has_when_the_machine_tells(
    sizes: tuple[int, ...], shared: bool, text: str
) -> None:
    """Size and number of level-3 caches, and whose they are, too; no size is no guess."""
    machine = machine_of(0, 0, l3_caches=tuple(L3Cache(cpu=cpu, size_bytes=32 * 2**20) for cpu in sizes))
    if shared:
        machine = structs.replace(machine, cpus=tuple(structs.replace(cpu, l3=0) for cpu in machine.cpus))

    assert layout_of(machine).panels[0].caches == text


def test_layout_counts_the_cores_of_each_cache_when_there_are_several() -> None:
    """Equal caches are counted together, others stand beside them, and cores of one cache stand
    together.

    Nodes that share are counted.
    """
    machine = machine_of(0, 0, 0, l3_caches=tuple(L3Cache(cpu=cpu, size_bytes=2**20 * cpu) for cpu in (1, 2)))
    caches = {0: 2, 1: 2, 2: 1, 3: 1}
    several = tuple(structs.replace(cpu, l3=caches.get(cpu.id, 1)) for cpu in machine.cpus)
    equal = tuple(structs.replace(cpu, l3=cpu.core) for cpu in machine.cpus)

    mixed = layout_of(structs.replace(machine, cpus=several)).panels[0]

    assert [str(core.cpus) for core in mixed.cores] == ["2-3", "0-1"]
    assert mixed.caches == "2 MiB for 1 core + 1 MiB for 1 core, shared with nodes 1,2"
    assert layout_of(structs.replace(machine, cpus=equal, l3_caches=())).panels[0].caches == "2 x ? for 1 core each"


def test_layout_draws_cards_that_no_service_speaks_of_when_others_are_offered() -> None:
    """They are named by the system's list where it has them, with their driver or that they have
    none.

    Disks and further functions of offered cards are left out.
    """
    functions = tuple(
        PciDevice(
            address=PciAddress(0, bus, 0, part),
            vendor=1,
            device=bus,
            class_code=code,
            numa_node=0,
            root="pci0000:15",
            driver=driver,
        )
        for bus, part, code, driver in (
            (0x17, 0, 0x030200, "nvidia"),
            (0x17, 1, 0x020000, ""),
            (0x18, 0, 0x020000, "ice"),
            (0x19, 0, 0x020000, ""),
            (0x1A, 0, 0x010802, "nvme"),
        )
    )

    layout = layout_of(
        machine_of(0, pci_devices=functions),
        [inventory_of(gpu("gpu-0", pci=functions[0].address))],
        names={(1, 0x18): "Intel E810"},
    )

    texts = {
        leaf.name: leaf.text for root in layout.panels[0].roots for branch in root.switches for leaf in branch.leaves
    }
    assert texts == {
        "gpu-0": "H100",
        "nic 18:00.0": "not offered: Intel E810 (ice)",
        "nic 19:00.0": "no driver: [0001:0019]",
    }
