"""Shapes that an operator adds: what is refused on whatever machine, and in which words."""

from __future__ import annotations

import pytest

from topobus.formats.kubernetes.limit_rules import MAX_CONSUMED_SETS, MAX_COUNTERS
from topobus.formats.messages.codec import decode, encode
from topobus.values.errors import ContractError
from topobus.values.own_shapes import MAX_SHAPE_PARTS, OwnShape, fault_of_own_shapes
from topobus.values.view import NodeAlignment

TRIO = OwnShape(name="trio", parts={"gpu": 2, "nic": 1}, within="numa")
WANTED_NAME = "wanted lower-case letters, digits and single '-' between them, at most 32, such as 'trio'"


def trio(name: str = "trio", **parts: int) -> OwnShape:
    """One with another name, or other parts."""
    return OwnShape(name=name, parts=parts or TRIO.parts, within="numa")


@pytest.mark.parametrize(
    ("shapes", "fault"),
    [
        pytest.param([], "", id="none"),
        pytest.param([TRIO, trio("a-1"), trio("b" * 32)], "", id="several"),
        pytest.param([trio(gpu=64)], "", id="as-many-parts-as-counters"),
        pytest.param([trio("Trio")], f"name: got 'Trio', {WANTED_NAME}", id="no-label"),
        pytest.param([trio("a--b")], f"name: got 'a--b', {WANTED_NAME}", id="two-dashes"),
        pytest.param([trio("b" * 33)], f"name: got '{'b' * 33}', {WANTED_NAME}", id="long-name"),
        pytest.param(
            [trio("half")],
            "name: got 'half', which every machine's own tree may have; wanted another, such as 'trio'",
            id="built-in-level",
        ),
        pytest.param([TRIO, trio(nic=2)], "got 2 shapes with the name 'trio', wanted one", id="one-name"),
        pytest.param(
            [OwnShape(name="trio", parts={}, within="numa")],
            "trio: parts: got none, wanted classes with numbers, such as gpu: 2, nic: 1",
            id="no-parts",
        ),
        pytest.param([trio(gpu=0, nic=2)], "trio: parts: got 0 of class gpu, wanted 1 or more", id="zero"),
        pytest.param([trio(gpu=3, nic=-1)], "trio: parts: got -1 of class nic, wanted 1 or more", id="negative"),
        pytest.param([trio(gpu=1)], "trio: parts: got 1 in all, wanted 2 to 64", id="one-part"),
        pytest.param([trio(gpu=64, nic=1)], "trio: parts: got 65 in all, wanted 2 to 64", id="more-than-counters"),
        pytest.param([trio(cpu=4, gpu=1)], "", id="one-device-with-cpus"),
        pytest.param([trio(cpu=512, gpu=64)], "", id="cpus-are-no-counters"),
        pytest.param(
            [trio(cpu=4)],
            "trio: parts: got CPUs alone, wanted a device beside them: class cpu has CPUs alone",
            id="cpus-alone",
        ),
        pytest.param([trio(cpu=0, gpu=1)], "trio: parts: got 0 of class cpu, wanted 1 or more", id="no-cpus"),
        pytest.param(
            [trio(cpu=8192, gpu=1)], "trio: parts: got 8192 of class cpu, wanted at most 8191", id="many-cpus"
        ),
        pytest.param(
            [trio(cpu=4, gpu=65)],
            "trio: parts: got 65 in all beside CPUs, wanted 1 to 64",
            id="more-than-counters-beside-cpus",
        ),
        pytest.param(
            [trio("cpu-2")],
            "name: got 'cpu-2', with which the names of single CPUs begin; wanted another, such as 'trio'",
            id="name-of-single-cpus",
        ),
        pytest.param([trio(f"s{number}") for number in range(17)], "got 17 shapes, wanted at most 16", id="many"),
    ],
)
def test_shapes_of_an_operator_are_refused_in_words_when_no_machine_could_have_them(
    shapes: list[OwnShape], fault: str
) -> None:
    """What, got and wanted."""
    assert fault_of_own_shapes(shapes) == fault


def test_node_is_not_read_when_its_shapes_are_wrong() -> None:
    """A forged value does not reach those that derive shapes."""
    good = NodeAlignment(node="n", own_shapes=(TRIO,))

    assert decode(encode(good), NodeAlignment) == good
    with pytest.raises(ContractError, match="own_shapes: trio: parts: got 0 of class gpu"):
        decode(encode(good).replace(b'"gpu":2', b'"gpu":0'), NodeAlignment)


def test_most_parts_are_those_that_counters_can_hold() -> None:
    """The number of the API, in a room that does not know the API."""
    assert MAX_SHAPE_PARTS == MAX_CONSUMED_SETS * MAX_COUNTERS
