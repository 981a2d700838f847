"""Slice plans: what is written so that a pool shows its devices, and what is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.partitioned_cards import card, counters_of
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.kubernetes.pool_slices import own_part, publishable
from topobus.formats.kubernetes.resource import (
    Attribute,
    SliceDevice,
    SliceSpec,
    Taint,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.kubernetes.slices import shared_counters
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.slices import (
    LIST_FIELDS,
    SlicePlan,
    SlicePool,
    dropped_fields,
    has_lists,
    kept_devices,
    pool_devices,
    pool_of_slice,
    shows_silence,
    silence_taint,
    slice_plan,
    without_fields,
)
from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.idset import NodeSet
from topobus.values.request import Owner, OwnerKind

NODE = "n1"


def devices(count: int, *, sick: int | None = None) -> tuple[SliceDevice, ...]:
    """Devices of an inventory, one of them sick."""
    fault = Condition(
        dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc", since="2026-01-02T03:04:05Z"
    )
    devices = tuple(
        Device(
            name=f"gpu-{index:03d}",
            device_class="gpu",
            model="T4",
            health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(fault,)) if index == sick else DeviceHealth(),
        )
        for index in range(count)
    )
    return pool_devices(Inventory(node=NODE, device_class="gpu", generation=1, devices=devices), {})


def store(plan: SlicePlan, before: tuple[ApiObject, ...] = (), *, version: int = 10) -> tuple[ApiObject, ...]:
    """Do what a plan says, as a server would."""
    gone = {deletion.name for deletion in plan.deletes} | {
        str(api_object.metadata["name"]) for api_object in plan.updates
    }
    kept = [api_object for api_object in before if api_object.metadata["name"] not in gone]
    made: list[ApiObject] = []
    for index, api_object in enumerate((*plan.updates, *plan.creates)):
        name = api_object.metadata.get("name") or f"{api_object.metadata['generateName']}abcde"
        metadata = {**api_object.metadata, "name": name, "uid": f"uid-{name}", "resourceVersion": str(version + index)}
        made.append(msgspec.structs.replace(api_object, metadata=metadata))
    return (*kept, *made)


def plan_of(count: int, present: tuple[ApiObject, ...] = (), *, sick: int | None = None, **more: Any) -> SlicePlan:
    """Plan a pool."""
    return slice_plan(SlicePool(NODE, "node-uid"), devices(count, sick=sick), present, **more)


def specs(objects: tuple[ApiObject, ...]) -> list[SliceSpec]:
    """Read what would be stored."""
    return [read_as(api_object.spec, SliceSpec, where="test") for api_object in objects]


def test_plan_cuts_the_pool_when_there_are_many_devices() -> None:
    """64 devices a slice, an index in front of the name, the node as owner, every limit kept, all
    devices there in order.
    """
    plan = plan_of(150, sick=3)

    slice_specs = specs(plan.creates)
    assert [len(slice_spec.devices) for slice_spec in slice_specs] == [64, 64, 22]
    assert [api_object.metadata["generateName"] for api_object in plan.creates] == [
        f"{index:03x}-topobus.dev-n1-" for index in range(3)
    ]
    assert {api_object.metadata["ownerReferences"][0]["uid"] for api_object in plan.creates} == {"node-uid"}
    assert [device.name for spec in slice_specs for device in spec.devices] == [
        f"gpu-{index:03d}" for index in range(150)
    ]
    assert {
        (slice_spec.pool.name, slice_spec.pool.generation, slice_spec.pool.resource_slice_count)
        for slice_spec in slice_specs
    } == {("n1", 1, 3)}
    assert [problem for slice_spec in slice_specs for problem in check_slice(slice_spec)] == []


def test_plan_is_empty_when_nothing_differs() -> None:
    """What was stored is what is wanted: no write."""
    present = store(plan_of(70, sick=1))

    assert plan_of(70, present, sick=1).is_empty


def test_plan_keeps_the_generation_when_one_update_is_enough() -> None:
    """A fault changes one slice, with the version that it replaces.

    The others and the generation stay.
    """
    present = store(plan_of(70))

    plan = plan_of(70, present, sick=69)

    assert (plan.generation, len(plan.updates), plan.creates, plan.deletes) == (1, 1, (), ())
    assert plan.updates[0].metadata["resourceVersion"] == present[1].metadata["resourceVersion"]
    (taint,) = specs(plan.updates)[0].devices[-1].taints
    assert (taint.effect, taint.time_added) == ("NoExecute", "2026-01-02T03:04:05Z")


def test_plan_raises_the_generation_for_all_when_the_pool_grows_or_shrinks() -> None:
    """A pool that needs more than one write is one of the next generation as a whole, so that
    nobody mixes two states.
    """
    slices = store(plan_of(70))

    more = plan_of(140, slices)
    fewer = plan_of(10, slices)

    assert (more.generation, len(more.updates), len(more.creates)) == (2, 2, 1)
    assert {spec.pool.generation for spec in specs((*more.updates, *more.creates))} == {2}
    # One slice too many is deleted, and the other is updated once: still no two states to mix.
    assert (fewer.generation, [deletion.name for deletion in fewer.deletes], len(fewer.updates)) == (
        1,
        [slices[1].metadata["name"]],
        1,
    )
    assert (fewer.deletes[0].uid, fewer.deletes[0].resource_version) == (
        slices[1].metadata["uid"],
        slices[1].metadata["resourceVersion"],
    )


def test_plan_begins_above_what_was_written_when_all_slices_are_gone() -> None:
    """After a wipe the pool comes back with a higher generation than any that a scheduler may
    remember.
    """
    plan = plan_of(70, (), last_generation=7)

    assert (plan.generation, len(plan.creates)) == (8, 2)


def test_plan_shows_an_empty_slice_when_there_is_no_device() -> None:
    """No device is one empty slice, for no slice at all says nothing."""
    plan = plan_of(0)

    (only,) = specs(plan.creates)
    assert (only.devices, only.pool.resource_slice_count) == ((), 1)
    assert plan_of(0, store(plan)).is_empty


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"name": "zzz-not-ours"}, id="no-index"),
        pytest.param({"name": "fff-topobus.dev-n1-x"}, id="index-too-high"),
        pytest.param({"name": "000-topobus.dev-n1-zzzzz"}, id="second-of-one-index"),
    ],
)
def test_plan_deletes_a_slice_when_it_does_not_belong_to_the_pool(metadata: dict[str, str]) -> None:
    """A leftover is deleted and nothing else is touched."""
    (good,) = store(plan_of(3))
    leftover = msgspec.structs.replace(good, metadata={**good.metadata, **metadata})

    plan = plan_of(3, (good, leftover))

    assert [deletion.name for deletion in plan.deletes] == [metadata["name"]]
    assert (plan.updates, plan.creates) == ((), ())


@pytest.mark.parametrize("pool", [{"generation": 0}, {"generation": "x"}], ids=["older", "unreadable"])
def test_plan_replaces_a_slice_when_it_is_of_an_older_generation_or_unreadable(pool: dict[str, Any]) -> None:
    """It is deleted, and its devices are published anew with the others of one new generation."""
    first, second = store(plan_of(70))
    broken = msgspec.structs.replace(second, spec={**second.spec, "pool": {**second.spec["pool"], **pool}})

    plan = plan_of(70, (first, broken))

    assert [deletion.name for deletion in plan.deletes] == [second.metadata["name"]]
    assert (plan.generation, len(plan.updates), len(plan.creates)) == (2, 1, 1)


def test_plan_replaces_a_slice_when_it_is_of_another_pool() -> None:
    """A server lets nobody rename a pool, so an update would be refused for ever.

    The other pool's generation does not count here.
    """
    (good,) = store(plan_of(3))
    other = msgspec.structs.replace(
        good, spec={**good.spec, "pool": {**good.spec["pool"], "name": "old", "generation": 9}}
    )

    plan = plan_of(3, (other,))

    assert [deletion.name for deletion in plan.deletes] == [good.metadata["name"]]
    assert (plan.updates, [api_object.spec["pool"]["name"] for api_object in plan.creates], plan.generation) == (
        (),
        [NODE],
        1,
    )


def test_plan_takes_over_slices_when_the_node_was_made_anew() -> None:
    """A node object with another uid would have the slices collected as garbage: the owner is put
    right.
    """
    present = store(plan_of(3))

    plan = slice_plan(SlicePool(NODE, "other-uid"), devices(3), present)

    assert [api_object.metadata["ownerReferences"][0]["uid"] for api_object in plan.updates] == ["other-uid"]


def test_plan_keeps_the_servers_time_when_a_taint_has_none_of_its_own() -> None:
    """The time that the server added is not a difference."""
    taint = Taint(key="topobus.dev/health", value="unknown", effect="NoSchedule")
    wanted = (SliceDevice(name="gpu-0", taints=(taint,)),)
    (stored,) = store(slice_plan(SlicePool(NODE, "u"), wanted, ()))
    stored.spec["devices"][0]["taints"][0]["timeAdded"] = "2026-01-02T03:04:05Z"

    assert slice_plan(SlicePool(NODE, "u"), wanted, (stored,)).is_empty


def test_plan_does_not_write_what_the_server_drops_when_that_is_known() -> None:
    """A field that the server does not keep is found by comparing, and
    from then on no difference.
    """
    plan = plan_of(3, sick=1)
    sent = plan.creates[0]
    kept = msgspec.structs.replace(
        sent, spec=msgspec.to_builtins(without_fields(specs((sent,))[0], ["spec.devices.*.taints"]))
    )
    present = store(SlicePlan(generation=1, creates=(kept,)))

    fields = dropped_fields(sent, present[0])

    assert fields == ("spec.devices.*.taints",)
    assert not plan_of(3, present, sick=1).is_empty
    assert plan_of(3, present, sick=1, dropped=fields).is_empty


def test_lists_are_left_out_whole_when_a_server_does_not_know_them() -> None:
    """An attribute without its value would be refused, so it goes with its value.

    Other attributes stay.
    """
    inventory = Inventory(
        node=NODE,
        device_class="gpu",
        generation=1,
        devices=(Device(name="gpu-0", device_class="gpu", model="T4", numa_nodes=NodeSet(0, 1)),),
    )
    (api_object,) = slice_plan(SlicePool(NODE, "u"), pool_devices(inventory, {}), ()).creates

    (bare,) = specs((api_object,))
    attributes = without_fields(bare, LIST_FIELDS).devices[0].attributes

    assert has_lists(api_object)
    assert set(attributes) == {"class", "model"}


def test_pool_taints_a_device_when_a_pod_holds_it_without_a_claim() -> None:
    """What kubelet gave away through the device plugin is not scheduled again.

    A claim's own devices are.
    """
    inventory = Inventory(
        node=NODE,
        device_class="gpu",
        generation=1,
        devices=tuple(Device(name=name, device_class="gpu") for name in ("a", "b", "c")),
    )
    holders = {
        "a": Owner(kind=OwnerKind.DEVICE_PLUGIN, name="r", uid="u"),
        "b": Owner(kind=OwnerKind.CLAIM, name="c", uid="u"),
    }

    taints = {
        pool_device.name: [(taint.key, taint.value, taint.effect) for taint in pool_device.taints]
        for pool_device in pool_devices(inventory, holders)
    }

    assert taints == {"a": [("topobus.dev/occupied", "device-plugin", "NoSchedule")], "b": [], "c": []}


def test_pool_taints_all_but_the_sick_when_the_service_is_silent() -> None:
    """Silence closes what may be well, and hides no evidence: the sick device keeps its own,
    stronger taint. A spare stays one.
    """
    sick = DeviceHealth(state=HealthState.UNHEALTHY, since="2026-01-02T03:04:05Z")
    recovering = DeviceHealth(state=HealthState.RECOVERING)
    devices = tuple(
        Device(name=name, device_class="gpu", health=health)
        for name, health in (("a", DeviceHealth()), ("b", sick), ("c", recovering))
    )
    devices += (Device(name="d", device_class="gpu", is_spare=True),)
    silence = silence_taint("2026-01-02T03:04:09.5+00:00", "NoSchedule", ())

    shown = pool_devices(Inventory(node=NODE, device_class="gpu", generation=1, devices=devices), {}, silence)

    assert {
        slice_device.name: [(taint.value, taint.effect, taint.time_added) for taint in slice_device.taints]
        for slice_device in shown
    } == {
        "a": [("service-silent", "NoSchedule", "2026-01-02T03:04:09Z")],
        "b": [("unhealthy", "NoExecute", "2026-01-02T03:04:05Z")],
        "c": [("service-silent", "NoSchedule", "2026-01-02T03:04:09Z")],
        "d": [("service-silent", "NoSchedule", "2026-01-02T03:04:09Z"), ("true", "NoSchedule", None)],
    }


def test_silence_keeps_its_time_when_it_is_noticed_anew() -> None:
    """A gateway that restarts sees the same silence later: the taint that is there tells when it
    began, and no toleration begins again.
    """
    inventory = Inventory(
        node=NODE, device_class="gpu", generation=1, devices=(Device(name="gpu-0", device_class="gpu"),)
    )
    first = silence_taint("2026-01-02T03:00:00Z", "NoExecute", ())
    present = store(slice_plan(SlicePool(NODE, "u"), pool_devices(inventory, {}, first), ()))

    again = silence_taint("2026-01-02T04:00:00Z", "NoExecute", present)

    assert again == first
    assert (shows_silence(present), shows_silence(store(plan_of(3, sick=1)))) == (True, False)
    assert silence_taint("2026-01-02T03:00:00Z", "none", present) is None


def shown(name: str, device_class: str = "gpu", **more: Any) -> SliceDevice:
    """A device of a class as a slice shows it."""
    attributes = {"class": Attribute(string=device_class), **more.pop("attributes", {})}
    return SliceDevice(name=name, attributes=attributes, **more)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (shown("gpu-GPU_0"), "name"),
        (shown("gpu-a", attributes={f"x{index}": Attribute(int_=1) for index in range(33)}), "34"),
        (shown("gpu-a", attributes={"x": Attribute(string="y" * 65)}), "x"),
        (shown("gpu-a", taints=tuple(Taint(key=f"k{index}", effect="NoSchedule") for index in range(17))), "taints"),
    ],
    ids=[
        "name",
        "attributes",
        "text",
        "taints",
    ],
)
def test_device_is_left_out_alone_when_it_breaks_a_limit(bad: SliceDevice, part: str) -> None:
    """A server refuses a slice as a whole: one bad device must not take its neighbours with it, and
    what is wrong with it is told.
    """
    good, left_out = publishable((shown("gpu-good"), bad, shown("gpu-other")))

    assert [slice_device.name for slice_device in good] == ["gpu-good", "gpu-other"]
    assert list(left_out) == [bad.name]
    assert part in left_out[bad.name]


_PART = (CounterUse(counter_set="gpu-card", counter="memory", amount=1),)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (Device(name="gpu-good", device_class="gpu", model="another"), "two devices named gpu-good"),
        (Device(name="card-0", device_class="gpu"), "class gpu"),
        (Device(name="gpu0", device_class="gpu"), "class gpu"),
        (Device(name="nic-0", device_class="nic"), "class gpu"),
        (Device(name="gpu-acme--0", device_class="gpu"), "class gpu"),
        (Device(name="gpu-0", device_class="nic"), "class gpu"),
        (
            Device(
                name="gpu-0", device_class="gpu", consumes=(msgspec.structs.replace(_PART[0], counter_set="nic-card"),)
            ),
            "nic-card/memory",
        ),
        (
            Device(name="gpu-0", device_class="gpu", consumes=(msgspec.structs.replace(_PART[0], counter="slices"),)),
            "gpu-card/slices",
        ),
    ],
    ids=["twice", "no-class", "no-hyphen", "another-class", "as-another-vendors", "class-of-another", "set", "counter"],
)
def test_class_brings_into_the_pool_only_what_is_its_own(bad: Device, part: str) -> None:
    """A claim knows a device's class by its name alone, and the classes of a node share a pool: what
    one service says must neither stand for another class's device nor make the pool invalid.
    """
    good = Device(name="gpu-good", device_class="gpu", consumes=_PART)
    sets = tuple(CounterSet(name=name, counters={"memory": 1}) for name in ("gpu-card", "nic-card"))
    inventory = Inventory(node=NODE, device_class="gpu", generation=1, devices=(good, bad), counter_sets=sets)

    kept, left_out = own_part(inventory)

    assert (kept.devices, kept.counter_sets) == ((good,), sets[:1])
    assert list(left_out) == [bad.name]
    assert part in left_out[bad.name]


def test_class_of_another_vendors_plugin_brings_its_own() -> None:
    """Its name has a hyphen, and its devices' names two."""
    device = Device(name="gpu-acme--1", device_class="gpu-acme")
    inventory = Inventory(node=NODE, device_class="gpu-acme", generation=1, devices=(device,))

    assert own_part(inventory) == (inventory, {})


