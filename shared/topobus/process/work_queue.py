"""A keyed work queue: it decides when each object of a reconcile loop is worked on again.

For each object it gets the version of its inputs and the result of the work. It decides whether to
work on the object now, and after how many seconds another object is due by time alone. It writes
one log line, one count and one report for each failure. An error in one object's work does not
affect the others.

The result decides when the object is due: `Done`, when its version is another; `Again`, also after
a while; `Behind`, when its turn for costly work comes; `Busy`, when work beside the loop has ended;
None, in each round. A failed object is set aside until its version changes, because the same work
on the same input would fail again. A peer that does not answer is no failure of the object: its
work is due again after a random while, which grows with each failure where the queue is configured
to back off.

Costly work comes after all other work of the loop, a part of it in each round, the longest waiting
first. Work that found nothing is repeated only after something that it read became free, and after
a pause that doubles with each vain try. Otherwise forty claims that cannot be allocated would cost
a search each whenever one device is released.

The queue starts no task and waits for nothing. Its loop waits, for a change or for `wait_s`. The
caller passes the clock.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Counter

from topobus.process.backoff import full_jitter
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError, HardwareError, PeerUnavailable
from topobus.values.outcome import Reason

__all__ = ["Again", "Behind", "Busy", "Done", "Result", "WorkQueue", "flatten", "is_peer_failure"]

# A message becomes a condition, an event and a log line: long enough for a path and two values.
_MAX_MESSAGE = 1000
# Costly work that found nothing is repeated at least so often once something is free again.
_LONGEST_PAUSE_S = 60.0

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Done:
    """There is nothing to do at a version of the object's inputs: the work is not repeated before
    the version is another.
    """

    version: Hashable


@dataclass(frozen=True)
class Again:
    """The object is due again after a while."""

    after_s: float | None = None
    """None: after the queue's `retry_s`."""
    version: Hashable = None
    """Until then the work is repeated only when the version of the object's inputs is another;
    None: also with each round of the loop."""


@dataclass(frozen=True)
class Behind:
    """The object needs costly work, after all others. Other work does nothing at this version."""

    version: Hashable
    read: Hashable = None
    """What costly work that found nothing has read and may be freed; None: it was not tried yet."""


@dataclass(frozen=True)
class Busy:
    """Work on the object continues beside the loop. The queue keeps its entry for the object until
    that work has a result of its own.
    """


Result = Done | Again | Behind | Busy | None
"""What came of the work on an object; None: the object is looked at in each round of its loop."""


@dataclass(frozen=True)
class _Entry:
    version: Hashable
    at_s: float = math.inf
    reason: Reason | None = None
    """Why the object is set aside."""
    tries: int = 0
    """How often in a row its peer was silent, or its costly work found nothing."""
    turn: int = 0
    """Where it needs costly work: grows with every try of anybody, so the lowest has waited
    longest."""
    read: Hashable = None


