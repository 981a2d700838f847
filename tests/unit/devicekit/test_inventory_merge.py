"""Which devices are listed, and which leave."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from topobus.engine.health.health_machine import HealthSettings, silence
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device import Device, DeviceRole, Inventory, KeptFunction
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.partitions import Partitions
from topobus.values.pci import PciAddress

_START = datetime(2026, 1, 1, tzinfo=UTC)
_ADDRESS = PciAddress.parse("0000:18:00.0")
_SETTINGS = HealthSettings(hold_s=10.0, forget_s=60.0)


def _machine(*addresses: PciAddress) -> Machine:
    functions = tuple(PciDevice(address=address, vendor=0x10DE, device=0x2330) for address in addresses)
    return Machine(
        node="n1", numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),), cpus=(), pci_devices=functions
    )


def _device(
    name: str = "gpu-0", driver: str = "acme", pci: PciAddress | None = None, device_class: str = "gpu"
) -> Device:
    return Device(name=name, device_class=device_class, driver=driver, pci=pci)


def _step(
    devices: tuple[Device, ...],
    views: Mapping[str, DriverView],
    *,
    at_s: float = 0.0,
    held: Collection[str] | None = (),
    machine: Machine | None = None,
    counter_sets: tuple[CounterSet, ...] = (),
    inventory_before: Inventory | None = None,
) -> MergedInventory:
    return advance_inventory(
        MergedInventory(devices=devices, counter_sets=counter_sets),
        views,
        inventory_before=inventory_before,
        device_class="gpu",
        machine=machine or _machine(),
        held=held,
        now=_START + timedelta(seconds=at_s),
        settings=_SETTINGS,
    )


def test_inventory_merge_lists_devices_by_name_when_drivers_find_them() -> None:
    """Devices of all drivers come in one list, sorted by name, healthy, each with the driver that
    found it.
    """
    merged = _step(
        (), {"b": DriverView(devices=(_device("gpu-1", driver="x"),)), "a": DriverView(devices=(_device("gpu-0"),))}
    )

    assert [(device.name, device.driver, device.health.state) for device in merged.devices] == [
        ("gpu-0", "a", HealthState.HEALTHY),
        ("gpu-1", "b", HealthState.HEALTHY),
    ]


@pytest.mark.parametrize(
    ("pci", "machine", "reason"),
    [
        pytest.param(_ADDRESS, _machine(), "fell-off-bus", id="its function left the bus"),
        pytest.param(
            _ADDRESS, _machine(_ADDRESS), "device-gone", id="the function is there and the driver does not list it"
        ),
        pytest.param(None, _machine(), "device-gone", id="it never was on a bus"),
    ],
)
def test_inventory_merge_keeps_a_device_as_unhealthy_when_it_vanishes(
    pci: PciAddress | None, machine: Machine, reason: str
) -> None:
    """A vanished device stays listed, Unhealthy, with a reason that
    tells whether it left the bus.
    """
    devices = _step((), {"acme": DriverView(devices=(_device(pci=pci),))}).devices

    merged = _step(devices, {"acme": DriverView(devices=())}, machine=machine, at_s=1)

    assert [(device.health.state, device.health.conditions[0].reason) for device in merged.devices] == [
        (HealthState.UNHEALTHY, reason)
    ]


def test_inventory_merge_keeps_to_one_reason_when_the_machine_copy_lags_behind() -> None:
    """A card that fell off the bus is told of once, although our copy of the machine lists its
    function for a while longer, and again later.
    """
    devices = _step((), {"acme": DriverView(devices=(_device(pci=_ADDRESS),))}).devices
    gone = {"acme": DriverView(devices=(), off_bus=frozenset({_ADDRESS}))}

    early = _step(devices, gone, machine=_machine(_ADDRESS), at_s=1)
    late = _step(early.devices, gone, machine=_machine(), at_s=2)

    assert [(device.health.conditions[0].reason, device.health.since) for device in early.devices] == [
        (device.health.conditions[0].reason, device.health.since) for device in late.devices
    ]
    assert early.devices[0].health.conditions[0].reason == "fell-off-bus"


@pytest.mark.parametrize(
    ("held", "at_s", "is_removed"),
    [
        pytest.param((), 61.0, True, id="nobody holds it and the time is over"),
        pytest.param((), 59.0, False, id="the time is not over"),
        pytest.param(("gpu-0",), 3600.0, False, id="somebody holds it"),
        pytest.param(None, 3600.0, False, id="nobody knows who holds it"),
    ],
)
def test_inventory_merge_forgets_a_vanished_device_when_it_is_free_and_gone_for_long(
    held: tuple[str, ...] | None, at_s: float, *, is_removed: bool
) -> None:
    """A device leaves only when it is known to be free and has been gone for forget_s."""
    views = {"acme": DriverView(devices=())}
    gone = _step((_device(),), views).devices

    merged = _step(gone, views, at_s=at_s, held=held)

    assert [device.name for device in merged.removed] == (["gpu-0"] if is_removed else [])
    assert [device.name for device in merged.devices] == ([] if is_removed else ["gpu-0"])


def test_inventory_merge_counts_from_now_when_the_time_of_a_vanished_device_is_unreadable() -> None:
    """A broken stored time stops no poll: the device is forgotten forget_s after it was read."""
    gone = {"acme": DriverView(devices=())}
    (device,) = _step(_step((), {"acme": DriverView(devices=(_device(),))}).devices, gone, at_s=1).devices
    health = msgspec.structs.replace(
        device.health,
        conditions=tuple(
            msgspec.structs.replace(condition, since="yesterday") for condition in device.health.conditions
        ),
    )

    first = _step((msgspec.structs.replace(device, health=health),), gone, at_s=100)
    still = _step(first.devices, gone, at_s=159)
    late = _step(first.devices, gone, at_s=160)

    assert [len(merged.devices) for merged in (first, still, late)] == [1, 1, 0]


@pytest.mark.parametrize("reason", ["driver-hung", "driver-failed"])
def test_inventory_merge_keeps_devices_as_unknown_when_their_driver_is_silent(reason: str) -> None:
    """Silence makes a driver's devices Unknown, for ever if need be, and leaves other drivers'
    devices alone.
    """
    devices = (_device(), _device("gpu-1", driver="other"))
    views = {
        "acme": DriverView(devices=(), silence=silence(reason, "no answer")),
        "other": DriverView(devices=(_device("gpu-1", driver="other"),)),
    }

    first = _step(devices, views)
    later = _step(first.devices, views, at_s=100_000)

    assert [device.health.state for device in later.devices] == [HealthState.UNKNOWN, HealthState.HEALTHY]
    assert later.removed == ()


def test_inventory_merge_leaves_known_devices_alone_when_their_driver_has_not_looked_yet() -> None:
    """After a restart, what was stored stands until the driver's first look."""
    devices = _step((), {"acme": DriverView(devices=(_device(),))}).devices

    assert _step(devices, {"acme": DriverView()}, at_s=100).devices == devices


