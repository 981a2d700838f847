"""CPUs of shapes: how many of which NUMA node a shape takes, single CPUs beside them, and what is left to
claims when others hold some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from msgspec import structs

from support.shape_machines import NODE, cpu_group, device, inventories, own_shape, server, shapes_on
from support.shape_names import plain
from topobus.engine.shapes.cpu_places import cpus_left, for_claims
from topobus.engine.shapes.shapes import Shapes, shapes_of
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind

WORKER = own_shape("worker", "numa", gpu=1, nic=1, cpu=4)
CLAIM, OTHER, POD = (
    Owner(kind=kind, namespace="d", name=name, uid=name)
    for kind, name in ((OwnerKind.CLAIM, "c"), (OwnerKind.CLAIM, "o"), (OwnerKind.POD, "p"))
)


def node_of(devices: Iterable[Device], cpus: Sequence[Device]) -> tuple[Inventory, ...]:
    """The inventories of these devices and CPUs."""
    others = [inventory for inventory in inventories(devices) if inventory.device_class != "cpu"]
    return (*others, Inventory(node=NODE, device_class="cpu", generation=1, devices=tuple(cpus)))


def derived(cpus: Sequence[Device], *own_shapes: OwnShape, devices: Sequence[Device] | None = None) -> Shapes:
    """The shapes of a server with two NUMA nodes, or of one with these devices."""
    of_server = server(nodes=2, switches=1) if devices is None else devices
    return shapes_of(node_of(of_server, cpus), own_shapes or (WORKER,))


def counted(shapes: Shapes, level: str = "worker") -> dict[str, Mapping[str, int]]:
    """How many CPUs the shapes of a level take, by their names without digest and level."""
    start = f"shape-{level}-"
    return {plain(name).removeprefix(start): cpus for name, cpus in shapes.cpus.items() if name.startswith(start)}


def holders(**owned: tuple[Owner, Holding]) -> Holders:
    """A ledger with these holdings."""
    return Holders(
        node=NODE,
        allocations={
            name: Allocation(owner=owner, holdings=(holding,), decision_id=name)
            for name, (owner, holding) in owned.items()
        },
    )


def test_shape_takes_cpus_of_its_devices_node_and_each_single_cpu_one_of_the_same_counter() -> None:
    """So a scheduler gives no more CPUs of a node than there are, in shapes and singly together."""
    shapes = derived([cpu_group(0), cpu_group(1, 2)], own_shape("worker", "numa", gpu=1, nic=1, cpu=2))

    takes = {
        plain(shape.name): [(use.counter_set, use.counter, use.amount) for use in shape.consumes]
        for shape in shapes.devices
    }
    assert takes["shape-worker-100"] == [
        ("shape-1", "gpu-100", 1024),
        ("shape-1", "nic-100", 1024),
        ("shape-1", "cpu-numa-1", 2),
    ]
    singles = {name: uses for name, uses in takes.items() if name.startswith("shape-cpu-")}
    assert singles == {
        f"shape-cpu-numa-{node}-{number}": [(f"shape-{node}", f"cpu-numa-{node}", 1)]
        for node, count in ((0, 8), (1, 2))
        for number in range(count)
    }
    totals = {name: total for counters in shapes.counter_sets for name, total in counters.counters.items()}
    assert {name: total for name, total in totals.items() if name.startswith("cpu-")} == {
        "cpu-numa-0": 8,
        "cpu-numa-1": 2,
    }
    assert shapes.groups == {"cpu-numa-0": CpuSet.parse("0-7"), "cpu-numa-1": CpuSet(100, 101)}


def test_single_cpu_is_selected_as_one_that_is_offered_by_itself() -> None:
    """It has its class and node, and what all CPUs of its group have in common."""
    (first, *_) = [each for each in derived([cpu_group(0), cpu_group(1)]).devices if each.name.startswith("shape-cpu-")]

    assert (first.device_class, first.numa_nodes, first.capacity, first.allows_multiple) == (
        "cpu",
        NodeSet(0),
        {"cpus": 1},
        False,
    )
    assert first.attributes == {"numaNode": 0, "threadsPerCore": 2, "kind": "performance"}


def test_single_cpu_has_no_numa_node_on_a_machine_without_any() -> None:
    """A claim that wants its CPUs on a device's node does not get one of which nothing is known."""
    (first, *_) = [
        each
        for each in derived([structs.replace(cpu_group(0), numa_nodes=None)]).devices
        if each.name.startswith("shape-cpu-")
    ]

    assert (first.numa_nodes, first.attributes) == (None, {"threadsPerCore": 2, "kind": "performance"})


