"""Records how the preparations of claims go in this process: which run now, and the last failure of
each claim.

Flows in: start and end of each attempt. Flows out: the same, for `cluster.pod_retries`, which
decides when kubelet should try again. Kept in memory only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from topobus.gateway.node_state import Broadcast
from topobus.values.names import ClaimUid

__all__ = ["Attempts", "Failure"]


class Failure(Struct, frozen=True, kw_only=True):
    """The last try of a claim failed."""

    error: str
    at_s: float
    """The event loop's time."""
    code: str = ""
    """Reason code of the error; empty: it was no refusal."""


class Attempts:
    """Claim uid to how its preparation goes; of a claim with several classes the failure of any."""

    def __init__(self) -> None:
        self.changed = Broadcast()
        self._running: dict[ClaimUid, int] = {}
        self._failures: dict[tuple[ClaimUid, str], Failure] = {}

    @contextmanager
    def running(self, uid: ClaimUid) -> Iterator[None]:
        """Count a try while it is under way."""
        self._running[uid] = self._running.get(uid, 0) + 1
        try:
            yield
        finally:
            self._running[uid] -= 1
            if not self._running[uid]:
                del self._running[uid]
            self.changed.announce()

    def is_running(self, uid: ClaimUid) -> bool:
        """Say whether a try of this claim is under way."""
        return uid in self._running

    def failed(self, uid: ClaimUid, device_class: str, error: str, at_s: float, code: str = "") -> None:
        """Note that a try failed."""
        self._failures[uid, device_class] = Failure(error=error, at_s=at_s, code=code)

    def ended(self, uid: ClaimUid, device_class: str) -> None:
        """Forget failures of a claim's class: it is prepared, or undone."""
        self._failures.pop((uid, device_class), None)

    def failure(self, uid: ClaimUid) -> Failure | None:
        """The newest failure of a claim.

        None when no try has failed since it was prepared or undone.
        """
        return max(
            (failure for (claim, _), failure in self._failures.items() if claim == uid),
            key=lambda failure: failure.at_s,
            default=None,
        )

    def keep(self, uids: set[ClaimUid]) -> None:
        """Forget claims that nobody waits for any more."""
        self._failures = {key: failure for key, failure in self._failures.items() if key[0] in uids}
