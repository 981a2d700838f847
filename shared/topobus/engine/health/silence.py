"""When a device service counts as silent, and what its devices are then: Unknown, never Unhealthy,
and never released.

Each reader makes the inventory of a silent service itself. It is not published, and the service's
own inventory applies again with its first answer.

A mere reader polls no service: a node's topology announces on the bus which device services do not
answer, and repeats that at intervals. When the announcements end, topology itself is silent
(`Announcements`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, structs

from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState, RecoveryAction
from topobus.values.view import NodeAlignment

__all__ = [
    "SAID_EVERY_S",
    "SERVICE_SILENT",
    "TOPOLOGY",
    "Announcements",
    "Answered",
    "Silence",
    "SilenceSettings",
    "Silent",
    "SilentBecause",
    "next_silence",
    "unheard",
]

SERVICE_SILENT = "service-silent"
"""The reason that a silent service's devices are Unknown, and that
placements on them are refused."""

TOPOLOGY = "topology"
"""The name of a node's topology among the silent services. The others are device classes."""
SAID_EVERY_S = 30.0
"""Seconds after which topology announces a node's alignment again. A reader that misses some
announcements takes the service as silent. A thousand nodes announce 33 times a second at the hub.
Nothing is decided by it, so it may take minutes."""
# This many announcements may be missed: a store may be busy or unreachable for a moment.
_MISSED_ANNOUNCEMENTS = 3
_SLACK_S = 10.0

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class SilentBecause(StrEnum):
    """Why there was no answer."""

    NOBODY = "nobody"
    """The server knows no listener there: the service has ended, or
    lost its connection."""
    TIMEOUT = "timeout"
    """A listener does not answer in time: it hangs, or the machine is busy."""
    NO_BUS = "no-bus"
    """The request could not be sent: the peer's state is not known."""


class Answered(Struct, frozen=True, kw_only=True):
    """The peer is there."""

    instance: str = ""
    """The instance that answered, as it names itself."""
    clock_ahead_s: float = 0.0
    """By how many seconds its clock is ahead of ours, within the time that the answer took; 0 when
    it is not known."""
    release: str = ""
    """The release that it reports; empty when it reports none."""


class Silent(Struct, frozen=True, kw_only=True):
    """No answer."""

    because: SilentBecause


class SilenceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a device service that does not answer makes its devices Unknown.

    Nothing that is held is touched.
    """

    every_s: Seconds = 1.0
    """Pause between two looks while a service does not answer, in seconds; three times as long
    while all do. A look costs two small messages a class."""
    timeout_s: Seconds = 1.0
    """How long one look waits for the answer, in seconds; a busy
    service answers in milliseconds."""
    gone_s: Seconds = 5.0
    """Seconds without a listener until a service that has answered before is silent. 5 s: a restart
    takes two, and must not be seen."""
    hung_s: Seconds = 15.0
    """Seconds without an answer after which a service counts as silent that still listens, or has
    not answered since NATS came (back): it may be starting. 15 s: longer than the delays of a busy
    machine, and longer than the bus takes to find that NATS itself is gone."""

    @property
    def longest_gap_s(self) -> float:
        """Polls farther apart do not count as consecutive: this process had stopped polling."""
        return 3 * (self.every_s + self.timeout_s)


class Silence(Struct, frozen=True, kw_only=True):
    """What is known of one service's silence. Times are seconds of the poller's monotonic clock."""

    is_silent: bool = False
    since: float | None = None
    """The first of consecutive looks without an answer. None: the last look was answered, or there
    was none."""
    nobody_since: float | None = None
    """The first look in a row that found no listener."""
    looked_at: float = 0.0
    was_heard: bool = False
    """It has answered since NATS was last away."""


def next_silence(before: Silence, answer: Answered | Silent, *, at: float, settings: SilenceSettings) -> Silence:
    """Compute the silence after one more poll.

    One answer ends a silence. Only an unbroken row of polls without an answer begins one. While
    NATS is unreachable nothing changes.

    >>> nobody = Silent(because=SilentBecause.NOBODY)
    >>> heard = next_silence(Silence(), Answered(), at=0.0, settings=SilenceSettings())
    >>> first = next_silence(heard, nobody, at=1.0, settings=SilenceSettings())
    >>> first.is_silent, next_silence(first, nobody, at=6.0, settings=SilenceSettings()).is_silent
    (False, True)
    """
    if isinstance(answer, Answered):
        return Silence(looked_at=at, was_heard=True)
    if answer.because is SilentBecause.NO_BUS:
        return Silence(is_silent=before.is_silent, since=before.since if before.is_silent else None, looked_at=at)
    is_row = at - before.looked_at <= settings.longest_gap_s
    since = before.since if before.since is not None and (is_row or before.is_silent) else at
    nobody_since: float | None = None
    if answer.because is SilentBecause.NOBODY:
        nobody_since = before.nobody_since if before.nobody_since is not None and is_row else at
    # After NATS was unreachable, services reconnect at different times, and so do services that
    # start together with this one.
    gone_s = settings.gone_s if before.was_heard else max(settings.gone_s, settings.hung_s)
    is_gone = nobody_since is not None and at - nobody_since >= gone_s
    return Silence(
        is_silent=before.is_silent or is_gone or at - since >= settings.hung_s,
        since=since,
        nobody_since=nobody_since,
        looked_at=at,
        was_heard=before.was_heard,
    )


class Announcements:
    """The last announcement of each node's topology, and when it was received.

    Times are seconds of one monotonic clock.

    >>> announcements = Announcements()
    >>> announcements.note("n1", NodeAlignment(node="n1", unheard_classes={"gpu": "09:00"}), at=0.0, said_at="09:05")
    >>> announcements.silent("n1", now=50.0), announcements.silent("n1", now=101.0)
    ({'gpu': '09:00'}, {'gpu': '09:00', 'topology': '09:05'})
    """

    def __init__(self) -> None:
        self._announced: dict[str, tuple[NodeAlignment, str]] = {}
        self._heard_at: dict[str, float] = {}

    def note(self, node: str, alignment: NodeAlignment, *, at: float, said_at: str) -> None:
        """Record an announcement.

        Shapes: said_at — when it was stored, RFC 3339.
        """
        self._announced[node] = (alignment, said_at)
        self._heard_at[node] = at

    def drop(self, node: str) -> None:
        """Forget a node that is gone."""
        self._announced.pop(node, None)
        self._heard_at.pop(node, None)

    def excuse(self, at: float) -> None:
        """Restart all waiting times: until now no announcement could be received."""
        self._heard_at = dict.fromkeys(self._heard_at, at)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes with a known announcement, sorted."""
        return tuple(sorted(self._announced))

    def silent(self, node: str, now: float) -> dict[str, str]:
        """Name the silent services: classes and TOPOLOGY, with the time since when, RFC 3339.

        Empty when all answer, or nothing is known.
        """
        if node not in self._announced:
            return {}
        alignment, said_at = self._announced[node]
        is_silent = now - self._heard_at[node] > _MISSED_ANNOUNCEMENTS * SAID_EVERY_S + _SLACK_S
        return {**alignment.unheard_classes, **({TOPOLOGY: said_at} if is_silent else {})}


def unheard(inventory: Inventory, *, since: str = "") -> Inventory:
    """Return the inventory as it is to be read while its service is silent: every device Unknown,
    and Unhealthy ones still that.

    Shapes: since — RFC 3339, UTC; empty when it is not known.
    """
    condition = Condition(
        dimension=Dimension.DRIVER,
        state=HealthState.UNKNOWN,
        reason=SERVICE_SILENT,
        message=f"the {inventory.device_class} service does not answer: its devices may have changed",
        action=RecoveryAction.WAIT,
        since=since,
    )
    return structs.replace(inventory, devices=tuple(_unheard(device, condition) for device in inventory.devices))


def _unheard(device: Device, condition: Condition) -> Device:
    before = device.health
    # Evidence of a fault stays valid while its reporter is silent.
    is_sick = before.state is HealthState.UNHEALTHY
    health = DeviceHealth(
        state=before.state if is_sick else HealthState.UNKNOWN,
        since=before.since if is_sick else condition.since,
        # First, so that it is what `worst` names among conditions that are Unknown alike.
        conditions=(condition, *before.conditions),
    )
    return structs.replace(device, health=health)
