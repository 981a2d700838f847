"""One health event in one line: whom it affects, and which pods stand behind a claim."""

from __future__ import annotations

from topobus.cli.commands.health import WatchedEvent, event_line
from topobus.contracts.messages import HealthEvent
from topobus.domain.health import DeviceHealth, HealthState
from topobus.domain.request import Owner, OwnerKind

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