@pytest.mark.parametrize(
    ("spec", "pool"),
    [
        pytest.param({"driver": DRIVER, "nodeName": NODE, "pool": {"name": NODE}}, NODE, id="first"),
        pytest.param({"driver": DRIVER, "nodeName": NODE, "pool": {"name": "n1/cpu"}}, "n1/cpu", id="cpus"),
        pytest.param({"driver": DRIVER, "nodeName": NODE, "pool": {"name": "old"}}, NODE, id="no-pool-of-ours"),
        pytest.param({"driver": DRIVER, "nodeName": NODE, "pool": {"name": "n2/cpu"}}, NODE, id="pool-of-another-node"),
        pytest.param({"driver": DRIVER, "nodeName": NODE, "pool": "n1"}, NODE, id="unreadable-pool"),
        pytest.param({"driver": DRIVER, "nodeName": NODE}, NODE, id="no-pool"),
        pytest.param({"driver": "gpu.nvidia.com", "nodeName": NODE, "pool": {"name": NODE}}, "", id="another-driver"),
        pytest.param({"driver": DRIVER, "nodeName": "n2", "pool": {"name": NODE}}, "", id="another-node"),
        pytest.param({"driver": DRIVER, "nodeName": "", "pool": {"name": NODE}}, "", id="no-node"),
    ],
)
def test_pool_of_slice_knows_only_our_driver_on_this_node(spec: dict[str, Any], pool: str) -> None:
    """Another driver's slices, or another node's, are never touched.

    One of ours that is of no pool of the node is filed where a plan deletes it.
    """
    api_object = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceSlice", metadata={}, spec=spec)

    assert pool_of_slice(api_object, NODE) == pool


