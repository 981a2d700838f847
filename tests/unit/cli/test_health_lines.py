"""One health event in one line: whom it affects, and which pods stand behind a claim."""

from __future__ import annotations

from topobus.cli.commands.health import WatchedEvent, event_line
from topobus.cli.render.device_listings import health_listing
from topobus.formats.messages.messages import HealthEvent
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.request import Owner, OwnerKind

CLAIM = Owner(kind=OwnerKind.CLAIM, name="training", uid="u")
POD = Owner(kind=OwnerKind.POD, name="trainer-0", uid="u0")


def _line(affected: tuple[Owner, ...], pods: tuple[Owner, ...]) -> str:
    event = HealthEvent(
        node="n1",
        device_class="gpu",
        device="gpu-0",
        health=DeviceHealth(state=HealthState.UNHEALTHY),
        generation=2,
        affected=affected,
        pods=pods,
        time="2026-11-20T11:40:38Z",
    )
    return event_line(WatchedEvent(sequence=7, is_present_state=False, event=event)).plain


def test_event_line_names_the_pods_when_a_claim_stands_before_them() -> None:
    """Who holds it and who uses it; a pod that is both is named once."""
    assert _line((CLAIM,), (POD,)).endswith("affects claim default/training  used by pod default/trainer-0")
    assert _line((POD,), (POD,)).endswith("affects pod default/trainer-0")
    assert "affects" not in _line((), ())


def test_health_says_that_a_fault_is_over_when_the_device_recovers() -> None:
    """Its message is of what was seen before; whoever waits learns until when."""
    condition = Condition(
        dimension=Dimension.LINK,
        state=HealthState.RECOVERING,
        reason="link-down",
        message="no carrier",
        until="2026-01-01T08:05:21Z",
    )
    device = Device(
        name="nic-0", device_class="nic", health=DeviceHealth(state=HealthState.RECOVERING, conditions=(condition,))
    )
    inventory = Inventory(node="n1", device_class="nic", generation=1, devices=(device,))

    listing, _ = health_listing([inventory], is_all=False, ledgers={})

    assert "link-down before (it was: no carrier); watched until 2026-01-01T08:05:21Z, then given out again" in map(
        str, listing.rows[0].cells
    )