@pytest.mark.parametrize(
    ("cpus", "shape", "wanted"),
    [
        pytest.param(
            [cpu_group(0), cpu_group(1)],
            WORKER,
            {f"{node}0{n}": {f"cpu-numa-{node}": 4} for node in (0, 1) for n in (0, 1)},
            id="of-its-node",
        ),
        pytest.param(
            [cpu_group(0), cpu_group(1)],
            own_shape("worker", "machine", gpu=4, cpu=6),
            {"000": {"cpu-numa-0": 4, "cpu-numa-1": 2}},
            id="of-several-nodes-by-whole-cores",
        ),
        pytest.param(
            [cpu_group(0), cpu_group(1)],
            own_shape("worker", "machine", gpu=4, cpu=3),
            {"000": {"cpu-numa-0": 2, "cpu-numa-1": 1}},
            id="of-several-nodes-where-cores-cannot-be-whole",
        ),
        pytest.param(
            [cpu_group(0), cpu_group(1)], own_shape("worker", "machine", gpu=4, cpu=2), {"000": {"cpu-numa-0": 2}},
            id="never-half-a-core-of-each",
        ),
    ],
)  # fmt: skip
def test_cpus_are_of_the_nodes_of_the_devices(
    cpus: Sequence[Device], shape: OwnShape, wanted: dict[str, Mapping[str, int]]
) -> None:
    """A claim's threads are near to its devices."""
    assert counted(derived(cpus, shape)) == wanted


def test_cpus_are_of_the_socket_when_the_node_of_the_devices_has_none() -> None:
    """Memory alone on a node is no reason to have no CPUs."""
    cpus = [cpu_group(0, socket=0), structs.replace(cpu_group(1, socket=1), numa_nodes=NodeSet(1, 3))]
    devices = [device("gpu-0", 2), device("nic-0", 2)]
    sockets = structs.replace(cpu_group(2, 0, socket=0), capacity={"cpus": 0}, attributes={"group": "socket"})

    shapes = derived([*cpus, sockets], devices=devices)

    assert counted(shapes) == {"0": {"cpu-numa-0": 4}}


@pytest.mark.parametrize(
    ("cpus", "shape", "remark"),
    [
        pytest.param(
            [cpu_group(0, 2), cpu_group(1, 2)], WORKER,
            "level worker: shape-worker-000 is left out: wanted 4 cpu of cpu-numa-0, which has 2 for claims",
            id="too-few",
        ),
        pytest.param(
            [cpu_group(0, step=2), cpu_group(1, step=2)], own_shape("worker", "numa", gpu=1, cpu=3),
            "level worker: shape-worker-000 is left out: wanted 3 cpu, and CPUs are given by whole cores of 2 here",
            id="half-a-core",
        ),
        pytest.param(
            [cpu_group(5)], WORKER,
            "level worker: shape-worker-000 is left out: wanted 4 cpu, and near which CPUs its devices are is not "
            "known",
            id="near-none",
        ),
        pytest.param(
            [cpu_group(0, grouping="socket")], WORKER,
            "level worker: CPUs are offered by socket; set cpus.groups of the cpu service to numa",
            id="other-groups",
        ),
        pytest.param(
            [Device(name="cpu-0", device_class="cpu", cpu=0)], WORKER,
            "level worker: CPUs are offered by cpu; set cpus.groups of the cpu service to numa",
            id="one-by-one",
        ),
        pytest.param([], WORKER, "level worker: no CPU service has reported", id="unheard"),
    ],
)  # fmt: skip
def test_shape_is_left_out_in_words_when_it_cannot_have_its_cpus(
    cpus: Sequence[Device], shape: OwnShape, remark: str
) -> None:
    """The other shapes of the machine stay."""
    shapes = derived(cpus, shape)

    assert plain(shapes.remarks[0]) == remark
    assert counted(shapes) == {}
    assert any(each.attributes.get("half") for each in shapes.devices)


def test_cores_are_given_whole_where_the_cpu_service_says_so() -> None:
    """A single CPU is a core then, and what is left over of a node is in none."""
    shapes = derived([cpu_group(0, 7, step=2), cpu_group(1, step=2)])

    cores = [each for each in shapes.devices if plain(each.name).startswith("shape-cpu-numa-0-")]
    assert [(each.capacity, [use.amount for use in each.consumes]) for each in cores] == [({"cpus": 2}, [2])] * 3
    assert shapes.counter_sets[0].counters["cpu-numa-0"] == 6


def test_other_shapes_are_those_of_a_machine_whose_cpus_are_not_counted() -> None:
    """A machine with as many parts as a device may take counters of keeps its largest shape: CPUs get a set
    of their own.
    """
    devices = server(nodes=2, switches=4, gpus=4, nics=4)
    plainly = shapes_on(devices)

    shapes = derived([cpu_group(0), cpu_group(1)], devices=devices)

    others = [
        each for each in shapes.devices if each.attributes.get("level") != "worker" and each.capacity != {"cpus": 1}
    ]
    assert others == list(plainly.devices)
    assert {name: len(counters.counters) for counters in shapes.counter_sets for name in [counters.name]} == {
        "shape-0": 32,
        "shape-1": 32,
        "shape-2": 2,
    }
    assert len(counted(shapes)) == 32


