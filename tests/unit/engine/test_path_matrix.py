"""How devices reach each other, in the words of `nvidia-smi topo -m`."""

from __future__ import annotations

import pytest
from msgspec import structs

from topobus.engine.drawing.path_matrix import LEGEND, PathMatrix, path_matrix
from topobus.values.device import Device, Inventory, Link, LinkClass
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress

ROOT_PORT, OTHER_PORT = PciAddress(0, 0x15, 1, 0), PciAddress(0, 0x15, 2, 0)
SWITCH, SECOND_SWITCH = PciAddress(0, 0x16, 0, 0), PciAddress(0, 0x20, 0, 0)
DOWN, OTHER_DOWN, LAST_DOWN = PciAddress(0, 0x17, 0, 0), PciAddress(0, 0x17, 1, 0), PciAddress(0, 0x21, 0, 0)

PLACES: dict[str, tuple[str, tuple[PciAddress, ...], PciAddress | None, int | None]] = {
    "first": ("pci0000:15", (ROOT_PORT, SWITCH, DOWN), SWITCH, 0),
    "same switch": ("pci0000:15", (ROOT_PORT, SWITCH, OTHER_DOWN), SWITCH, 0),
    "switch below the switch": (
        "pci0000:15",
        (ROOT_PORT, SWITCH, OTHER_DOWN, SECOND_SWITCH, LAST_DOWN),
        SECOND_SWITCH,
        0,
    ),
    "other root port": ("pci0000:15", (OTHER_PORT,), None, 0),
    "same root port": ("pci0000:15", (OTHER_PORT,), None, 0),
    "other root complex": ("pci0000:37", (), None, 0),
    "other node": ("pci0000:97", (), None, 1),
    "nowhere": ("pci0000:c7", (), None, None),
    "no root": ("", (), None, None),
}


def function(bus: int, place: str, *, number: int = 0) -> PciDevice:
    """Build a function at a place."""
    root, path, switch, node = PLACES[place]
    near = CpuSet(0, 1) if node == 0 else CpuSet(2, 3) if node == 1 else CpuSet(0, 1, 2, 3)
    return PciDevice(
        address=PciAddress(0, bus, 0, number),
        vendor=1,
        device=1,
        root=root,
        path=path,
        switch=switch,
        numa_node=node,
        near_cpus=near,
    )


def machine_of(*functions: PciDevice, nodes: int = 2) -> Machine:
    """Build a machine with two CPUs a node."""
    cpus = tuple(Cpu(id=cpu, online=True, numa_node=cpu // 2) for cpu in range(2 * nodes))
    numa_nodes = tuple(
        NumaNode(id=node, cpus=CpuSet(2 * node, 2 * node + 1), near_cpus=CpuSet(2 * node, 2 * node + 1), memory_bytes=1)
        for node in range(nodes)
    )
    return Machine(node="n", numa_nodes=numa_nodes, cpus=cpus, pci_devices=functions)


def device_of(function_: PciDevice, name: str, *, device_class: str = "gpu", **fields: object) -> Device:
    """Build the device that is a function."""
    node = function_.numa_node
    function_fields = {"pci": function_.address, "numa_nodes": None if node is None else NodeSet(node)}
    return Device(name=name, device_class=device_class, **{**function_fields, **fields})  # type: ignore[arg-type]  # fields of a device


def inventory_of(*devices: Device, device_class: str = "gpu") -> Inventory:
    """Wrap devices."""
    return Inventory(node="n", device_class=device_class, generation=1, devices=devices)


def matrix_of(*places: str, nodes: int = 2) -> PathMatrix:
    """Make the matrix of GPUs at these places."""
    functions = [function(0x40 + number, place) for number, place in enumerate(places)]
    return path_matrix(
        machine_of(*functions, nodes=nodes),
        [inventory_of(*(device_of(at, f"gpu-{at.address.bus:02x}") for at in functions))],
    )


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ("first", "same switch", "PIX"),
        ("other root port", "same root port", "PIX"),
        ("first", "switch below the switch", "PXB"),
        ("first", "other root port", "PHB"),
        ("other root complex", "other root complex", "PHB"),
        ("nowhere", "nowhere", "PHB"),
        ("first", "other root complex", "NODE"),
        ("first", "other node", "SYS"),
        ("first", "nowhere", "?"),
        ("no root", "no root", "?"),
    ],
)
def test_path_matrix_names_what_lies_between_two_devices(first: str, second: str, word: str) -> None:
    """The words are nvidia-smi's, both ways the same, and the legend has those that are used."""
    matrix = matrix_of(first, second)

    assert matrix.words == (("X", word), (word, "X"))
    assert matrix.legend == {used: LEGEND[used] for used in LEGEND if used in ("X", word)}