def test_plan_of_cpus_is_of_their_pool_and_the_node_owns_it() -> None:
    """A pool's name has the node's before the slash; an object's name has no slash."""
    plan = slice_plan(SlicePool("n1/cpu", "u"), (shown("cpu-0", "cpu"),), ())

    (spec,) = specs(plan.creates)
    assert (spec.pool.name, spec.node_name) == ("n1/cpu", NODE)
    assert plan.creates[0].metadata["generateName"] == "000-topobus.dev-n1-cpu-"
    assert plan.creates[0].metadata["ownerReferences"][0]["name"] == NODE


def test_plan_writes_one_slice_when_a_device_of_one_class_changes() -> None:
    """The classes of a pool have slices of their own: a fault of a GPU writes no NIC anew."""
    nics = tuple(shown(f"nic-{index}", "nic") for index in range(3))
    present = store(slice_plan(SlicePool(NODE, "u"), (*devices(70), *nics), ()))

    plan = slice_plan(SlicePool(NODE, "u"), (*devices(70, sick=1), *nics), present)

    assert [[device.name[:3] for device in spec.devices] for spec in specs(present)] == [
        ["gpu"] * 64,
        ["gpu"] * 6,
        ["nic"] * 3,
    ]
    assert [update.metadata["name"] for update in plan.updates] == [present[0].metadata["name"]]
    assert (plan.generation, plan.creates, plan.deletes) == (1, (), ())


