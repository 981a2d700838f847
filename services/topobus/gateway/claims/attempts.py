"""Records how the preparations of claims go in this process: which run now, and the last failure of
each claim.

`cluster.pod_retries` decides by it when kubelet should try again. Kept in memory only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from topobus.process.broadcast import Broadcast
from topobus.values.names import ClaimUid

__all__ = ["Attempts", "Failure"]


class Failure(Struct, frozen=True, kw_only=True):
    """A failure of a claim's last try."""

    error: str
    at_s: float
    """The event loop's time."""
    code: str = ""
    """Reason code of the error. Empty: it was not a refusal."""


class Attempts:
    """How the preparation of each claim goes, by claim uid."""

    def __init__(self) -> None:
        self.changed = Broadcast()
        self._running: dict[ClaimUid, int] = {}
        self._failures: dict[ClaimUid, Failure] = {}

    @contextmanager
    def running(self, uid: ClaimUid) -> Iterator[None]:
        """Count a try while it runs."""
        self._running[uid] = self._running.get(uid, 0) + 1
        try:
            yield
        finally:
            self._running[uid] -= 1
            if not self._running[uid]:
                del self._running[uid]
            self.changed.announce()

    def is_running(self, uid: ClaimUid) -> bool:
        """Return whether a try of this claim is running."""
        return uid in self._running

    def failed(self, uid: ClaimUid, error: str, at_s: float, code: str = "") -> None:
        """Note that a try failed."""
        self._failures[uid] = Failure(error=error, at_s=at_s, code=code)

    def ended(self, uid: ClaimUid) -> None:
        """Forget a claim's failure, because it is prepared or undone."""
        self._failures.pop(uid, None)

    def failure(self, uid: ClaimUid) -> Failure | None:
        """Return the last failure of a claim.

        None when no try has failed since it was prepared or undone.
        """
        return self._failures.get(uid)

    def keep(self, uids: set[ClaimUid]) -> None:
        """Keep these claims and forget all others."""
        self._failures = {uid: failure for uid, failure in self._failures.items() if uid in uids}