def test_name_of_a_shape_means_its_number_of_cpus() -> None:
    """A claim that was given another number is refused and not prepared with this one."""
    names = [
        {
            each.name
            for each in derived([cpu_group(0), cpu_group(1)], own_shape("worker", "numa", gpu=1, cpu=cpus)).devices
        }
        for cpus in (2, 4)
    ]

    workers = [{name for name in of_machine if name.startswith("shape-worker-")} for of_machine in names]
    assert len(workers[0]) == len(workers[1]) == 4
    assert workers[0].isdisjoint(workers[1])


def test_cpus_are_in_no_counter_without_a_shape_that_has_some() -> None:
    """Groups are offered as they are then."""
    shapes = derived([cpu_group(0), cpu_group(1)], own_shape("pair", "numa", gpu=1, nic=1))

    assert (shapes.groups, shapes.cpus) == ({}, {})
    assert not any(each.device_class == "cpu" for each in shapes.devices)


@pytest.mark.parametrize(
    ("may_have", "reserved", "wanted"),
    [
        pytest.param(None, "", {"cpu-numa-0": 8, "cpu-numa-1": 8}, id="all"),
        pytest.param("2-5,100", "", {"cpu-numa-0": 4, "cpu-numa-1": 1}, id="ours"),
        pytest.param(None, "0-1,100-107", {"cpu-numa-0": 6, "cpu-numa-1": 0}, id="reserved"),
        pytest.param("0-3", "0", {"cpu-numa-0": 3, "cpu-numa-1": 0}, id="both"),
    ],
)
def test_only_cpus_that_claims_may_have_are_counted(
    may_have: str | None, reserved: str, wanted: dict[str, int]
) -> None:
    """A scheduler gives no CPU that the node would refuse."""
    allowed = None if may_have is None else CpuSet.parse(may_have)
    gpus, nics, cpus = node_of(server(nodes=2, switches=1), [cpu_group(0), cpu_group(1)])

    shapes = shapes_of([gpus, nics, for_claims(cpus, allowed, CpuSet.parse(reserved))], [WORKER])

    totals = {name: total for counters in shapes.counter_sets for name, total in counters.counters.items()}
    assert {name: totals[name] for name in wanted} == wanted
    assert {name: len(cpus) for name, cpus in shapes.groups.items()} == wanted


def test_single_cpus_by_name_and_other_classes_are_not_cut() -> None:
    """What is no group has no number of CPUs."""
    named = Inventory(node=NODE, device_class="cpu", generation=1, devices=(Device(name="cpu-0", device_class="cpu"),))
    gpus = Inventory(node=NODE, device_class="gpu", generation=1, devices=(device("gpu-0"),))

    assert for_claims(named, CpuSet(), CpuSet()) is named
    assert for_claims(gpus, CpuSet(), CpuSet()) is gpus


@pytest.mark.parametrize(
    ("ledger", "left"),
    [
        pytest.param(None, {}, id="no-ledger"),
        pytest.param(holders(), {}, id="nothing-held"),
        pytest.param(
            holders(a=(CLAIM, Holding(cpus=CpuSet(0, 1), groups={"cpu-numa-0": CpuSet(0, 1)}))), {}, id="by-a-claim"
        ),
        pytest.param(holders(a=(POD, Holding(cpus=CpuSet(0, 1, 300)))), {"cpu-numa-0": 6}, id="by-a-pod"),
        pytest.param(
            holders(a=(CLAIM, Holding(cpus=CpuSet(1, 102)))), {"cpu-numa-0": 7, "cpu-numa-1": 3}, id="by-name"
        ),
        pytest.param(
            holders(
                a=(CLAIM, Holding(cpus=CpuSet.parse("0-6"), groups={"cpu-numa-0": CpuSet.parse("0-6")})),
                b=(OTHER, Holding(cpus=CpuSet(7, 50), groups={"cpu-numa-0": CpuSet(50)})),
            ),
            {"cpu-numa-0": 8},
            id="never-less-than-claims-have",
        ),
    ],
)
def test_what_is_left_to_claims_is_all_that_others_do_not_hold(ledger: Holders | None, left: dict[str, int]) -> None:
    """A scheduler counts claims alone."""
    groups = {"cpu-numa-0": CpuSet.parse("0-7"), "cpu-numa-1": CpuSet.parse("100-103")}

    expected = {name: count for name, count in left.items() if count != len(groups[name])}
    assert cpus_left(groups, ledger) == expected
