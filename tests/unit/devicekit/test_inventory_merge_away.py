"""A device that sits in a pod's sandbox is listed as it was, whatever of
it the driver still sees.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from topobus.devicekit.verbs.leftovers import dirty, with_leftovers
from topobus.engine.health.health_machine import HealthSettings, silence
from topobus.engine.health.inventory_merge import DriverView, MergedInventory, advance_inventory
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode, PciDevice
from topobus.values.pci import PciAddress

START = datetime(2026, 1, 1, tzinfo=UTC)
ADDRESS = PciAddress.parse("0000:3b:00.0")
CARD = Device(
    name="nic-0000-3b-00-0",
    device_class="nic",
    driver="pci-netdev",
    pci=ADDRESS,
    attributes={
        "vendor": "Mellanox",
        "interface": "eth0",
        "mac": "02:00:00:00:00:01",
        "linkSpeed": 100000,
        "rdma": True,
        "rdmaDevice": "mlx5_0",
    },
)
LEFT = msgspec.structs.replace(CARD, attributes={"vendor": "Mellanox", "rdma": False})
VETH = Device(
    name="nic-veth0",
    device_class="nic",
    driver="pci-netdev",
    attributes={"interface": "veth0", "mac": "02:00:00:00:00:02"},
)
LOST = Observation(
    dimension=Dimension.LINK, state=HealthState.UNHEALTHY, reason="parent-carrier-lost", message="no carrier"
)


def step(
    devices: tuple[Device, ...],
    view: DriverView,
    *,
    at_s: float = 0.0,
    is_on_bus: bool = True,
    held: tuple[str, ...] = (),
) -> MergedInventory:
    """Merge what the driver saw."""
    functions = (PciDevice(address=ADDRESS, vendor=0x15B3, device=0x1021),) if is_on_bus else ()
    machine = Machine(
        node="n", numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1),), cpus=(), pci_devices=functions
    )
    return advance_inventory(
        MergedInventory(devices=devices),
        {"pci-netdev": view},
        device_class="nic",
        machine=machine,
        held=held,
        now=START + timedelta(seconds=at_s),
        settings=HealthSettings(hold_s=10.0, forget_s=60.0),
    )


@pytest.mark.parametrize(
    ("device", "view"),
    [
        pytest.param(CARD, DriverView(devices=(LEFT,), away={CARD.name: CARD}), id="a card without its interface"),
        pytest.param(VETH, DriverView(devices=(), away={VETH.name: VETH}), id="an interface that is all there is"),
        pytest.param(VETH, DriverView(devices=None, away={VETH.name: VETH}), id="before the driver's first look"),
    ],
)
@pytest.mark.parametrize("is_inventory_lost", [False, True], ids=["kept inventory", "lost inventory"])
def test_inventory_merge_lists_a_device_as_it_was_when_it_sits_in_a_sandbox(
    device: Device, view: DriverView, *, is_inventory_lost: bool
) -> None:
    """Not one attribute changes and nothing is called sick, also after a restart, and also when the
    published inventory was lost meanwhile.
    """
    before = step((), DriverView(devices=(device,))).devices

    merged = step(() if is_inventory_lost else before, view, at_s=3600)

    assert [(each.name, each.attributes, each.health.state) for each in merged.devices] == [
        (device.name, device.attributes, HealthState.HEALTHY)
    ]
    assert merged.removed == ()


@pytest.mark.parametrize(
    ("allows_multiple", "mac"),
    [
        pytest.param(False, "02:00:00:00:00:02", id="on its way"),
        pytest.param(True, "02:00:00:00:00:77", id="parent of shared interfaces"),
    ],
)
def test_inventory_merge_decides_what_counts_when_a_device_in_a_sandbox_is_still_in_sight(
    *, allows_multiple: bool, mac: str
) -> None:
    """An interface on its way has the pod's address already: that of before counts, and what was
    not known before is added. A shared parent stays as it shows itself.
    """
    seen = msgspec.structs.replace(
        VETH, allows_multiple=allows_multiple, attributes={**VETH.attributes, "mac": "02:00:00:00:00:77", "mtu": 9000}
    )

    merged = step((), DriverView(devices=(seen,), away={VETH.name: VETH}))

    assert merged.devices[0].attributes == {"interface": "veth0", "mac": mac, "mtu": 9000}


def test_inventory_merge_tells_of_evidence_when_a_device_sits_in_a_sandbox() -> None:
    """What the driver can see of it (its physical function's carrier) still makes it Unhealthy."""
    view = DriverView(devices=(LEFT,), observations={CARD.name: (LOST,)}, away={CARD.name: CARD})

    (device,) = step((CARD,), view).devices

    assert (device.health.state, device.attributes) == (HealthState.UNHEALTHY, CARD.attributes)


def test_inventory_merge_is_unhealthy_when_a_card_leaves_the_bus_while_its_interface_sits_in_a_sandbox() -> None:
    """Only the interface may be away; the card itself may not."""
    (device,) = step((CARD,), DriverView(devices=(), away={CARD.name: CARD}), is_on_bus=False).devices

    assert [condition.reason for condition in device.health.conditions] == ["fell-off-bus"]


def test_inventory_merge_keeps_health_when_nobody_can_look() -> None:
    """A device that was handed out while Degraded does not get well by being out of sight."""
    slow = Observation(dimension=Dimension.LINK, state=HealthState.DEGRADED, reason="speed-dropped", message="slower")
    before = step((), DriverView(devices=(VETH,), observations={VETH.name: (slow,)})).devices

    (device,) = step(before, DriverView(devices=(), away={VETH.name: VETH}), at_s=3600).devices

    assert device.health == before[0].health


def test_inventory_merge_is_unknown_when_the_driver_of_a_device_in_a_sandbox_is_silent() -> None:
    """Silence is told of all its devices alike."""
    (device,) = step(
        (VETH,), DriverView(devices=(), silence=silence("driver-hung", "hangs"), away={VETH.name: VETH})
    ).devices

    assert device.health.state is HealthState.UNKNOWN


def test_inventory_merge_is_unhealthy_when_a_device_has_returned_and_is_not_there() -> None:
    """Once no record names it any more, its absence is a fault again."""
    before = step((VETH,), DriverView(devices=(), away={VETH.name: VETH})).devices

    (device,) = step(before, DriverView(devices=()), at_s=1).devices

    assert [condition.reason for condition in device.health.conditions] == ["device-gone"]


def test_away_device_is_dirty_when_the_host_says_that_it_cannot_be_brought_back() -> None:
    """The driver cannot look at it, but whoever looks at the node must see it.

    Brought back at last it recovers.
    """
    view = with_leftovers(
        {"pci-netdev": DriverView(devices=(), away={VETH.name: VETH})}, {VETH.name: dirty(None, "the netns is stuck")}
    )

    (stuck,) = step((VETH,), view["pci-netdev"]).devices
    (back,) = step((stuck,), DriverView(devices=(VETH,)), at_s=1.0).devices

    assert stuck.health.state is HealthState.UNHEALTHY
    assert [condition.reason for condition in stuck.health.conditions] == ["dirty"]
    assert back.health.state is HealthState.RECOVERING


PART = Device(
    name="nic-0000-3b-02-0",
    device_class="nic",
    driver="pci-netdev",
    pci=PciAddress.parse("0000:3b:02.0"),
    partition_of=CARD.name,
)


def test_inventory_merge_lists_the_parts_of_a_card_as_they_were_when_a_machine_has_the_card() -> None:
    """Virtual functions that could be made when the card is back are not sick: nobody has broken
    them, and the card's counters keep them from being given.
    """
    before = step((), DriverView(devices=(CARD, PART))).devices

    merged = step(before, DriverView(devices=(), away={CARD.name: CARD}, uncut=frozenset({CARD.name})), at_s=3600)

    assert [(device.name, device.health.state, bool(device.consumes)) for device in merged.devices] == [
        (CARD.name, HealthState.HEALTHY, True),
        (PART.name, HealthState.HEALTHY, True),
    ]


@pytest.mark.parametrize(
    ("held", "listed", "removed"),
    [((), [CARD.name], [PART.name]), ((PART.name,), [CARD.name, PART.name], [])],
    ids=["free", "held"],
)
def test_inventory_merge_takes_parts_off_the_list_when_their_card_cannot_be_cut_any_more(
    held: tuple[str, ...], listed: list[str], removed: list[str]
) -> None:
    """The host took the card into use: what was never there is not offered and not sick.

    What somebody holds stays, and is told.
    """
    before = step((), DriverView(devices=(CARD, PART))).devices

    merged = step(before, DriverView(devices=(CARD,), uncut=frozenset({CARD.name})), held=held)

    assert [device.name for device in merged.devices] == listed
    assert [device.name for device in merged.removed] == removed
    assert [device.name for device in merged.devices if device.health.state is not HealthState.HEALTHY] == list(held)


def test_inventory_merge_lists_a_part_as_it_was_when_it_was_made_for_a_machine_just_now() -> None:
    """The driver found it and VFIO has it, and discovery has not told of it yet: it has not fallen
    off the bus.
    """
    before = step((), DriverView(devices=(CARD, PART))).devices
    assert PART.pci is not None

    merged = step(
        before,
        DriverView(
            devices=(CARD,), away={PART.name: PART}, seen=frozenset({ADDRESS, PART.pci}), off_bus=frozenset({PART.pci})
        ),
    )

    assert [(device.name, device.health.state) for device in merged.devices] == [
        (CARD.name, HealthState.HEALTHY),
        (PART.name, HealthState.HEALTHY),
    ]