def test_inventory_merge_repeats_earlier_warnings_when_a_driver_has_not_looked_yet() -> None:
    """The first inventories after a restart have the warnings and kept functions of before, and say
    that the driver has not looked; afterwards its own word counts.
    """
    kept = KeptFunction(pci=_ADDRESS, role=DeviceRole.MANAGEMENT, why="the default route of this node goes over it")
    said = Inventory(
        node="n", device_class="gpu", generation=7, warnings=("acme: one card is left out", "other: gone"), kept=(kept,)
    )
    waits = "acme: it has not looked for its devices yet since the service was started"

    first = _step((), {"acme": DriverView()}, inventory_before=said)
    again = _step((), {"acme": DriverView()}, inventory_before=msgspec.structs.replace(said, warnings=first.warnings))
    fresh = _step((), {"acme": DriverView()})
    looked = _step((), {"acme": DriverView(devices=(_device(),))}, inventory_before=said)

    assert (first.warnings, first.kept) == (("acme: one card is left out", waits), (kept,))
    assert again.warnings == first.warnings
    assert (fresh.warnings, fresh.kept) == ((waits,), ())
    assert (looked.warnings, looked.kept) == ((), ())


@pytest.mark.parametrize(
    ("view", "has_looked"),
    [
        pytest.param(DriverView(), False, id="not-yet"),
        pytest.param(DriverView(devices=()), True, id="found-nothing"),
        pytest.param(DriverView(silence=silence("driver-hung", "it hangs")), True, id="hangs"),
    ],
)
def test_inventory_merge_counts_as_looked_when_no_driver_is_awaited(view: DriverView, has_looked: bool) -> None:
    """As long as one driver has not looked, its devices are those of the run before, maybe of an
    earlier boot.
    """
    assert _step((), {"acme": view, "other": DriverView(devices=())}).has_looked is has_looked


def test_inventory_merge_forgets_devices_when_their_plugin_is_gone_for_long() -> None:
    """Devices of a plugin that is no longer installed become Unknown and leave after forget_s when
    nobody holds them.
    """
    first = _step((_device(),), {})
    later = _step(first.devices, {}, at_s=61)

    assert first.devices[0].health.conditions[0].reason == "driver-not-loaded"
    assert [device.name for device in later.removed] == ["gpu-0"]


