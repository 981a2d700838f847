"""Readiness: the parts that must be ready before the process reports ready.

A part stays on the list once it was named. A process is not ready while it has named no part, or
while an awaited part has not reported: after NATS is ready and before a service's own first report,
nothing else would show that the service is not ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

__all__ = ["Readiness"]


class Readiness:
    """Collects the state that each part of a process reports.

    Read by the /readyz endpoint from another thread.

    >>> readiness = Readiness()
    >>> readiness.set("machine", False, "waiting for discovery")
    >>> readiness.is_ready, readiness.report()
    (False, {'machine': 'waiting for discovery'})
    """

    def __init__(self, awaited: Iterable[str] = ()) -> None:
        self._parts: dict[str, tuple[bool, str]] = dict.fromkeys(awaited, (False, "starting"))
        self._lock = Lock()

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        """Report whether a part is ready, and why not. A part that is ready may have a remark."""
        with self._lock:
            self._parts[part] = (is_ready, why)

    @property
    def is_ready(self) -> bool:
        """Return whether every part is ready, and at least one has reported."""
        with self._lock:
            return bool(self._parts) and all(is_ready for is_ready, _ in self._parts.values())

    def report(self) -> dict[str, str]:
        """Give each part's state, sorted by name: `ready` (with a remark where there is one), or
        why it is not.
        """
        with self._lock:
            return {part: _describe(is_ready, why) for part, (is_ready, why) in sorted(self._parts.items())}


def _describe(is_ready: bool, why: str) -> str:
    if is_ready:
        return f"ready: {why}" if why else "ready"
    return why or "not ready"
