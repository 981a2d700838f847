"""Shapes in a node's slices: taints of their parts, and shapes that the machine no longer has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec import structs

from support.shape_machines import NODE, cpu_group, device, inventories, own_shape, server, shapes_on, without
from support.shape_names import plain
from topobus.engine.shapes.in_slices import (
    CHANGED_TAINT,
    SliceShapes,
    cpus_of_shape,
    parts_of,
    published_shapes,
    slice_shapes,
    with_shapes,
    without_groups,
)
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.kubernetes.pool_slices import pool_slices
from topobus.formats.kubernetes.resource import SliceDevice, SliceSpec, Taint
from topobus.formats.kubernetes.slices import HEALTH_TAINT, SICK_TAINT, SPARE_TAINT, slice_device
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.maintenance import DeviceVerb, Maintenance

SINCE = "2026-01-02T03:04:05Z"
OCCUPIED = Taint(key="topobus.dev/occupied", value="pod", effect="NoSchedule")
SILENT = Taint(key=HEALTH_TAINT, value="service-silent", effect="NoSchedule", time_added=SINCE)
CHANGED = Taint(key=CHANGED_TAINT, effect="NoSchedule")


def health(state: HealthState, reason: str) -> DeviceHealth:
    """The health of a device with one fault."""
    return DeviceHealth(
        state=state,
        since=SINCE,
        conditions=(Condition(dimension=Dimension.COMPUTE, state=state, reason=reason, since=SINCE),),
    )


SICK = {"health": health(HealthState.UNHEALTHY, "xid")}
RECOVERING = {"health": health(HealthState.RECOVERING, "dirty")}
WITHHELD = {"maintenance": Maintenance(verb=DeviceVerb.MAINTAIN, why="fan", who="ada", since=SINCE)}
DRAINED = {
    "maintenance": Maintenance(verb=DeviceVerb.EXCLUDE, why="fan", who="ada", since=SINCE, is_draining=True),
}
SICK_NOW = structs.replace(SICK_TAINT, time_added=SINCE)
RECOVERING_NOW = Taint(key=HEALTH_TAINT, value="recovering", effect="NoSchedule", time_added=SINCE)
WITHHELD_NOW = Taint(key="topobus.dev/maintenance", value="maintain", effect="NoSchedule", time_added=SINCE)
DRAINED_NOW = Taint(key="topobus.dev/maintenance", value="exclude", effect="NoExecute", time_added=SINCE)


def listed(
    devices: list[Device],
    states: Mapping[str, Mapping[str, object]] | None = None,
    taints: Mapping[str, Taint] | None = None,
    shapes: SliceShapes | None = None,
) -> dict[str, SliceDevice]:
    """The devices of a node's slices, by name without digest: with these fields, and these taints beside
    their own.
    """
    of_slices = []
    for each in devices:
        shown = slice_device(structs.replace(each, **(states or {}).get(each.name, {})))
        more = (taints[each.name],) if taints and each.name in taints else ()
        of_slices.append(structs.replace(shown, taints=(*shown.taints, *more)))
    of_pool, _ = with_shapes(shapes or slice_shapes(shapes_on(devices)), of_slices)
    return {plain(each.name): each for each in of_pool}


def published(shapes: SliceShapes, devices: list[Device]) -> tuple[SliceSpec, ...]:
    """The slices of a node with these shapes."""
    return tuple(pool_slices(NODE, *with_shapes(shapes, [slice_device(each) for each in devices])).values())


@pytest.mark.parametrize(
    ("states", "taints", "wanted", "reason"),
    [
        pytest.param({}, {}, (), None, id="nothing-is-wrong"),
        pytest.param({}, {"nic-000": OCCUPIED}, (OCCUPIED,), None, id="occupied"),
        pytest.param({"gpu-000": SICK}, {}, (SICK_NOW,), "xid", id="sick"),
        pytest.param({"gpu-000": WITHHELD}, {}, (WITHHELD_NOW,), None, id="maintenance"),
        pytest.param({"gpu-000": {"is_spare": True}}, {}, (SPARE_TAINT,), None, id="spare"),
        pytest.param({}, {"gpu-000": SILENT}, (SILENT,), None, id="silence"),
        pytest.param(
            {"gpu-000": SICK, "gpu-001": WITHHELD},
            {"nic-000": OCCUPIED},
            (SICK_NOW, WITHHELD_NOW, OCCUPIED),
            "xid",
            id="all-of-them",
        ),
        pytest.param({"gpu-000": RECOVERING, "nic-000": SICK}, {}, (SICK_NOW,), "xid", id="the-stronger-comes-last"),
        pytest.param({"gpu-000": SICK, "nic-000": RECOVERING}, {}, (SICK_NOW,), "xid", id="the-stronger-comes-first"),
        pytest.param({"gpu-000": RECOVERING, "gpu-001": RECOVERING}, {}, (RECOVERING_NOW,), "dirty", id="equal-ones"),
        pytest.param(
            {"gpu-000": RECOVERING}, {"gpu-001": SILENT}, (RECOVERING_NOW,), "dirty", id="reason-of-the-first"
        ),
        pytest.param({"gpu-001": RECOVERING}, {"gpu-000": SILENT}, (SILENT,), None, id="no-reason-of-the-second"),
        pytest.param({"gpu-000": WITHHELD, "gpu-001": DRAINED}, {}, (DRAINED_NOW,), None, id="drained"),
    ],
)
def test_shape_has_the_taints_of_its_parts(
    states: Mapping[str, Mapping[str, object]],
    taints: Mapping[str, Taint],
    wanted: tuple[Taint, ...],
    reason: str | None,
) -> None:
    """The stronger one of two with one key, with the reason of that part's fault; shapes of other parts
    have none.
    """
    devices = listed(server(), states, taints)

    quarter = devices["shape-quarter-0"]
    assert quarter.taints == wanted
    assert (quarter.attributes["healthReason"].string if "healthReason" in quarter.attributes else None) == reason
    assert devices["shape-half-1"].taints == ()


def test_shape_is_not_listed_when_one_of_its_parts_is_not() -> None:
    """An excluded device that is free is in no slice."""
    devices = server()

    by_name = listed(without(devices, "gpu-000"), shapes=slice_shapes(shapes_on(devices)))

    assert {name for name in by_name if name.startswith("shape-") and "gpu-nic" not in name} == {
        *(f"shape-quarter-{number}" for number in (1, 2, 3)),
        "shape-half-1",
    }


def test_devices_are_as_before_when_there_are_no_shapes() -> None:
    """No counter is added."""
    devices = tuple(map(slice_device, server()))

    assert with_shapes(SliceShapes(), devices) == (devices, ())


def test_shape_that_is_gone_is_kept_when_a_claim_has_its_parts() -> None:
    """It is offered to nobody new, and takes what is left of its parts from where they count now."""
    before, after = server(), without(server(), "gpu-000")
    was, now = slice_shapes(shapes_on(before)), slice_shapes(shapes_on(after))

    kept = now.keeping(was.devices, {"gpu-001", "nic-001"})

    by_name = listed(after, taints={"nic-001": OCCUPIED}, shapes=kept)
    assert "shape-half-0" not in listed(after, shapes=now)
    assert by_name["shape-half-0"].taints == (CHANGED, OCCUPIED)
    assert parts_of(by_name["shape-half-0"]) == tuple(
        name for name in parts_of({plain(each.name): each for each in was.devices}["shape-half-0"]) if name != "gpu-000"
    )
    assert by_name["shape-half-1"] == listed(after, shapes=now)["shape-half-1"]


def test_shape_is_gone_when_no_claim_has_its_parts() -> None:
    """What nobody holds is not kept."""
    was, now = slice_shapes(shapes_on(server())), slice_shapes(shapes_on(without(server(), "gpu-000")))

    assert "shape-half-0" not in {plain(each.name) for each in now.keeping(was.devices, {"gpu-100"}).devices}
    assert now.keeping(was.devices, set()) == now


def test_shape_with_other_parts_stays_as_it_was_when_a_claim_has_it() -> None:
    """Else the scheduler would see the part that it lost as free. Beside it is the shape as it is now,
    under another name, and alone when the claim ends.
    """
    before = [*server(), device("npu-0", 0), device("npu-1", 1)]
    was, now = slice_shapes(shapes_on(before)), slice_shapes(shapes_on(without(before, "npu-1")))

    kept = now.keeping(was.devices, {"npu-0", "gpu-000"})

    (half_before,), (half_now, half), _ = (
        [each for each in shapes.devices if plain(each.name) == "shape-half-0"] for shapes in (was, kept, now)
    )
    assert (half.name, half.taints, parts_of(half)) == (half_before.name, (CHANGED,), parts_of(half_before))
    assert set(parts_of(half_before)) - set(parts_of(half_now)) == {"npu-0"}
    assert now.keeping(kept.devices, set()) == now


def test_kept_shape_takes_from_two_sets_when_its_parts_lie_in_three() -> None:
    """A server would refuse the whole slice. What lies in the third set is guarded by the ledger."""
    small = server(switches=3, gpus=3, nics=3)
    large = [*small, *(device(f"fpga-{number:03}", number % 2) for number in range(40))]
    was, now = slice_shapes(shapes_on(small)), slice_shapes(shapes_on(large))

    (kept,) = (each for each in now.keeping(was.devices, {"gpu-000"}).devices if each.name == was.devices[-1].name)

    assert [counter_set.name for counter_set in now.counter_sets] == ["shape-0", "shape-1", "shape-2"]
    assert [used.counter_set for used in kept.consumes_counters] == ["shape-0", "shape-1"]


def test_kept_shape_is_gone_when_none_of_its_parts_counts_now() -> None:
    """What takes nothing guards nothing."""
    was = slice_shapes(shapes_on([device("gpu-0"), device("nic-0")]))

    assert slice_shapes(shapes_on([device("nic-0")])).keeping(was.devices, {"nic-0"}) == SliceShapes()


def test_published_shapes_are_those_that_were_written() -> None:
    """Those that are kept among them; newer slices before older ones, whose devices are gone."""
    devices = without(server(), "gpu-000")
    sick = [structs.replace(each, **SICK) if each.name == "gpu-001" else each for each in devices]
    was, now = slice_shapes(shapes_on(server())), slice_shapes(shapes_on(devices))
    shapes = now.keeping(was.devices, {"gpu-001"})
    written = published(shapes, sick)

    read_back = published_shapes(written)

    assert read_back == shapes
    assert published(read_back, sick) == written


def test_published_shapes_are_those_of_the_newest_slices() -> None:
    """A gateway that ended between two writes left slices of two generations."""
    was, now = slice_shapes(shapes_on(server())), slice_shapes(shapes_on(without(server(), "nic-")))
    older, newer = published(was, server()), published(now, without(server(), "nic-"))
    newer = tuple(structs.replace(spec, pool=structs.replace(spec.pool, generation=2)) for spec in newer)

    read_back = published_shapes([*older, *newer])

    assert read_back.counter_sets == now.counter_sets != was.counter_sets


WORKER = own_shape("worker", "numa", gpu=1, nic=1, cpu=4)


def with_cpus(*groups: Device, devices: Sequence[Device] = ()) -> SliceShapes:
    """The shapes of a machine with counted CPUs."""
    of_server = devices or server(nodes=2, switches=1, gpus=1, nics=1)
    cpus = Inventory(node=NODE, device_class="cpu", generation=1, devices=groups)
    others = [inventory for inventory in inventories(of_server) if inventory.device_class != "cpu"]
    return slice_shapes(shapes_of([*others, cpus], [WORKER]))


def listed_with_cpus(shapes: SliceShapes, groups: Sequence[Device] | None, **left: int) -> dict[str, SliceDevice]:
    """The devices of the pool with these shapes, by name without digest."""
    devices = [slice_device(each) for each in server(nodes=2, switches=1, gpus=1, nics=1)]
    shown = None if groups is None else [slice_device(each) for each in groups]
    of_pool, _ = with_shapes(shapes, devices, cpus=shown, left={f"cpu-{name}": n for name, n in left.items()})
    return {plain(each.name): each for each in of_pool}


def test_sick_cpus_make_their_shapes_and_single_cpus_sick() -> None:
    """Those of another node are not concerned, and no group is listed in this pool."""
    groups = [cpu_group(0), structs.replace(cpu_group(1), **SICK)]

    shown = listed_with_cpus(with_cpus(*groups), groups)

    assert {name for name, each in shown.items() if each.taints} == {
        "shape-worker-100",
        *(f"shape-cpu-numa-1-{number}" for number in range(8)),
    }
    assert shown["shape-worker-100"].taints == (SICK_NOW,)
    assert "cpu-numa-1" not in shown


def test_shapes_with_cpus_are_not_listed_when_an_operator_excludes_the_cpus() -> None:
    """The group is not listed then. Where its state is not known they stay as they are."""
    shapes = with_cpus(cpu_group(0), cpu_group(1))

    assert "shape-worker-100" not in listed_with_cpus(shapes, [cpu_group(0)])
    assert {"shape-worker-100", "shape-cpu-numa-1-0"} <= listed_with_cpus(shapes, None).keys()


def test_counter_of_cpus_is_what_others_leave() -> None:
    """The devices stay: a scheduler gives as many as the counter says."""
    shapes = with_cpus(cpu_group(0), cpu_group(1))

    _, counter_sets = with_shapes(shapes, [], left={"cpu-numa-1": 5})

    values = {name: counter.value for each in counter_sets for name, counter in each.counters.items()}
    assert {name: value for name, value in values.items() if name.startswith("cpu-")} == {
        "cpu-numa-0": "8",
        "cpu-numa-1": "5",
    }


def test_single_cpu_that_is_gone_stays_as_long_as_a_claim_has_cpus_of_its_group() -> None:
    """The scheduler goes on counting it. No new claim gets it."""
    was, now = with_cpus(cpu_group(0), cpu_group(1)), with_cpus(cpu_group(0), cpu_group(1, 7))

    kept = now.keeping(was.devices, {"cpu-numa-1"})
    gone = now.keeping(was.devices, {"cpu-numa-0", "gpu-000"})

    (last,) = [each for each in kept.devices if each not in now.devices]
    assert (plain(last.name), last.taints) == ("shape-cpu-numa-1-7", (CHANGED,))
    assert cpus_of_shape(last) == {"cpu-numa-1": 1}
    assert gone == now


def test_groups_that_are_counted_are_in_no_pool() -> None:
    """Others stay."""
    shapes = with_cpus(cpu_group(0), cpu_group(1))
    devices = [slice_device(each) for each in (cpu_group(0), cpu_group(0, grouping="socket"))]

    assert [each.name for each in without_groups(devices, shapes.groups)] == ["cpu-socket-0"]


def test_published_shapes_with_cpus_keep_their_state() -> None:
    """The state of the CPUs may not be known when they are read back."""
    groups = [cpu_group(0), structs.replace(cpu_group(1), **SICK)]
    devices = [slice_device(each) for each in server(nodes=2, switches=1, gpus=1, nics=1)]
    pool = with_shapes(with_cpus(*groups), devices, cpus=[slice_device(each) for each in groups])

    read_back = published_shapes(pool_slices(NODE, *pool).values())

    assert read_back.groups.keys() == {"cpu-numa-0", "cpu-numa-1"}
    assert with_shapes(read_back, devices) == pool
