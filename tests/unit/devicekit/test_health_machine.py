"""The health machine, step by step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from topobus.engine.health.health_machine import (
    HealthSettings,
    clear_sticky_faults,
    is_same_to_readers,
    next_health,
    silence,
)
from topobus.values.health import DeviceHealth, Dimension, HealthState, Observation, RecoveryAction
from topobus.values.timestamps import rfc3339

_START = datetime(2026, 1, 1, tzinfo=UTC)
_SETTINGS = HealthSettings(hold_s=10.0, flap_count=3)


def _at(seconds: float) -> datetime:
    return _START + timedelta(seconds=seconds)


def _sees(
    state: HealthState = HealthState.UNHEALTHY,
    reason: str = "aer-fatal",
    dimension: Dimension = Dimension.LINK,
    *,
    is_sticky: bool = False,
) -> Observation:
    return Observation(
        dimension=dimension, state=state, reason=reason, action=RecoveryAction.RESET_DEVICE, is_sticky=is_sticky
    )


def _walk(*looks: tuple[float, list[Observation]]) -> DeviceHealth:
    health: DeviceHealth | None = None
    for seconds, seen in looks:
        health = next_health(health, seen, now=_at(seconds), settings=_SETTINGS)
    assert health is not None
    return health


def test_health_recovers_after_hold_when_evidence_is_gone() -> None:
    """Unhealthy, then Recovering as soon as the evidence goes, then Healthy when hold_s has passed
    without it.
    """
    sick = _walk((0, [_sees()]))
    recovering = _walk((0, [_sees()]), (1, []))
    still = _walk((0, [_sees()]), (1, []), (10.9, []))
    healthy = _walk((0, [_sees()]), (1, []), (11, []))

    assert [device_health.state for device_health in (sick, recovering, still, healthy)] == [
        HealthState.UNHEALTHY,
        HealthState.RECOVERING,
        HealthState.RECOVERING,
        HealthState.HEALTHY,
    ]
    assert healthy.conditions == ()


def test_health_keeps_reason_and_since_when_the_evidence_stays() -> None:
    """A fault that is seen again and again keeps the time it began."""
    health = _walk((0, [_sees()]), (5, [_sees()]), (9, [_sees()]))

    assert health.since == health.conditions[0].since == "2026-01-01T00:00:00.000000Z"


def test_recovering_tells_what_it_recovers_from_when_asked() -> None:
    """The condition keeps its reason while recovering, and the action becomes: wait."""
    worst = _walk((0, [_sees()]), (1, [])).worst

    assert worst is not None
    assert (worst.reason, worst.action) == ("aer-fatal", RecoveryAction.WAIT)


def test_health_recovers_slower_when_it_relapses() -> None:
    """Each relapse while recovering doubles the hold."""
    looks = ((0.0, [_sees()]), (1.0, []), (2.0, [_sees()]), (3.0, []))

    assert _walk(*looks, (13.5, [])).state is HealthState.RECOVERING
    assert _walk(*looks, (23.0, [])).state is HealthState.HEALTHY


def test_sticky_fault_stays_when_its_evidence_goes() -> None:
    """A sticky fault is Unhealthy for ever, until forgiven: then it heals as others do."""
    sick = _walk((0, [_sees(is_sticky=True)]), (1, []), (10_000, []))
    forgiven = next_health(clear_sticky_faults(sick), [], now=_at(10_001), settings=_SETTINGS)

    assert sick.state is HealthState.UNHEALTHY
    assert forgiven.state is HealthState.RECOVERING


def test_sticky_reason_stays_when_another_fault_of_the_dimension_comes() -> None:
    """What the operator must act on is not hidden by a passing fault."""
    health = _walk((0, [_sees(reason="retired", is_sticky=True)]), (1, [_sees(reason="another")]))

    assert health.conditions[0].reason == "retired"


def test_recovery_begins_anew_when_silence_falls_in_the_middle() -> None:
    """A driver fault that was healing when the driver fell silent is Unknown then, and the time of
    silence does not count as time without it.
    """
    fault = _sees(dimension=Dimension.DRIVER, reason="driver-lost")
    looks = ((0.0, [fault]), (1.0, []), (2.0, [silence("driver-hung", "hung")]))
    silent = _walk(*looks)
    heard = _walk(*looks, (60.0, []))
    healthy = _walk(*looks, (60.0, []), (81.0, []))

    assert [device_health.state for device_health in (silent, heard, healthy)] == [
        HealthState.UNKNOWN,
        HealthState.RECOVERING,
        HealthState.HEALTHY,
    ]


def test_health_is_unknown_when_the_driver_falls_silent() -> None:
    """Silence makes Unknown, and the first word after it makes Healthy again at once: silence was
    no illness.
    """
    silent = _walk((0, []), (1, [silence("driver-hung", "no answer")]))
    back = _walk((0, []), (1, [silence("driver-hung", "no answer")]), (2, []))

    assert silent.state is HealthState.UNKNOWN
    assert back.state is HealthState.HEALTHY


def test_hold_begins_anew_when_silence_interrupts_a_recovery() -> None:
    """Time in which nobody looked does not count as time without evidence."""
    looks = ((0.0, [_sees()]), (1.0, []), (2.0, [silence("driver-hung", "")]), (20.0, []))

    assert _walk(*looks).state is HealthState.RECOVERING
    assert _walk(*looks, (30.0, [])).state is HealthState.HEALTHY


def test_degraded_goes_at_once_when_its_evidence_goes() -> None:
    """A degraded device stays allocatable, so it needs no hold: Recovering would take it away."""
    narrow = _sees(HealthState.DEGRADED, "link-narrow")

    assert _walk((0, [narrow])).state is HealthState.DEGRADED
    assert _walk((0, [narrow]), (1, [])).state is HealthState.HEALTHY


def test_unhealthy_becomes_degraded_only_after_the_hold_when_evidence_gets_milder() -> None:
    """A degraded device may be handed out, so the way from Unhealthy leads through Recovering."""
    narrow = _sees(HealthState.DEGRADED, "link-narrow")

    assert _walk((0, [_sees()]), (1, [narrow])).state is HealthState.RECOVERING
    assert _walk((0, [_sees()]), (1, [narrow]), (11, [narrow])).state is HealthState.DEGRADED


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        pytest.param([_sees()], True, id="same fault"),
        pytest.param([_sees(reason="link-down")], False, id="another reason"),
        pytest.param([], False, id="no fault"),
    ],
)
def test_is_same_to_readers_tells_news_from_repetition_when_asked(other: list[Observation], is_same: bool) -> None:
    """Only what a subscriber must know makes an event."""
    assert is_same_to_readers(_walk((0, [_sees()])), _walk((0, other))) is is_same


@pytest.mark.parametrize(
    "since",
    [
        pytest.param("yesterday", id="no time"),
        pytest.param("", id="empty"),
        pytest.param("2026-01-01T00:00:00", id="no time zone"),
    ],
)
def test_health_machine_begins_the_hold_again_when_its_stored_time_is_unreadable(since: str) -> None:
    """A recovering device with a broken time is not allocatable at once, and not withheld for
    longer than one hold.
    """
    recovering = _walk((0, [_sees()]), (1, []))
    broken = msgspec.structs.replace(
        recovering,
        conditions=tuple(msgspec.structs.replace(condition, since=since) for condition in recovering.conditions),
    )

    first = next_health(broken, [], now=_at(20), settings=_SETTINGS)
    still = next_health(first, [], now=_at(29.9), settings=_SETTINGS)
    healthy = next_health(first, [], now=_at(30), settings=_SETTINGS)

    assert [device_health.state for device_health in (first, still, healthy)] == [
        HealthState.RECOVERING,
        HealthState.RECOVERING,
        HealthState.HEALTHY,
    ]
    assert [(condition.since, condition.until) for condition in first.conditions] == [
        (rfc3339(_at(20)), rfc3339(_at(30)))
    ]