@pytest.mark.parametrize(
    ("device", "text"),
    [
        pytest.param(_device("GPU_0"), "DNS label", id="name"),
        pytest.param(_device(device_class="nic"), "class", id="class"),
        pytest.param(
            _device("card-0"), "wanted a name that begins with 'gpu-' and has no '--'", id="class-not-in-name"
        ),
        pytest.param(
            _device("gpu-acme--0"), "wanted a name that begins with 'gpu-' and has no '--'", id="vendors-mark"
        ),
    ],
)
def test_inventory_merge_leaves_out_a_device_when_it_breaks_the_contract(device: Device, text: str) -> None:
    """A device that others could not name is left out with a warning; its neighbour is listed."""
    merged = _step((), {"acme": DriverView(devices=(device, _device("gpu-1")))})

    assert [each_device.name for each_device in merged.devices] == ["gpu-1"]
    assert text in merged.warnings[0]


def test_inventory_merge_gives_a_name_to_the_first_driver_when_two_claim_it() -> None:
    """Of two drivers that find one name, the one that sorts first gets it, and a warning tells of
    the other.
    """
    views = {"b": DriverView(devices=(_device(),)), "a": DriverView(devices=(_device(),))}

    merged = _step((), views)

    assert [device.driver for device in merged.devices] == ["a"]
    assert "a has found it already" in merged.warnings[0]


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        pytest.param(NodeSet(7), None, id="missing"),
        pytest.param(NodeSet(0, 7), NodeSet(0), id="partly-missing"),
    ],
)
def test_inventory_merge_forgets_numa_nodes_that_the_machine_lacks_when_a_driver_names_them(
    named: NodeSet, kept: NodeSet | None
) -> None:
    """A device on a node that there is not has an unknown node, as PCI functions have, and one
    warning names driver, devices and node.
    """
    odd = tuple(Device(name=f"gpu-{number}", device_class="gpu", numa_nodes=named) for number in range(6))
    good = Device(name="gpu-8", device_class="gpu", numa_nodes=NodeSet(0))

    merged = _step((), {"acme": DriverView(devices=(*odd, good))})

    assert [device.numa_nodes for device in merged.devices] == [*[kept] * 6, NodeSet(0)]
    assert all(device.is_allocatable for device in merged.devices)
    assert merged.warnings == (
        "acme: gpu-0, gpu-1, gpu-2, gpu-3 and 2 more: got NUMA node 7, wanted one of the nodes 0; taken as unknown",
    )


def test_inventory_merge_believes_numa_nodes_when_the_machine_tells_none() -> None:
    """A machine without nodes says nothing of which are missing."""
    machine = Machine(node="n1", numa_nodes=(), cpus=())
    device = Device(name="gpu-0", device_class="gpu", numa_nodes=NodeSet(7))

    merged = _step((), {"acme": DriverView(devices=(device,))}, machine=machine)

    assert ([device.numa_nodes for device in merged.devices], merged.warnings) == ([NodeSet(7)], ())


