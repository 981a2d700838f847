"""Laws of silence, over any row of looks: only an unbroken one makes a service silent, it never
flaps, and it is never evidence.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from topobus.engine.health.silence import (
    Answered,
    Silence,
    SilenceSettings,
    Silent,
    SilentBecause,
    next_silence,
    unheard,
)
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState

SETTINGS = SilenceSettings(every_s=1.0, timeout_s=1.0, gone_s=5.0, hung_s=15.0)

Look = tuple[float, Answered | Silent]

answers = st.one_of(st.just(Answered()), st.sampled_from([Silent(because=why) for why in SilentBecause]))
looks = st.lists(st.tuples(st.floats(0.1, 10.0), answers), max_size=40)


def walk(row: list[Look]) -> list[tuple[float, Answered | Silent, Silence]]:
    """What is known after each look, with its time; looks are so many seconds apart."""
    at, silence, states = 0.0, Silence(), []
    for wait_s, answer in row:
        at += wait_s
        silence = next_silence(silence, answer, at=at, settings=SETTINGS)
        states.append((at, answer, silence))
    return states


@given(row=looks)
def test_silence_never_begins_sooner_than_the_settings_say_when_anything_happens(row: list[Look]) -> None:
    """Whoever answered within the last five seconds is not silent, so that no restart and no busy
    moment shows, and nothing flaps.
    """
    answered_at = 0.0
    for at, answer, silence in walk(row):
        answered_at = at if isinstance(answer, Answered) else answered_at
        if silence.is_silent:
            assert at - answered_at >= SETTINGS.gone_s


@given(row=looks)
def test_silence_needs_the_longer_time_when_nobody_was_ever_seen_missing(row: list[Look]) -> None:
    """A service that listens and does not answer is silent after the longer time only."""
    timeouts = [
        (wait_s, Silent(because=SilentBecause.TIMEOUT) if isinstance(answer, Silent) else answer)
        for wait_s, answer in row
    ]
    answered_at = 0.0
    for at, answer, silence in walk(timeouts):
        answered_at = at if isinstance(answer, Answered) else answered_at
        assert not silence.is_silent or at - answered_at >= SETTINGS.hung_s


@given(row=looks)
def test_silence_ends_at_once_when_one_answer_comes(row: list[Look]) -> None:
    """One sign of life is enough."""
    assert not any(silence.is_silent for _, answer, silence in walk(row) if isinstance(answer, Answered))


@given(row=looks)
def test_silence_does_not_change_when_nats_is_away(row: list[Look]) -> None:
    """A look that could not be made judges nothing."""
    for (_, _, before), (_, answer, after) in pairwise([(0.0, Answered(), Silence()), *walk(row)]):
        if isinstance(answer, Silent) and answer.because is SilentBecause.NO_BUS:
            assert after.is_silent == before.is_silent


@given(waits=st.lists(st.floats(SETTINGS.longest_gap_s + 0.1, 1000.0), max_size=20), why=st.sampled_from(SilentBecause))
def test_silence_never_begins_when_it_was_we_who_stood_still(waits: list[float], why: SilentBecause) -> None:
    """Looks with holes between them are no row."""
    assert not any(silence.is_silent for _, _, silence in walk([(wait_s, Silent(because=why)) for wait_s in waits]))


@given(state=st.sampled_from(HealthState), has_since=st.booleans())
def test_unheard_devices_are_unknown_and_never_worse_when_their_service_is_silent(
    state: HealthState, *, has_since: bool
) -> None:
    """Silence makes no device Unhealthy and heals none: what was not Unhealthy by evidence is
    Unknown, and none is handed out.
    """
    before = DeviceHealth(state=state, conditions=(Condition(dimension=Dimension.MEMORY, state=state, reason="seen"),))
    inventory = Inventory(
        node="n1", device_class="gpu", generation=1, devices=(Device(name="gpu-0", device_class="gpu", health=before),)
    )
    (device,) = unheard(inventory, since="2026-01-01T00:00:00Z" if has_since else "").devices

    assert device.health.state is (HealthState.UNHEALTHY if state is HealthState.UNHEALTHY else HealthState.UNKNOWN)
    assert not device.health.is_allocatable
    assert device.health.worst is not None
    assert device.health.worst.reason == ("seen" if state is HealthState.UNHEALTHY else "service-silent")
