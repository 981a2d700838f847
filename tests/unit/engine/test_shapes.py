"""Which shapes machines have, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from msgspec import structs

from support.shape_machines import at_level, device, inventories, server, shapes_on, summary, without
from support.shape_names import plain
from topobus.cli.simulation.node import open_machine
from topobus.engine.shapes.shapes import Shapes, shapes_of
from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import Device, DeviceRole
from topobus.values.idset import NodeSet

EIGHT_NODES = {node: node // 4 for node in range(8)}
PAIRS = "8 × 1 gpu 1 nic"
WHOLE_SERVER = {
    "gpu-nic": PAIRS,
    "switch": "4 × 2 gpu 2 nic",
    "numa": "2 × 4 gpu 4 nic",
    "socket": "2 × 4 gpu 4 nic",
    "quarter": "4 × 2 gpu 2 nic",
    "half": "2 × 4 gpu 4 nic",
    "machine": "1 × 8 gpu 8 nic",
}
"""Two sockets, two switches a socket, two GPUs and two NICs a switch."""


def uses(*keys: tuple[str, str]) -> tuple[CounterUse, ...]:
    """One of each counter."""
    return tuple(CounterUse(counter_set=counter_set, counter=counter, amount=1) for counter_set, counter in keys)


def changed(devices: list[Device], name: str, **fields: object) -> list[Device]:
    """The devices, one of them with other fields."""
    return [structs.replace(each, **fields) if each.name == name else each for each in devices]


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        pytest.param("dgx", WHOLE_SERVER | {"machine": "1 × 2 fpga 8 gpu 8 nic"}, id="dgx"),
        pytest.param(
            "gb200",
            {
                "gpu-nic": "4 × 1 gpu 1 nic",
                "numa": "2 × 2 gpu 2 nic",
                "socket": "2 × 2 gpu 2 nic",
                "half": "2 × 2 gpu 2 nic",
                "machine": "1 × 4 gpu 4 nic",
            },
            id="gb200",
        ),
        # Two of four GPUs have virtual functions beside them, of which each gets one. Each socket has other
        # NICs as well, of a model that the other one has not.
        pytest.param(
            "epyc-8numa",
            {
                "gpu-nic": "2 × 1 gpu 1 nic",
                "socket": "2 × 2 gpu 1 nic",
                "half": "2 × 2 gpu 1 nic",
                "machine": "1 × 1 fpga 4 gpu 5 nic",
            },
            id="epyc",
        ),
        pytest.param("laptop", {"gpu-nic": "1 × 1 gpu 1 nic", "machine": "1 × 1 gpu 2 nic"}, id="laptop"),
    ],
)
def test_recorded_machine_has_the_shapes_of_its_tree(machine: str, wanted: Mapping[str, str]) -> None:
    """A level is there when its regions are alike."""
    with open_machine(machine) as opened:
        shapes = shapes_of(opened.snapshot.inventories)

    assert summary(shapes) == wanted


@pytest.mark.parametrize(
    ("devices", "sockets", "wanted"),
    [
        pytest.param(server(), None, WHOLE_SERVER, id="two-sockets"),
        pytest.param(
            server(nodes=1),
            None,
            {
                "gpu-nic": "4 × 1 gpu 1 nic",
                "switch": "2 × 2 gpu 2 nic",
                "numa": "1 × 4 gpu 4 nic",
                "socket": "1 × 4 gpu 4 nic",
                "half": "2 × 2 gpu 2 nic",
                "machine": "1 × 4 gpu 4 nic",
            },
            id="one-socket-is-halved-by-its-switches",
        ),
        pytest.param(
            server(nodes=4, switches=1),
            None,
            {
                "gpu-nic": PAIRS,
                "switch": "4 × 2 gpu 2 nic",
                "numa": "4 × 2 gpu 2 nic",
                "socket": "4 × 2 gpu 2 nic",
                "quarter": "4 × 2 gpu 2 nic",
                "half": "2 × 4 gpu 4 nic",
                "machine": "1 × 8 gpu 8 nic",
            },
            id="four-sockets",
        ),
        pytest.param(
            server(nodes=8, switches=1, gpus=1, nics=1),
            EIGHT_NODES,
            {
                "gpu-nic": PAIRS,
                "switch": PAIRS,
                "numa": PAIRS,
                "socket": "2 × 4 gpu 4 nic",
                "quarter": "4 × 2 gpu 2 nic",
                "half": "2 × 4 gpu 4 nic",
                "machine": "1 × 8 gpu 8 nic",
            },
            id="eight-nodes",
        ),
        pytest.param(
            [device(f"{device_class}-{node}", node) for node, device_class in enumerate(["gpu", "nic"] * 4)],
            EIGHT_NODES,
            {
                "socket": "2 × 2 gpu 2 nic",
                "quarter": "4 × 1 gpu 1 nic",
                "half": "2 × 2 gpu 2 nic",
                "machine": "1 × 4 gpu 4 nic",
            },
            id="quarter-has-the-nic-of-the-next-node",
        ),
        pytest.param(
            server(nodes=3),
            dict.fromkeys(range(3), 0),
            {
                "gpu-nic": "12 × 1 gpu 1 nic",
                "switch": "6 × 2 gpu 2 nic",
                "numa": "3 × 4 gpu 4 nic",
                "socket": "1 × 12 gpu 12 nic",
                "machine": "1 × 12 gpu 12 nic",
            },
            id="three-nodes-have-no-half",
        ),
        pytest.param(
            server(nodes=2, switches=3),
            None,
            {
                "gpu-nic": "12 × 1 gpu 1 nic",
                "switch": "6 × 2 gpu 2 nic",
                "numa": "2 × 6 gpu 6 nic",
                "socket": "2 × 6 gpu 6 nic",
                "half": "2 × 6 gpu 6 nic",
                "machine": "1 × 12 gpu 12 nic",
            },
            id="six-switches-have-no-quarter",
        ),
        pytest.param(
            [*server(), device("nic-000a", 0, switch=16, model="X550")],
            None,
            WHOLE_SERVER | {"machine": "1 × 8 gpu 9 nic"},
            id="nic-for-management-under-a-switch",
        ),
        pytest.param(
            [*server(), device("nic-a", 0, root="pci0000:70", model="X550")],
            None,
            WHOLE_SERVER | {"machine": "1 × 8 gpu 9 nic"},
            id="nic-for-management-beside-the-switches",
        ),
        pytest.param(
            [*server(), *(device(f"nic-{node}", node, switch=112 + node, model="CX7") for node in range(2))],
            None,
            WHOLE_SERVER
            | {
                "numa": "2 × 4 gpu 5 nic",
                "socket": "2 × 4 gpu 5 nic",
                "half": "2 × 4 gpu 5 nic",
                "machine": "1 × 8 gpu 10 nic",
            },
            id="nics-for-storage-under-switches-of-their-own",
        ),
        pytest.param(
            [*server(), device("nic-1", 0, root="pci0000:70", model="CX7")],
            None,
            WHOLE_SERVER | {"machine": "1 × 8 gpu 9 nic"},
            id="nic-for-storage-on-one-socket",
        ),
        pytest.param(
            [*server(), device("nic-002", 0, switch=16, model="CX7")],
            None,
            WHOLE_SERVER | {"machine": "1 × 8 gpu 9 nic"},
            id="nic-for-storage-under-one-switch",
        ),
        pytest.param(
            [
                device("gpu-0", 0),
                device("gpu-1", 0),
                device("gpu-2", 1),
                device("gpu-3", 1),
                device("fpga-0", 0),
                device("fpga-1", 1),
                device("fpga-2", 1),
            ],
            None,
            dict.fromkeys(("numa", "socket", "half"), "1 × 2 fpga 2 gpu") | {"machine": "1 × 3 fpga 4 gpu"},
            id="one-fpga-more-on-a-socket",
        ),
        pytest.param(
            [device(f"gpu-{number}", number // 3, model="AAB"[number % 3]) for number in range(3)]
            + [device(f"gpu-{number}", number // 3, model="ABB"[number % 3]) for number in range(3, 6)],
            None,
            {"machine": "1 × 6 gpu"},
            id="two-models-mixed-differently",
        ),
        pytest.param(
            [
                *server(nics=0),
                *(
                    device(f"nic-{node}-{bus}-{number}", node, switch=16 * (node + 1) + bus, parent=f"nic-{bus}")
                    for node, bus, number in product(range(2), range(2), range(16))
                ),
            ],
            None,
            WHOLE_SERVER,
            id="a-virtual-function-for-each-gpu",
        ),
        pytest.param(
            [*server(), device("fpga-0", 1, switch=112)],
            None,
            WHOLE_SERVER | {"machine": "1 × 1 fpga 8 gpu 8 nic"},
            id="lone-fpga",
        ),
        pytest.param(
            [*server(), device("fpga-0", None), device("nic-z", None, model="CX7")],
            None,
            WHOLE_SERVER | {"machine": "1 × 1 fpga 8 gpu 9 nic"},
            id="devices-without-a-node-are-in-the-machine-alone",
        ),
        pytest.param(
            [*server(), *(device(f"fpga-{node}", node) for node in range(2))],
            None,
            WHOLE_SERVER
            | {
                "numa": "2 × 1 fpga 4 gpu 4 nic",
                "socket": "2 × 1 fpga 4 gpu 4 nic",
                "half": "2 × 1 fpga 4 gpu 4 nic",
                "machine": "1 × 2 fpga 8 gpu 8 nic",
            },
            id="fpga-on-each-socket",
        ),
        pytest.param(
            [
                *without(server(), "gpu-1"),
                *(structs.replace(each, model="A100") for each in server()[8:] if each.name[0] == "g"),
            ],
            None,
            WHOLE_SERVER,
            id="two-models-of-gpu-one-a-half",
        ),
        pytest.param(
            without(server(nics=1), "none"),
            None,
            WHOLE_SERVER
            | {
                "gpu-nic": "4 × 1 gpu 1 nic",
                "switch": "4 × 2 gpu 1 nic",
                "quarter": "4 × 2 gpu 1 nic",
                "numa": "2 × 4 gpu 2 nic",
                "socket": "2 × 4 gpu 2 nic",
                "half": "2 × 4 gpu 2 nic",
                "machine": "1 × 8 gpu 4 nic",
            },
            id="four-nics-for-eight-gpus",
        ),
        pytest.param(
            server(nics=0),
            None,
            {
                "switch": "4 × 2 gpu",
                "numa": "2 × 4 gpu",
                "socket": "2 × 4 gpu",
                "quarter": "4 × 2 gpu",
                "half": "2 × 4 gpu",
                "machine": "1 × 8 gpu",
            },
            id="gpus-only",
        ),
        pytest.param(server(gpus=0), None, {}, id="nics-only"),
        pytest.param([device("gpu-0")], None, {}, id="one-gpu"),
        pytest.param([], None, {}, id="nothing"),
        pytest.param(
            [device("gpu-0", None), device("nic-0", None)], {}, {"machine": "1 × 1 gpu 1 nic"}, id="nothing-is-known"
        ),
    ],
)
def test_machine_has_the_shapes_of_its_tree(
    devices: list[Device], sockets: Mapping[int, int] | None, wanted: Mapping[str, str]
) -> None:
    """What is under one switch, on one node, on one socket; halves and quarters of whole regions."""
    assert summary(shapes_on(devices, sockets)) == wanted


@pytest.mark.parametrize(
    ("lost", "wanted", "remark"),
    [
        pytest.param(
            ("gpu-000",),
            {
                "gpu-nic": "7 × 1 gpu 1 nic",
                "switch": "3 × 2 gpu 2 nic",
                "quarter": "3 × 2 gpu 2 nic",
                "numa": "1 × 4 gpu 4 nic",
                "socket": "1 × 4 gpu 4 nic",
                "half": "1 × 4 gpu 4 nic",
                "machine": "1 × 7 gpu 8 nic",
            },
            "level half: 0: less than the others of this level have",
            id="one-gpu",
        ),
        pytest.param(
            ("gpu-00",),
            {
                "gpu-nic": "6 × 1 gpu 1 nic",
                "switch": "3 × 2 gpu 2 nic",
                "quarter": "3 × 2 gpu 2 nic",
                "numa": "1 × 4 gpu 4 nic",
                "socket": "1 × 4 gpu 4 nic",
                "half": "1 × 4 gpu 4 nic",
                "machine": "1 × 6 gpu 8 nic",
            },
            "level quarter: 0: less than the others of this level have",
            id="all-gpus-of-a-switch",
        ),
        pytest.param(
            ("gpu-0",),
            {
                "gpu-nic": "4 × 1 gpu 1 nic",
                "switch": "2 × 2 gpu 2 nic",
                "numa": "1 × 4 gpu 4 nic",
                "socket": "1 × 4 gpu 4 nic",
                "machine": "1 × 4 gpu 8 nic",
            },
            "level socket: 0: less than the others of this level have",
            id="all-gpus-of-a-half",
        ),
        pytest.param(("gpu-",), {}, "", id="all-gpus"),
        pytest.param(
            ("nic-000",),
            {
                "gpu-nic": "7 × 1 gpu 1 nic",
                "switch": "3 × 2 gpu 2 nic",
                "quarter": "3 × 2 gpu 2 nic",
                "numa": "1 × 4 gpu 4 nic",
                "socket": "1 × 4 gpu 4 nic",
                "half": "1 × 4 gpu 4 nic",
                "machine": "1 × 8 gpu 7 nic",
            },
            "level gpu-nic: gpu-001: less than the others of this level have",
            id="one-nic",
        ),
        pytest.param(
            ("gpu-000", "nic-100"),
            {
                "gpu-nic": "6 × 1 gpu 1 nic",
                "switch": "2 × 2 gpu 2 nic",
                "quarter": "2 × 2 gpu 2 nic",
                "numa": "1 × 4 gpu 3 nic",
                "socket": "1 × 4 gpu 3 nic",
                "half": "1 × 4 gpu 3 nic",
                "machine": "1 × 7 gpu 7 nic",
            },
            "level half: 0: less than the others of this level have",
            id="a-gpu-here-and-a-nic-there",
        ),
    ],
)
def test_region_is_no_shape_when_it_lost_devices(lost: tuple[str, ...], wanted: Mapping[str, str], remark: str) -> None:
    """No level gives fewer GPUs than its name promised before, the machine apart, and a half of NICs
    alone is none.
    """
    shapes = shapes_on(without(server(), *lost))

    assert summary(shapes) == wanted
    assert remark in shapes.remarks or not remark


def test_pair_has_the_nearest_nic_when_there_are_several() -> None:
    """By switch first, then by root, then by NUMA node; of equally near ones that of the model which is
    near to most GPUs. A pair that is wider than the others of its GPU's model is none.
    """
    devices = [
        device("gpu-a", 0, switch=16, root="pci0000:10", model="H100"),
        device("gpu-b", 0, switch=17, root="pci0000:10", model="H100"),
        device("gpu-c", 0, switch=18, root="pci0000:12", model="H100"),
        device("gpu-d", 0, root="pci0000:12", model="T4"),
        device("gpu-e", 0, model="A2"),
        device("nic-a", 0, switch=16, root="pci0000:10", model="X550"),
        device("nic-b", 0, switch=16, root="pci0000:10", model="CX7"),
        device("nic-c", 0, switch=17, root="pci0000:10", model="CX7"),
        device("nic-d", 0, root="pci0000:12", model="CX7"),
        device("nic-e", 0, model="CX7"),
    ]

    shapes = shapes_on(devices)

    # gpu-c has nic-d by its root, the others of its model have theirs by a switch.
    assert at_level(shapes, "gpu-nic") == [
        ("gpu-e", "nic-e"),
        ("gpu-a", "nic-b"),
        ("gpu-b", "nic-c"),
        ("gpu-d", "nic-a"),
    ]
    assert "level gpu-nic: gpu-c: less than the others of this level have" in shapes.remarks


@pytest.mark.parametrize(
    ("fields", "remarks"),
    [
        pytest.param({"role": DeviceRole.PARTITION_PARENT}, (), id="cut-into-parts"),
        pytest.param({"role": DeviceRole.PASSTHROUGH}, (), id="for-virtual-machines"),
        pytest.param({"allows_multiple": True}, (), id="shared"),
        pytest.param({"partition_of": "gpu-z"}, (), id="part-of-what-is-not-there"),
        pytest.param(
            {"consumes": uses(("gpu-x", "a"), ("gpu-y", "a"))},
            ("gpu-000 is in no shape: gpu-000 takes from 2 counter sets already",),
            id="two-counter-sets-of-its-own",
        ),
    ],
)
def test_device_is_no_part_when_one_holder_does_not_get_it_whole(
    fields: Mapping[str, object], remarks: tuple[str, ...]
) -> None:
    """The shapes are those of the machine without it."""
    shapes = shapes_on(changed(server(), "gpu-000", **fields))

    assert summary(shapes) == summary(shapes_on(without(server(), "gpu-000")))
    assert "gpu-000" not in shapes.uses
    assert shapes.remarks[: len(remarks)] == remarks


def test_partition_takes_a_part_of_what_a_shape_takes_whole() -> None:
    """A card, its partitions and theirs, and virtual functions: each partition takes 1 of what the
    device that it is cut out of, in the end, takes all.
    """
    devices = [
        *changed(server(), "gpu-000", consumes=uses(("gpu-000", "slices"))),
        device("gpu-000-a", partition_of="gpu-000", consumes=uses(("gpu-000", "slices"))),
        device("gpu-000-a-b", partition_of="gpu-000-a", consumes=uses(("gpu-000", "slices"))),
        device("nic-000-vf0", partition_of="nic-000"),
        device("gpu-z-a", partition_of="gpu-z"),
    ]

    shapes = shapes_on(devices)

    amounts = {name: (use.counter, use.amount) for name, use in shapes.uses.items()}
    assert summary(shapes) == WHOLE_SERVER
    assert {name: amounts[name] for name in ("gpu-000", "gpu-000-a", "gpu-000-a-b", "nic-000", "nic-000-vf0")} == {
        "gpu-000": ("gpu-000", 1024),
        "gpu-000-a": ("gpu-000", 1),
        "gpu-000-a-b": ("gpu-000", 1),
        "nic-000": ("nic-000", 1024),
        "nic-000-vf0": ("nic-000", 1),
    }
    assert "gpu-z-a" not in amounts


@pytest.mark.parametrize(
    ("others", "remark"),
    [
        pytest.param(
            [device("gpu-000-a", partition_of="gpu-000", consumes=uses(("gpu-x", "a"), ("gpu-y", "a")))],
            "gpu-000 is in no shape: gpu-000-a takes from 2 counter sets already",
            id="its-partition-has-two-counter-sets",
        ),
        pytest.param(
            [device("gpu-z", model="T4", role=DeviceRole.MANAGEMENT, consumes=uses(("gpu-x", "a")))],
            "gpu-000 is in no shape: it shares the counter gpu-x/a with other devices",
            id="another-device-takes-from-its-counter",
        ),
        pytest.param(
            [
                device("gpu-y", partition_of="gpu-z", role=DeviceRole.MANAGEMENT, consumes=uses(("gpu-x", "a"))),
                device("gpu-z", partition_of="gpu-y", role=DeviceRole.MANAGEMENT),
            ],
            "gpu-000 is in no shape: it shares the counter gpu-x/a with other devices",
            id="partitions-of-each-other",
        ),
    ],
)
def test_device_is_no_part_when_counters_cannot_guard_it(others: list[Device], remark: str) -> None:
    """A device that something else excludes than itself and its partitions would be held beside it."""
    devices = changed(server(), "gpu-000", consumes=uses(("gpu-x", "a")))

    shapes = shapes_on([*devices, *others])

    assert "gpu-000" not in shapes.uses
    assert remark in shapes.remarks


def test_class_of_another_vendors_plugin_is_in_no_shape() -> None:
    """Its plugin hands the devices out by itself."""
    ours = inventories(server())
    of_vendor = structs.replace(ours[0], resource="nvidia.com/gpu")

    assert shapes_of((of_vendor, *ours[1:])) == Shapes()


@pytest.mark.parametrize(
    ("devices", "sockets", "sizes", "left_out"),
    [
        pytest.param(server(), None, [8, 8], [], id="a-set-a-socket"),
        pytest.param(server(nodes=1), None, [8], [], id="one-socket"),
        pytest.param(
            [*server(), device("nic-z", None), structs.replace(device("fpga-z"), numa_nodes=NodeSet(0, 1))],
            None,
            [10, 8],
            [],
            id="unknown-and-several-nodes",
        ),
        pytest.param(server(nodes=4, switches=1, gpus=8, nics=8), None, [32, 32], [], id="four-sockets-that-fit"),
        pytest.param(server(nodes=1, switches=4, gpus=5, nics=5), None, [32, 8], [], id="more-than-32-on-a-socket"),
        pytest.param(
            [*server(nodes=1, switches=4, gpus=5, nics=5), device("gpu-z", 1, model="H100")],
            None,
            [32, 9],
            [],
            id="more-than-32-on-one-of-two-sockets",
        ),
        pytest.param(
            server(nodes=4, switches=2, gpus=5, nics=5),
            None,
            [32, 32, 16],
            ["shape-machine is left out: its parts are in 3 counter sets, and a device may take from 2"],
            id="more-than-64",
        ),
        # NUMA nodes count as sockets.
        pytest.param(server(), {}, [8, 8], [], id="no-cpus"),
    ],
)
def test_counters_are_kept_in_sets_of_at_most_32(
    devices: list[Device], sockets: Mapping[int, int] | None, sizes: list[int], left_out: list[str]
) -> None:
    """Each of two sockets has its own. A shape that would take from a third set is left out and named."""
    shapes = shapes_on(devices, sockets)

    assert [len(counter_set.counters) for counter_set in shapes.counter_sets] == sizes
    assert [counter_set.name for counter_set in shapes.counter_sets] == [f"shape-{at}" for at in range(len(sizes))]
    assert [plain(text).partition(": ")[2] for text in shapes.remarks if "left out" in text] == left_out
    assert {use.counter_set for use in shapes.uses.values()} == {each.name for each in shapes.counter_sets}


def test_no_counters_are_kept_when_no_shape_fits() -> None:
    """A part that is in no shape takes from no set."""
    shapes = shapes_on([device(f"gpu-{number:03}") for number in range(65)])

    assert (shapes.devices, shapes.counter_sets, shapes.uses) == ((), (), {})
    assert plain(shapes.remarks[0]).startswith(
        "level machine: shape-machine is left out: its parts are in 3 counter sets"
    )


def test_shape_is_left_out_when_its_name_is_too_long() -> None:
    """The names of pairs have those of their GPUs."""
    devices = [device("gpu-" + "a" * 50, switch=16), *(device(f"nic-{number}", switch=16) for number in range(2))]

    shapes = shapes_on(devices)

    assert list(map(plain, shapes.parts)) == ["shape-machine"]
    assert [plain(text) for text in shapes.remarks] == [
        f"level gpu-nic: shape-gpu-nic-{'a' * 50} is left out: its name has more than 63 characters",
    ]


def test_shape_says_what_it_is_made_of() -> None:
    """Every shape has every level, and the number and the model of every class, so that no selector
    fails on a shape that lacks one.
    """
    devices = [
        *changed(server(switches=1), "gpu-001", model="A100", capacity={"memory": 1}),
        device("npu-0", 0, model="N1", capacity={"memory": 2}),
    ]

    half, machine = shapes_on(devices).devices[-2:]

    assert half.attributes == {
        "level": "half",
        "gpuNic": False,
        **dict.fromkeys(("switch", "numa", "socket"), True),
        "quarter": False,
        "half": True,
        "machine": False,
        "fpgaCount": 0,
        "fpgaModel": "",
        "gpuCount": 2,
        "gpuModel": "H100",
        "nicCount": 2,
        "nicModel": "CX7",
        "npuCount": 0,
        "npuModel": "",
    }
    assert (plain(half.name), half.pcie_root, half.pcie_roots, half.numa_nodes) == (
        "shape-half-1",
        "pci0000:20",
        (),
        NodeSet(1),
    )
    assert (machine.attributes["gpuModel"], machine.attributes["gpuCount"], machine.capacity) == ("", 4, {"memory": 3})
    assert (machine.pcie_root, machine.pcie_roots) == ("", ("pci0000:10", "pci0000:20"))


def test_regions_with_the_same_parts_are_one_shape() -> None:
    """It is named after the largest of them, and found at all of their levels."""
    shapes = shapes_on(server(nodes=1, switches=1))

    assert list(map(plain, shapes.parts)) == ["shape-gpu-nic-000", "shape-gpu-nic-001", "shape-machine"]


def test_name_of_a_shape_means_its_parts() -> None:
    """A machine of which a class is not known yet has no shape of the same name with fewer parts."""
    whole, later = shapes_on(server()), shapes_on([*server(), device("fpga-0")])
    without_nics = shapes_on(without(server(), "nic-"))

    assert {plain(name) for name in without_nics.parts} < {plain(name) for name in whole.parts}
    assert without_nics.parts.keys().isdisjoint(whole.parts)
    assert all(later.parts[name] == whole.parts[name] for name in whole.parts.keys() & later.parts.keys())
    assert whole.parts.keys() - later.parts.keys() == {whole.devices[-1].name}


def test_counter_sets_of_a_shape_are_declared() -> None:
    """What shapes and devices take is what the sets have."""
    shapes = shapes_on(server())

    assert shapes.counter_sets[0] == CounterSet(
        name="shape-0",
        counters={
            f"{device_class}-0{rest}": 1024 for device_class in ("gpu", "nic") for rest in ("00", "01", "10", "11")
        },
    )
