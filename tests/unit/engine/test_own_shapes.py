"""The shapes that an operator adds: which devices of a machine they have, case by case."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from support.shape_machines import at_level, device, own_parts, own_shape, server, shapes_on, without
from support.shape_names import plain
from topobus.cli.simulation.node import open_machine
from topobus.engine.shapes.shapes import shapes_of
from topobus.values.device import Device
from topobus.values.own_shapes import OwnShape
from topobus.values.resource_names import SHAPE_LEVELS

TRIO = own_shape("trio", "numa", gpu=2, nic=1)
FOUR_NODES = {node: node // 2 for node in range(4)}


@pytest.mark.parametrize(
    ("devices", "sockets", "shape", "wanted"),
    [
        pytest.param(
            server(),
            None,
            TRIO,
            [
                ("gpu-000", "gpu-001", "nic-000"),
                ("gpu-010", "gpu-011", "nic-010"),
                ("gpu-100", "gpu-101", "nic-100"),
                ("gpu-110", "gpu-111", "nic-110"),
            ],
            id="under-one-switch-first",
        ),
        pytest.param(
            server(nodes=1),
            None,
            own_shape("pair", "machine", gpu=1, nic=1),
            [(f"gpu-0{place}", f"nic-0{place}") for place in ("00", "01", "10", "11")],
            id="each-gpu-with-its-own-nic",
        ),
        pytest.param(
            server(nodes=4, switches=1, gpus=3, nics=0),
            FOUR_NODES,
            own_shape("two", "machine", gpu=2),
            [
                *((f"gpu-{node}00", f"gpu-{node}01") for node in range(4)),
                ("gpu-002", "gpu-102"),
                ("gpu-202", "gpu-302"),
            ],
            id="what-is-left-on-one-socket-before-that-of-two",
        ),
        pytest.param(
            server(nodes=4, switches=1, gpus=3, nics=0),
            FOUR_NODES,
            own_shape("two", "numa", gpu=2),
            [(f"gpu-{node}00", f"gpu-{node}01") for node in range(4)],
            id="never-over-two-places",
        ),
        pytest.param(
            server(nodes=2, switches=1, gpus=4),
            None,
            own_shape("three", "half", gpu=3, nic=2),
            [(*(f"gpu-{node}0{n}" for n in range(3)), f"nic-{node}00", f"nic-{node}01") for node in range(2)],
            id="within-halves",
        ),
        pytest.param(
            server(nodes=1, switches=2, gpus=0, nics=3),
            None,
            own_shape("nics", "switch", nic=2),
            [("nic-000", "nic-001"), ("nic-010", "nic-011")],
            id="without-gpus",
        ),
        pytest.param(
            [device("npu-0"), device("npu-1"), device("gpu-z", None), device("gpu-0", 0, root="pci0000:01")],
            None,
            own_shape("mixed", "machine", gpu=1, npu=2),
            [("gpu-0", "npu-0", "npu-1")],
            id="a-class-of-ones-own",
        ),
        pytest.param(
            [device("gpu-0", None), device("gpu-1", None)],
            None,
            own_shape("both", "machine", gpu=2),
            [("gpu-0", "gpu-1")],
            id="places-unknown",
        ),
        pytest.param(
            [*server(nodes=1, switches=1, gpus=1, nics=1), *(device(f"nic-vf{n}", parent="nic-pf") for n in range(4))],
            None,
            own_shape("four", "machine", gpu=1, nic=4),
            [],
            id="functions-in-no-pair-are-had-singly",
        ),
    ],
)
def test_places_have_as_many_as_fit_with_the_nearest_parts_together(
    devices: list[Device], sockets: Mapping[int, int] | None, shape: OwnShape, wanted: list[tuple[str, ...]]
) -> None:
    """In the machine's order."""
    shapes = shapes_on(devices, sockets, [shape])

    assert own_parts(shapes, shape.name) == wanted