def test_kept_devices_are_those_of_one_class_with_its_counters() -> None:
    """What slices show of a class stays while its inventory is not known, and another's changes."""
    cards = Inventory(
        node=NODE,
        device_class="gpu",
        generation=1,
        devices=(*card("gpu-0"), *card("gpu-1")),
        counter_sets=counters_of("gpu-0", "gpu-1"),
    )
    gpus, counters = pool_devices(cards, {}), shared_counters(cards.counter_sets)
    npus = shared_counters(counters_of("npu-0"))
    others = (shown("gpu-acme--0", "gpu-acme"), shown("nic-0", "nic"))
    slices = store(slice_plan(SlicePool(NODE, "u"), (*gpus, *others), (), counter_sets=(*counters, *npus)))

    kept = kept_devices("gpu", specs(slices))

    assert kept == (gpus, counters)
    assert kept_devices("gpu-acme", specs(slices)) == (others[:1], ())
    assert kept_devices("npu", specs(slices)) == ((), npus)
    assert kept_devices("fpga", specs(slices)) == ((), ())


def test_plan_is_empty_when_all_classes_are_kept() -> None:
    """A gateway that starts before any device service writes nothing."""
    wanted = (*devices(70), *(shown(f"nic-{index}", "nic") for index in range(3)))
    present = store(slice_plan(SlicePool(NODE, "u"), wanted, ()))

    kept = [device for name in ("gpu", "nic") for device in kept_devices(name, specs(present))[0]]

    assert slice_plan(SlicePool(NODE, "u"), kept, present).is_empty


def test_kept_device_stands_once_when_an_older_slice_shows_it_too() -> None:
    """A gateway that was killed while a pool shrank leaves slices of two generations, and a server
    refuses a slice that has a device twice.
    """
    before = store(slice_plan(SlicePool(NODE, "u"), devices(70), ()))
    plan = slice_plan(SlicePool(NODE, "u"), devices(70)[1:], before)
    first_write = msgspec.structs.replace(plan, updates=plan.updates[:1])

    kept, _ = kept_devices("gpu", specs(store(first_write, before)))

    assert sorted(device.name for device in kept) == sorted({device.name for device in kept})
