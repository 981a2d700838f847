"""The error boundary around one object of a reconcile loop: an exception in its work affects no other object.

Flows in: the work on one object, and the version of its inputs. Flows out: whether another try is due, one log line and one count for each failure,
and a report to the object. A failed object is set aside until its version changes, since the same work on the same input would fail again. A peer
that does not answer is no failure of the object: its work is due again after a while. Both homes use it for every kind of object and for nodes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import NamedTuple

from prometheus_client import Counter

from topobus.domain.errors import ContractError, HardwareError, PeerUnavailable
from topobus.domain.outcome import Reason
from topobus.runtime.logging import get_logger

__all__ = ["ObjectBoundary", "flatten", "is_peer_failure"]

# A message becomes a condition, an event and a log line: long enough for a path and two values.
_MAX_MESSAGE = 1000


class _SetAside(NamedTuple):
    version: Hashable
    reason: Reason


class ObjectBoundary:
    """Runs the work of one loop, object by object.

    Args: loop — the loop's name, a label of the metric; failures — counts failures, with the one label `loop`; progress — called before each object, so that a long pass
    does not look dead (`Heartbeat.turn`).
    """

    def __init__(self, loop: str, failures: Counter | None = None, progress: Callable[[], None] = lambda: None) -> None:
        self._loop = loop
        self._progress = progress
        self._failures = failures
        self._set_aside: dict[Hashable, _SetAside] = {}
        self._logged: dict[Hashable, str] = {}
        self._log = get_logger()

    async def run(
        self,
        key: Hashable,
        version: Hashable,
        work: Callable[[], Awaitable[bool]],
        *,
        name: str,
        report: Callable[[Reason], Awaitable[object]] | None = None,
        is_under_way: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Do the work for one object, unless it failed at this version already; True says that another try is due after a while.

        Shapes: version — changes when anything changes that the work reads (the object's revision at least); name — the object's, for the log; report — writes the
        reason into the object; it is called once a failure, and again when the write itself met a silent peer; is_under_way — True after work that goes on beside the loop:
        what is noted of the object stays until that has ended.
        Errors: raises nothing but what is no Exception (a cancellation).
        """
        set_aside = self._set_aside.get(key)
        if set_aside is not None and set_aside.version == version:
            return False
        self._progress()
        try:
            is_due = await work()
        except Exception as err:  # noqa: BLE001 - boundary: one object of a reconciler; its neighbours go on, whatever is wrong with it
            if is_peer_failure(err):
                self._log.warning("object.peer-silent", loop=self._loop, object=name, error=str(err))
                return True
            return await self._put_aside(key, version, err, name, report)
        if not is_under_way():
            self._set_aside.pop(key, None)
            self._logged.pop(key, None)
        return is_due

    def run_now(self, key: Hashable, version: Hashable, work: Callable[[], None], *, name: str) -> bool:
        """Do work that waits for nothing; False says that the object failed, now or at this version before."""
        set_aside = self._set_aside.get(key)
        if set_aside is not None and set_aside.version == version:
            return False
        try:
            work()
        except Exception as err:  # noqa: BLE001 - boundary: one object of a reconciler; its neighbours go on, whatever is wrong with it
            self._set_aside[key] = _SetAside(version, self._failed(key, err, name))
            return False
        self._set_aside.pop(key, None)
        self._logged.pop(key, None)
        return True

    def reason(self, key: Hashable) -> Reason | None:
        """Say why an object is set aside; None for one that is not."""
        set_aside = self._set_aside.get(key)
        return set_aside.reason if set_aside is not None else None

    def drop(self, key: Hashable) -> None:
        """Drop the notes about an object that is gone."""
        self._set_aside.pop(key, None)
        self._logged.pop(key, None)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Drop the notes about objects that are not among these. Call it once each round."""
        self.keep_where(keys.__contains__)

    def keep_where(self, is_there: Callable[[Hashable], bool]) -> None:
        """Drop the notes about objects of which this is not true: nothing is asked while there are no notes."""
        if self._set_aside or self._logged:
            self._set_aside = {key: set_aside for key, set_aside in self._set_aside.items() if is_there(key)}
            self._logged = {key: text for key, text in self._logged.items() if is_there(key)}

    async def _put_aside(
        self, key: Hashable, version: Hashable, err: Exception, name: str, report: Callable[[Reason], Awaitable[object]] | None
    ) -> bool:
        reason = self._failed(key, err, name)
        if report is not None:
            try:
                await report(reason)
            except Exception as unreported:  # noqa: BLE001 - boundary: one object of a reconciler; one that cannot even be told is logged
                self._log.warning("object.unreported", loop=self._loop, object=name, error=str(unreported))
                if is_peer_failure(unreported):
                    return True  # not set aside yet: the next round fails alike and reports again
        self._set_aside[key] = _SetAside(version, reason)
        return False

    def _failed(self, key: Hashable, err: Exception, name: str) -> Reason:
        """Log and count a failure, once as long as it stays the same; gives what the object is told."""
        cause = flatten(err)[0]
        if isinstance(cause, ContractError):
            reason = Reason(code="malformed", message=str(cause)[:_MAX_MESSAGE])
        else:
            text = f"{name}: the controller cannot work with this object ({type(cause).__name__}: {cause})"
            reason = Reason(
                code="malformed", message=f"{text[:_MAX_MESSAGE]}; it is set aside until it changes, the controller's log has more"
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
    """Say whether a silent or failing peer is all that went wrong: the work is due again, and the object is not to blame."""
    return all(isinstance(leaf, PeerUnavailable | HardwareError) for leaf in flatten(err))