def test_path_matrix_takes_unknown_places_for_the_only_node_when_there_is_one() -> None:
    """On a machine with one NUMA node nothing can be farther than that."""
    assert matrix_of("nowhere", "no root", nodes=1).words[0][1] == "NODE"


def test_path_matrix_calls_functions_of_one_card_near_when_they_are_below_no_bridge() -> None:
    """Two functions of one slot need no bridge to reach each other."""
    functions = [function(0x40, "other root complex", number=number) for number in range(2)]
    devices = [device_of(at, f"nic-{number}", device_class="nic") for number, at in enumerate(functions)]

    matrix = path_matrix(machine_of(*functions), [inventory_of(*devices, device_class="nic")])

    assert matrix.words[0][1] == "PIX"


@pytest.mark.parametrize(
    ("vendor", "count", "word"),
    [("nvidia", 18, "NV18"), ("nvidia", 0, "NV"), ("amd", 0, "XGMI")],
    ids=["nvlinks", "nvlinks-uncounted", "xgmi"],
)
def test_path_matrix_names_the_links_of_a_fabric_when_a_driver_tells_them(vendor: str, count: int, word: str) -> None:
    """Links between GPUs come before PCIe, with their number where it is told, from whichever end
    tells them.

    Other kinds of links are not a fabric.
    """
    at, other_at = function(0x40, "first"), function(0x41, "other node")
    linked = device_of(
        at,
        "gpu-40",
        vendor=vendor,
        links=(Link(peer="gpu-41", count=count), Link(peer="gpu-42", kind=LinkClass.SWITCH)),
    )
    third = function(0x42, "other node")

    matrix = path_matrix(
        machine_of(at, other_at, third),
        [inventory_of(linked, device_of(other_at, "gpu-41", vendor=vendor), device_of(third, "gpu-42", vendor=vendor))],
    )

    assert [row[0] for row in matrix.words] == ["X", word, "SYS"]
    assert matrix.words[0][1] == word
    assert ("NV#" in matrix.legend, "XGMI" in matrix.legend) == (word != "XGMI", word == "XGMI")


def test_path_matrix_numbers_whole_devices_by_class_and_address() -> None:
    """GPUs first, then classes by name, in the order of addresses.

    Parts of a card and CPUs are left out unless CPUs are asked for.
    """
    functions = [function(bus, "first") for bus in (0x40, 0x50, 0x60, 0x61)]
    gpus = inventory_of(
        device_of(functions[1], "gpu-a"),
        device_of(functions[0], "gpu-b"),
        Device(name="gpu-b-part", device_class="gpu", partition_of="gpu-b"),
        Device(name="a-gpu", device_class="gpu"),
    )
    nics = inventory_of(
        device_of(functions[2], "nic-a", device_class="nic"),
        device_of(functions[3], "nic-a-vf", device_class="nic", parent="nic-a"),
        device_class="nic",
    )
    cpus = inventory_of(
        *(Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, numa_nodes=NodeSet(0)) for cpu in (1, 0)),
        device_class="cpu",
    )
    machine = machine_of(*functions)

    every, chosen = path_matrix(machine, [cpus, nics, gpus]), path_matrix(machine, [cpus, nics, gpus], ("cpu", "nic"))

    assert [(row.id, row.name) for row in every.devices] == [
        ("GPU0", "gpu-b"),
        ("GPU1", "gpu-a"),
        ("GPU2", "a-gpu"),
        ("NIC0", "nic-a"),
    ]
    assert [(row.id, row.name) for row in chosen.devices] == [("CPU0", "cpu-0"), ("CPU1", "cpu-1"), ("NIC0", "nic-a")]


def test_path_matrix_tells_cpus_and_nodes_near_a_device() -> None:
    """Of a function what the kernel says, of others the CPUs of their NUMA nodes.

    Unknown places have none, and an id of GPU memory nobody tells.
    """
    near, lost = function(0x40, "other node"), function(0x41, "nowhere")
    devices = (
        device_of(near, "a"),
        device_of(lost, "b"),
        Device(name="c", device_class="gpu", numa_nodes=NodeSet(0, 1)),
        device_of(structs.replace(near, address=PciAddress(0, 0x77, 0, 0)), "d"),
    )

    matrix = path_matrix(machine_of(near, lost), [inventory_of(*devices)])

    assert {row.name: (str(row.cpu_affinity), str(row.numa_affinity), row.gpu_numa_id) for row in matrix.devices} == {
        "a": ("2-3", "1", None),
        "b": ("", "", None),
        "c": ("0-3", "0-1", None),
        "d": ("2-3", "1", None),
    }