def test_inventory_merge_applies_observations_when_a_driver_sees_a_fault() -> None:
    """An observation makes its device Unhealthy and no other."""
    fault = Observation(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc")
    view = DriverView(devices=(_device("gpu-0"), _device("gpu-1")), observations={"gpu-0": [fault]})

    merged = _step((), {"acme": view})

    assert [device.health.state for device in merged.devices] == [HealthState.UNHEALTHY, HealthState.HEALTHY]


def _part(name: str, partition_of: str = "") -> Device:
    return Device(name=name, device_class="gpu", partition_of=partition_of)


def test_inventory_merge_goes_on_counting_a_vanished_part_while_it_is_held() -> None:
    """The card is not offered whole while somebody holds a part that its driver no longer finds.

    Once nobody does, it is again.
    """
    views = {"acme": DriverView(devices=(_part("gpu-card"), _part("gpu-card-a", "gpu-card")))}
    before = _step((), views)

    gone = {"acme": DriverView(devices=(_part("gpu-card"),))}
    held = _step(before.devices, gone, held=("gpu-card-a",), at_s=100, counter_sets=before.counter_sets)
    removed = _step(held.devices, gone, at_s=200, counter_sets=held.counter_sets)
    left = _step(removed.devices, gone, at_s=201, counter_sets=removed.counter_sets)

    assert Partitions(held.devices, held.counter_sets).shortage(("gpu-card-a",), ("gpu-card",)) is not None
    assert [(device.name, device.consumes) for device in left.devices] == [("gpu-card", ())]
    assert left.counter_sets == ()


@pytest.mark.parametrize(
    ("held", "is_counted"),
    [((), False), (("gpu-card",), True), (None, True)],
    ids=["nobody holds it", "somebody does", "nobody knows"],
)
def test_inventory_merge_counts_a_card_that_was_cut_while_somebody_may_hold_it(
    held: tuple[str, ...] | None, *, is_counted: bool
) -> None:
    """Its parts are given beside the card that is gone when nobody holds it, through both doors.

    While somebody may, they are not.
    """
    before = _step((), {"acme": DriverView(devices=(_part("gpu-card"),))})
    cut = {"acme": DriverView(devices=(_part("gpu-card-a", "gpu-card"), _part("gpu-card-b", "gpu-card")))}

    first = _step(before.devices, cut, held=held, at_s=1)
    merged = _step(first.devices, cut, held=held, at_s=2, counter_sets=first.counter_sets)

    assert [(device.name, device.health.state) for device in merged.devices] == [
        ("gpu-card", HealthState.UNHEALTHY),
        ("gpu-card-a", HealthState.HEALTHY),
        ("gpu-card-b", HealthState.HEALTHY),
    ]
    shortage = Partitions(merged.devices, merged.counter_sets).shortage(("gpu-card",), ("gpu-card-a",))
    assert (shortage is not None, bool(Partitions(merged.devices, merged.counter_sets).rivals())) == (
        is_counted,
        is_counted,
    )
    assert bool(merged.counter_sets) is is_counted


def test_inventory_merge_keeps_the_counters_of_a_silent_driver() -> None:
    """A driver that is not loaded tells no counter sets, and its devices still take from those that
    it told before.
    """
    card = CounterSet(name="gpu-card", counters={"slices": 7})
    device = Device(
        name="gpu-card-a",
        device_class="gpu",
        driver="acme",
        consumes=(CounterUse(counter_set="gpu-card", counter="slices", amount=3),),
    )

    merged = _step((device,), {}, held=("gpu-card-a",), counter_sets=(card,))

    assert (merged.counter_sets, merged.devices[0].consumes) == ((card,), device.consumes)


def test_inventory_merge_leaves_a_device_out_when_its_shares_or_counters_make_no_sense() -> None:
    """A warning says which device and why; the others stay."""
    devices = (
        Device(name="gpu-a", device_class="gpu", capacity={"x": 1}, capacity_policies={"x": CapacityPolicy(default=1)}),
        Device(
            name="gpu-b", device_class="gpu", consumes=(CounterUse(counter_set="gpu-card", counter="slices", amount=3),)
        ),
        Device(name="gpu-c", device_class="gpu"),
    )

    merged = _step((), {"acme": DriverView(devices=devices)})

    assert [device.name for device in merged.devices] == ["gpu-c"]
    assert merged.warnings == (
        "acme: device 'gpu-a' is left out: capacity.x.requestPolicy: wanted none without allowMultipleAllocations: "
        "true",
        "acme: device 'gpu-b' is left out: consumes names counter gpu-card/slices, which its driver does not have",
    )


def test_inventory_merge_tells_two_drivers_with_counter_sets_of_one_name() -> None:
    """The driver that sorts first has the name.

    The other one's devices would count against hardware that is not theirs.
    """
    card = CounterSet(name="gpu-card", counters={"slices": 7})

    def view(name: str) -> DriverView:
        use = CounterUse(counter_set="gpu-card", counter="slices", amount=3)
        return DriverView(devices=(Device(name=name, device_class="gpu", consumes=(use,)),), counter_sets=(card,))

    merged = _step((), {"b": view("gpu-b-0"), "a": view("gpu-a-0")})

    assert [device.name for device in merged.devices] == ["gpu-a-0"]
    assert "b: counter set 'gpu-card' is left out: another driver has one of this name" in merged.warnings


def test_inventory_merge_leaves_out_a_counter_set_when_its_name_does_not_tell_the_class() -> None:
    """The counter sets of all classes lie in one pool, so a warning names the set, and the device
    that takes from it.
    """
    use = CounterUse(counter_set="card", counter="slices", amount=3)
    view = DriverView(
        devices=(Device(name="gpu-0", device_class="gpu", consumes=(use,)), Device(name="gpu-1", device_class="gpu")),
        counter_sets=(CounterSet(name="card", counters={"slices": 7}),),
    )

    merged = _step((), {"acme": view})

    assert ([device.name for device in merged.devices], merged.counter_sets) == (["gpu-1"], ())
    assert merged.warnings == (
        "acme: counter set 'card' is left out: wanted a name that begins with 'gpu-' and has no '--'",
        "acme: device 'gpu-0' is left out: consumes names counter card/slices, which its driver does not have",
    )
