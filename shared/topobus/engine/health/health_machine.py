"""The health machine: how a device's health changes from one poll to the next. Pure.

Each dimension (memory, link, presence …) is a machine of its own, once for the driver and once for
each source of verdicts, and the worst decides: so no source can free what the driver or another
source holds. Rules that all other code relies on: evidence makes a device Unhealthy, silence never
does. Unhealthy becomes Healthy only through Recovering, after `hold_s` without evidence, longer with
each relapse. A sticky fault stays until an operator forgives it. Unhealthy also does not become
Degraded (which may be allocated) without Recovering.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import product
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState, Observation, RecoveryAction
from topobus.values.health_reasons import sign
from topobus.values.timestamps import rfc3339

__all__ = ["SILENT_REASONS", "HealthSettings", "clear_sticky_faults", "is_same_to_readers", "next_health", "silence"]

# Worst first. Unknown is worse than Recovering: a device that cannot be observed is not known to
# recover.
_SEVERITY = (
    HealthState.UNHEALTHY,
    HealthState.UNKNOWN,
    HealthState.RECOVERING,
    HealthState.DEGRADED,
    HealthState.HEALTHY,
)

# Reasons of the DRIVER dimension that mean "no word", not "something is wrong".
SILENT_REASONS = frozenset({"driver-hung", "driver-failed", "driver-not-loaded", "unmonitored"})


class HealthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a device's health changes between two polls."""

    poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds between two looks at all devices. 1 s: some files a device; a fault is known before a
    scheduler could use the device again."""
    hold_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds without evidence until Recovering becomes Healthy. 30 s: longer than a GPU reset or a
    link's retraining takes. Evidence of a moment is shown for 5 s, or for this time where it is
    shorter."""
    flap_count: Annotated[int, Meta(ge=0, le=16)] = 4
    """After so many relapses the hold stops growing: it doubles with each relapse while Recovering.
    4: at most 16 times `hold_s`."""
    forget_s: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds a vanished device stays listed as Unhealthy after its last owner. 10 min: longer
    than a node's drain and a card's re-seat."""
    sources: dict[Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")], Literal["evidence", "advice"]] = {}
    """Who else may say how devices are, and what it counts for: `{"dcgm": "evidence"}`. `evidence`
    counts as what the driver sees, so Unhealthy withholds the device; `advice` makes it Degraded at
    most. Empty: a verdict is refused."""


def silence(reason: str, message: str) -> Observation:
    """Make the observation for a driver that gave no answer: all its devices become Unknown.

    Shapes: reason — one of SILENT_REASONS, which distinguish "no answer" from "a fault" for
            readers.
    """
    return sign(reason, message)


def next_health(
    previous: DeviceHealth | None,
    observations: Iterable[Observation],
    *,
    now: datetime,
    settings: HealthSettings,
    is_observed: bool = True,
) -> DeviceHealth:
    """Compute the health after one poll.

    Shapes: previous — None for a device never seen; observations — the driver's of this poll, or a
            single `silence` when it did not answer, and those of all sources of verdicts;
            is_observed — False: the driver cannot see the device now, so its conditions stay.
    Order: of observations does not matter. Of two of one source in one dimension the worse counts,
            then the reason that sorts first.
    Errors: raises nothing. A condition whose time cannot be read begins at `now`.
    """
    before = previous or DeviceHealth()
    seen = list(observations)
    is_silent = any(_is_silence(observation) for observation in seen)
    old = {
        (condition.dimension, condition.source): _with_readable_time(condition, now=now, settings=settings)
        for condition in before.conditions
    }
    was_silent = any(_is_silence(condition) for condition in before.conditions)
    worst: dict[tuple[Dimension, str], Observation] = {}
    for observation in sorted(seen, key=_rank):
        worst.setdefault((observation.dimension, observation.source), observation)
    conditions: list[Condition] = []
    for dimension, source in product(Dimension, sorted({source for _, source in (*old, *worst)})):
        was, observation_now = old.get((dimension, source)), worst.get((dimension, source))
        is_unseen = not source and observation_now is None
        if is_unseen and (is_silent or not is_observed):
            # Not observed: keep what was known.
            moved = was
        elif is_unseen and was_silent and was is not None and was.state is HealthState.RECOVERING:
            # The time of silence does not count as time without evidence.
            moved = _recovering(was, now=now, settings=settings)
        else:
            moved = _move(was, observation_now, now=now, settings=settings)
        if moved is not None:
            conditions.append(moved)
    state = min((condition.state for condition in conditions), key=_SEVERITY.index, default=HealthState.HEALTHY)
    since = before.since if previous is not None and before.state is state and before.since else rfc3339(now)
    return DeviceHealth(state=state, since=since, conditions=tuple(conditions))


def clear_sticky_faults(health: DeviceHealth) -> DeviceHealth:
    """Remove the stickiness of all conditions, so that they heal as ordinary ones do."""
    return msgspec.structs.replace(
        health, conditions=tuple(msgspec.structs.replace(condition, is_sticky=False) for condition in health.conditions)
    )


def is_same_to_readers(first: DeviceHealth, second: DeviceHealth) -> bool:
    """Say whether two healths differ in nothing that subscribers need to receive (state, reason,
    action, since).
    """
    return first.state is second.state and [_facts(part) for part in first.conditions] == [
        _facts(part) for part in second.conditions
    ]


def _facts(condition: Condition) -> tuple[str, ...]:
    code = condition.evidence.get("code", "") if condition.source else ""
    return (
        condition.dimension,
        condition.source,
        condition.state,
        condition.reason,
        code,
        condition.action,
        condition.since,
    )


def _is_silence(condition: Observation | Condition) -> bool:
    return (
        condition.dimension is Dimension.DRIVER
        and condition.state is HealthState.UNKNOWN
        and condition.reason in SILENT_REASONS
    )


def _rank(observation: Observation) -> tuple[int, str, str, tuple[tuple[str, str], ...], str, bool]:
    return (
        _SEVERITY.index(observation.state),
        observation.reason,
        observation.message,
        tuple(sorted(observation.evidence.items())),
        observation.action,
        not observation.is_sticky,
    )


def _move(
    was: Condition | None, seen: Observation | None, *, now: datetime, settings: HealthSettings
) -> Condition | None:
    if seen is None or seen.state is HealthState.HEALTHY:
        return _without_evidence(was, now=now, settings=settings)
    if seen.state is HealthState.UNHEALTHY:
        return _sick(was, seen, now=now)
    if was is not None and was.state is HealthState.UNHEALTHY:
        if was.is_sticky or seen.state is HealthState.UNKNOWN:
            return was
        # Milder evidence than before: on the way to better, and not there yet.
        return _recovering(was, now=now, settings=settings)
    if was is not None and was.state is HealthState.RECOVERING:
        if _is_silence(seen):
            # The recovery can no longer be observed. A count above zero records that the hold must
            # begin again.
            return msgspec.structs.replace(
                _begin(seen, now=now), is_sticky=was.is_sticky, relapses=max(1, was.relapses)
            )
        if seen.state is HealthState.DEGRADED and _is_held_long_enough(was, now=now, settings=settings):
            return _begin(seen, now=now)
        return was
    if was is not None and was.state is seen.state:
        if _is_same_fault(was, seen):
            return was
        return msgspec.structs.replace(
            _begin(seen, now=now), since=was.since, is_sticky=was.is_sticky or seen.is_sticky, relapses=was.relapses
        )
    if was is not None and _is_interrupted(was):
        return _recovering(was, now=now, settings=settings)
    return _begin(seen, now=now)


def _without_evidence(was: Condition | None, *, now: datetime, settings: HealthSettings) -> Condition | None:
    if was is not None and _is_interrupted(was):
        return _recovering(was, now=now, settings=settings)
    if was is None or was.state in (HealthState.DEGRADED, HealthState.UNKNOWN, HealthState.HEALTHY):
        return None
    if was.is_sticky:
        return was
    if was.state is HealthState.UNHEALTHY:
        return _recovering(was, now=now, settings=settings)
    return None if _is_held_long_enough(was, now=now, settings=settings) else was


def _sick(was: Condition | None, seen: Observation, *, now: datetime) -> Condition:
    if was is None:
        return _begin(seen, now=now)
    is_sticky = was.is_sticky or seen.is_sticky
    if was.state is HealthState.UNHEALTHY:
        if _is_same_fault(was, seen) and was.is_sticky == is_sticky:
            return was
        if was.is_sticky and not seen.is_sticky:
            # A sticky reason asks the operator to act, and a passing one must not hide it.
            return was
        return msgspec.structs.replace(
            _begin(seen, now=now), since=was.since, is_sticky=is_sticky, relapses=was.relapses
        )
    relapses = was.relapses + 1 if was.state is HealthState.RECOVERING or _is_interrupted(was) else 0
    return msgspec.structs.replace(_begin(seen, now=now), is_sticky=is_sticky, relapses=relapses)


def _is_same_fault(was: Condition, seen: Observation) -> bool:
    """Say whether a condition shows what is seen. All verdicts have one reason, so of a source the
    words count as well.
    """
    return was.reason == seen.reason and (
        not seen.source or (was.message, was.evidence) == (seen.message, seen.evidence)
    )


def _is_interrupted(was: Condition) -> bool:
    """Say whether silence began in the middle of a recovery."""
    return was.state is HealthState.UNKNOWN and was.relapses > 0


def _begin(seen: Observation, *, now: datetime) -> Condition:
    return Condition(
        dimension=seen.dimension,
        state=seen.state,
        reason=seen.reason,
        message=seen.message,
        evidence=dict(sorted(seen.evidence.items())),
        action=seen.action,
        since=rfc3339(now),
        is_sticky=seen.is_sticky,
        source=seen.source,
    )


def _recovering(was: Condition, *, now: datetime, settings: HealthSettings) -> Condition:
    until = rfc3339(now + _hold(was, settings))
    return msgspec.structs.replace(
        was, state=HealthState.RECOVERING, action=RecoveryAction.WAIT, since=rfc3339(now), until=until
    )


def _hold(was: Condition, settings: HealthSettings) -> timedelta:
    return timedelta(seconds=settings.hold_s * 2 ** min(was.relapses, settings.flap_count))


def _is_held_long_enough(was: Condition, *, now: datetime, settings: HealthSettings) -> bool:
    return now - datetime.fromisoformat(was.since) >= _hold(was, settings)


def _with_readable_time(was: Condition, *, now: datetime, settings: HealthSettings) -> Condition:
    """Begin a condition at `now` when its time cannot be read, as in a damaged store.

    A hold that was over at once would allocate a device that may be sick; a hold without a
    beginning would never end.
    """
    try:
        is_readable = datetime.fromisoformat(was.since).tzinfo is not None
    except ValueError:
        is_readable = False
    if is_readable:
        return was
    if was.state is HealthState.RECOVERING:
        return _recovering(was, now=now, settings=settings)
    return msgspec.structs.replace(was, since=rfc3339(now))