class WorkQueue:
    """The objects of one loop.

    Args: loop — the loop's name, a label of the metric; retry_s — after which a silent peer is
    asked again, at the latest; longest_s — up to which that doubles with each failure; failures —
    counts failures, with the one label `loop`; progress — called before each object, so that a long
    pass does not look dead (`Heartbeat.turn`).
    """

    def __init__(
        self,
        loop: str,
        clock: Clock,
        retry_s: float,
        *,
        longest_s: float = 0.0,
        failures: Counter | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._retry_s = retry_s
        self._longest_s = max(longest_s, retry_s)
        self._failures = failures
        self._progress = progress
        self._entries: dict[Hashable, _Entry] = {}
        self._turn = 0
        self._logged: dict[Hashable, str] = {}
        self._log = get_logger()

    def is_ready(self, key: Hashable, *versions: Hashable) -> bool:
        """Return whether to work on an object now.

        It waits while the version that its last result named is one of these, and its time has not
        come.
        """
        entry = self._entries.get(key)
        return entry is None or entry.version is None or entry.version not in versions or self.is_due(key)

    def wait_s(self) -> float | None:
        """Return after how many seconds an object is due by time alone. None when none is.

        An object that was due in this round and that its loop did not reach is due after `retry_s`.
        """
        now_s = self._clock.monotonic()
        timed = [
            entry
            for entry in self._entries.values()
            if entry.at_s < math.inf and (entry.at_s > now_s or not entry.turn)
        ]
        return min((entry.at_s - now_s if entry.at_s > now_s else self._retry_s for entry in timed), default=None)

    def is_due(self, key: Hashable) -> bool:
        """Return whether an object that needs no costly work is due by time."""
        entry = self._entries.get(key)
        return entry is not None and not entry.turn and self._clock.monotonic() >= entry.at_s

    def behind(self, keys: Iterable[K], read_now: Callable[[K], Hashable]) -> list[K]:
        """List the objects that are due for costly work, the longest waiting first.

        Shapes: read_now — returns what the costly work on an object would read; called only for an
        object that was tried before and whose pause is over.
        """
        now_s = self._clock.monotonic()
        waiting = [(entry, key) for key in keys if (entry := self._entries.get(key)) is not None and entry.turn]
        due = [
            (entry.turn, key)
            for entry, key in waiting
            if now_s >= entry.at_s and (entry.read is None or read_now(key) != entry.read)
        ]
        return [key for _, key in sorted(due, key=lambda pair: pair[0])]

    def put(self, key: Hashable, result: Result) -> None:
        """Record the result of the work on an object."""
        before = self._entries.get(key)
        if isinstance(result, Busy):
            if before is not None and before.turn:
                del self._entries[key]  # it had its turn: the work that continues must not wait for another one
            return
        self._logged.pop(key, None)
        if isinstance(result, Done):
            self._entries[key] = _Entry(result.version)
        elif isinstance(result, Again):
            after_s = self._retry_s if result.after_s is None else result.after_s
            self._entries[key] = _Entry(result.version, self._clock.monotonic() + after_s)
        elif isinstance(result, Behind):
            self._turn += 1
            tries = before.tries if before is not None and before.turn else 0
            is_vain = result.read is not None
            pause_s = min(self._retry_s * 2 ** min(tries, 16), _LONGEST_PAUSE_S) if is_vain else 0.0
            self._entries[key] = _Entry(
                result.version,
                self._clock.monotonic() + pause_s,
                tries=tries + 1 if is_vain else 0,
                turn=self._turn,
                read=result.read,
            )
        else:
            self._entries.pop(key, None)

    async def run(
        self,
        key: Hashable,
        version: Hashable,
        work: Callable[[], Awaitable[Result]],
        *,
        name: str,
        report: Callable[[Reason], Awaitable[object]] | None = None,
        narrow: tuple[Hashable, ...] = (),
        is_costly: bool = False,
    ) -> Result:
        """Do the work for one object if it is ready, and record the result.

        Shapes: version — changes when anything changes that the work reads (the object's revision
        at least); name — the object's, for the log; report — writes the reason into the object: it
        is called once for each failure, and again when the write itself met a silent peer; narrow —
        versions that change with less, for results that wait for no more: the work of a silent peer
        waits for the first of them, or for the next round where there are none; is_costly — it is
        work for which the object was listed by `behind`; result — Busy for an object that was not
        worked on.
        Errors: raises nothing but what is no Exception (a cancellation).
        """
        if not is_costly and not self.is_ready(key, version, *narrow):
            return Busy()
        self._progress()
        peer_version = narrow[0] if narrow else None
        try:
            result = await work()
        except Exception as err:  # noqa: BLE001 - boundary: one object of a reconciler; the others continue, whatever is wrong with it
            if is_peer_failure(err):
                self._log.warning("object.peer-silent", loop=self._loop, object=name, error=str(err))
                return self._wait(key, peer_version)
            return await self._set_aside(key, version, peer_version, err, name, report)
        self.put(key, result)
        return result

    def run_now(self, key: Hashable, version: Hashable, work: Callable[[], None], *, name: str) -> None:
        """Do work that waits for nothing, unless it failed at this version before."""
        if self.is_ready(key, version):
            try:
                work()
            except Exception as err:  # noqa: BLE001 - boundary: one object of a reconciler; the others continue, whatever is wrong with it
                self._entries[key] = _Entry(version, reason=self._failed(key, err, name))
            else:
                self.put(key, None)

    def has_waited(self, key: Hashable, version: Hashable) -> bool:
        """Return, within an object's work, whether it is due by time alone, or by its turn, as its
        last result at this version asked.
        """
        entry = self._entries.get(key)
        return entry is not None and entry.version == version and entry.at_s < math.inf

    def reason(self, key: Hashable) -> Reason | None:
        """Return the reason why an object is set aside. None for one that is not."""
        entry = self._entries.get(key)
        return entry.reason if entry is not None else None

    def drop(self, key: Hashable) -> None:
        """Forget an object: it is gone, or must be worked on in the next round whatever its last
        result.
        """
        self._entries.pop(key, None)
        self._logged.pop(key, None)

    def keep(self, keys: AbstractSet[Hashable]) -> None:
        """Forget objects that are not among these.

        Call it once each round, with the objects of the loop: an object that the loop no longer
        visits would otherwise stay due.
        """
        for key in [key for key in (*self._entries, *self._logged) if key not in keys]:
            self.drop(key)

    def _wait(self, key: Hashable, version: Hashable) -> Again:
        """Schedule another try of an object. What was logged of it stays."""
        entry = self._entries.get(key)
        tries = entry.tries if entry is not None and not entry.turn else 0
        after_s = full_jitter(tries, least_s=self._retry_s, most_s=self._longest_s)
        self._entries[key] = _Entry(version, self._clock.monotonic() + after_s, tries=tries + 1)
        return Again(after_s, version)

    async def _set_aside(
        self,
        key: Hashable,
        version: Hashable,
        peer_version: Hashable,
        err: Exception,
        name: str,
        report: Callable[[Reason], Awaitable[object]] | None,
    ) -> Result:
        reason = self._failed(key, err, name)
        if report is not None:
            try:
                await report(reason)
            except Exception as unreported:  # noqa: BLE001 - boundary: one object of a reconciler; a failed report is logged
                self._log.warning("object.unreported", loop=self._loop, object=name, error=str(unreported))
                if is_peer_failure(unreported):
                    return self._wait(
                        key, peer_version
                    )  # not set aside yet: the next round fails alike and reports again
        self._entries[key] = _Entry(version, reason=reason)
        return Done(version)

    def _failed(self, key: Hashable, err: Exception, name: str) -> Reason:
        """Log and count a failure, once as long as it stays the same.

        Return the reason to report on the object.
        """
        cause = flatten(err)[0]
        if isinstance(cause, ContractError):
            reason = Reason(code="malformed", message=str(cause)[:_MAX_MESSAGE])
        else:
            text = f"{name}: the controller cannot work with this object ({type(cause).__name__}: {cause})"
            reason = Reason(
                code="malformed",
                message=f"{text[:_MAX_MESSAGE]}; it is set aside until it changes, the controller's log has more",
            )
        if self._logged.get(key) != reason.message:
            self._logged[key] = reason.message
            if self._failures is not None:
                self._failures.labels(self._loop).inc()
            if isinstance(cause, ContractError):
                self._log.warning("object.set-aside", loop=self._loop, object=name, error=str(cause))
            else:
                self._log.error("object.set-aside", loop=self._loop, object=name, error=str(cause), exc_info=err)
        return reason


def flatten(err: BaseException) -> tuple[BaseException, ...]:
    """List what went wrong: the error itself, or the errors that a task group collected, in order.

    >>> flatten(ExceptionGroup("two", [ValueError("a"), ExceptionGroup("one", [KeyError("b")])]))
    (ValueError('a'), KeyError('b'))
    """
    if isinstance(err, BaseExceptionGroup):
        return tuple(leaf for part in err.exceptions for leaf in flatten(part))
    return (err,)


def is_peer_failure(err: BaseException) -> bool:
    """Return whether a silent or failing peer is all that went wrong. The work is then due again,
    and the object is not set aside.
    """
    return all(isinstance(leaf, PeerUnavailable | HardwareError) for leaf in flatten(err))