def test_shape_is_named_after_its_level_and_its_first_part() -> None:
    """A digest of the parts follows, as with every shape; counts and models are told by class."""
    with open_machine("dgx") as opened:
        shapes = shapes_of(opened.snapshot.inventories, [TRIO, own_shape("nics", "socket", nic=4)])

    own = [shape for shape in shapes.devices if shape.attributes["level"] in ("trio", "nics")]
    assert [plain(shape.name) for shape in own] == [
        *(f"shape-trio-0000-{bus}-00-0" for bus in ("18", "4b", "9a", "ca")),
        *(f"shape-nics-0000-{bus}-00-0" for bus in ("19", "9b")),
    ]
    attributes = own[0].attributes
    assert (attributes["gpuCount"], attributes["nicCount"], attributes["fpgaCount"]) == (2, 1, 0)
    assert not any(attributes["gpuNic" if level == "gpu-nic" else level] for level in SHAPE_LEVELS)


def test_shape_with_the_parts_of_another_is_a_device_of_its_own() -> None:
    """A class by the attribute level finds it, and those of the tree stay as they are."""
    own = [own_shape("duo", "switch", gpu=2, nic=2), own_shape("duo-2", "switch", gpu=2, nic=2)]
    shapes, before = shapes_on(server(), None, own), shapes_on(server())

    assert own_parts(shapes, "duo") == own_parts(shapes, "duo-2") == at_level(shapes, "switch")
    assert shapes.devices[: len(before.devices)] == before.devices
    assert len({shape.name for shape in shapes.devices}) == len(shapes.devices) == len(before.devices) + 8


def test_shapes_come_last_in_the_order_of_the_setting() -> None:
    """A scheduler that takes the first that fits meets those of the tree as before."""
    own = [own_shape("b", "machine", gpu=2), own_shape("a", "machine", nic=2)]
    levels = [shape.attributes["level"] for shape in shapes_on(server(), None, own).devices]

    assert levels[-8:] == ["b"] * 4 + ["a"] * 4
    assert {"a", "b"}.isdisjoint(levels[:-8])


@pytest.mark.parametrize(
    ("devices", "shape", "remark"),
    [
        pytest.param(
            server(),
            own_shape("own", "numa", npu=1, gpu=1),
            "level own: no device of class npu here can be a part",
            id="class-not-served",
        ),
        pytest.param(
            server(),
            own_shape("own", "numa", gpu=5, nic=1),
            "level own: wanted 5 gpu, 1 nic within one numa; numa 0 comes nearest with 4 gpu, 4 nic",
            id="more-than-a-place-has",
        ),
        pytest.param(
            without(server(), "nic-0"),
            own_shape("own", "numa", gpu=2, nic=5),
            "level own: wanted 2 gpu, 5 nic within one numa; numa 1 comes nearest with 4 gpu, 4 nic",
            id="the-place-with-most",
        ),
        pytest.param(
            server(),
            own_shape("own", "machine", gpu=9, nic=1),
            "level own: wanted 9 gpu, 1 nic within one machine; this one comes nearest with 8 gpu, 8 nic",
            id="more-than-the-machine-has",
        ),
        pytest.param(
            server(nodes=3, switches=1),
            own_shape("own", "half", gpu=2),
            "level own: wanted 2 gpu within one half, and this machine is not divided so",
            id="no-such-place",
        ),
    ],
)
def test_shape_that_a_machine_cannot_have_is_remarked(devices: list[Device], shape: OwnShape, remark: str) -> None:
    """What was wanted, and what there is."""
    shapes = shapes_on(devices, None, [shape])

    assert [text for text in shapes.remarks if text.startswith("level own")] == [remark]


def test_shape_is_left_out_when_its_parts_are_in_too_many_counter_sets() -> None:
    """The API's limit, by the remark that the machine's own shapes have: the sets have GPUs 0 to 31, the
    others with NICs 0 to 23, and the other NICs.
    """
    devices = [device(f"{device_class}-{number:02d}") for device_class in ("gpu", "nic") for number in range(40)]

    shapes = shapes_on(devices, None, [own_shape("ten", "machine", gpu=10, nic=10)])

    assert [parts[0] for parts in own_parts(shapes, "ten")] == ["gpu-00", "gpu-10"]
    assert [plain(text) for text in shapes.remarks if text.startswith("level ten")] == [
        f"level ten: shape-ten-{first} is left out: its parts are in 3 counter sets, and a device may take from 2"
        for first in (20, 30)
    ]
