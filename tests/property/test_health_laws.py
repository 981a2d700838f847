"""Laws of the health machine, over any sequence of looks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from topobus.engine.health.health_machine import HealthSettings, next_health, silence
from topobus.values.health import DeviceHealth, Dimension, HealthState, Observation

_START = datetime(2026, 1, 1, tzinfo=UTC)
_SETTINGS = HealthSettings(hold_s=10.0, flap_count=2)

_observations = st.lists(
    st.builds(
        Observation,
        dimension=st.sampled_from(list(Dimension)),
        state=st.sampled_from([HealthState.UNHEALTHY, HealthState.DEGRADED, HealthState.UNKNOWN, HealthState.HEALTHY]),
        reason=st.sampled_from(["reason-a", "reason-b"]),
        message=st.sampled_from(["", "text"]),
        is_sticky=st.booleans(),
    ),
    max_size=4,
)
_silences = st.just([silence("driver-hung", "hung")])
_looks = st.lists(st.tuples(st.one_of(_observations, _silences), st.integers(0, 60)), max_size=12)


def _walk(looks: list[tuple[list[Observation], int]]) -> list[DeviceHealth]:
    health: DeviceHealth | None = None
    now = _START
    walked: list[DeviceHealth] = []
    for seen, wait_s in looks:
        now += timedelta(seconds=wait_s)
        health = next_health(health, seen, now=now, settings=_SETTINGS)
        walked.append(health)
    return walked


@given(looks=_looks)
def test_health_never_allocatable_straight_from_unhealthy_when_anything_is_seen(
    looks: list[tuple[list[Observation], int]],
) -> None:
    """A device that was Unhealthy at one look is neither Healthy nor Degraded at the next."""
    walked = _walk(looks)

    assert all(not after.is_allocatable for before, after in pairwise(walked) if before.state is HealthState.UNHEALTHY)


@given(looks=_looks)
def test_health_is_deterministic_when_the_looks_are_the_same(looks: list[tuple[list[Observation], int]]) -> None:
    """The same looks at the same times give the same health."""
    assert _walk(looks) == _walk(looks)


@given(looks=_looks, seed=st.randoms(use_true_random=False))
def test_health_ignores_order_when_observations_are_shuffled(
    looks: list[tuple[list[Observation], int]], seed: object
) -> None:
    """The order of observations within a look makes no difference."""
    shuffled = [(sorted(seen, key=lambda _: seed.random()), wait_s) for seen, wait_s in looks]  # type: ignore[attr-defined]

    assert _walk(shuffled) == _walk(looks)


@given(looks=_looks)
def test_silence_never_makes_unhealthy_when_it_was_not(looks: list[tuple[list[Observation], int]]) -> None:
    """A silent look leaves Unhealthy as it was and makes anything else Unknown."""
    walked = _walk([*looks, (_silence_look(), 1)])
    before = walked[-2].state if len(walked) > 1 else HealthState.HEALTHY

    assert walked[-1].state is (HealthState.UNHEALTHY if before is HealthState.UNHEALTHY else HealthState.UNKNOWN)


@given(looks=_looks)
def test_health_is_healthy_again_when_nothing_is_seen_for_long(looks: list[tuple[list[Observation], int]]) -> None:
    """Whatever happened, a clean look, the longest hold and another clean look make a device
    Healthy, unless a sticky fault stands.
    """
    longest_s = int(_SETTINGS.hold_s * 2**_SETTINGS.flap_count) + 1
    end = _walk([*looks, ([], 1), ([], 1), ([], longest_s)])[-1]

    assert end.state is HealthState.HEALTHY or any(condition.is_sticky for condition in end.conditions)


@given(looks=_looks)
def test_rollup_equals_the_worst_condition_when_there_are_any(looks: list[tuple[list[Observation], int]]) -> None:
    """The state of a device is that of its worst condition; Healthy has none."""
    for health in _walk(looks):
        worst = health.worst
        assert health.state is (worst.state if worst else HealthState.HEALTHY)


def _silence_look() -> list[Observation]:
    return [silence("driver-failed", "failed")]
