"""Rate-limits log lines that any sender on the bus can cause: one line for each key in so many
seconds, with the number of lines that it replaces.
"""

from __future__ import annotations

from collections import OrderedDict

from topobus.process.clock import Clock
from topobus.process.logging import get_logger

__all__ = ["QuietLog"]

_EVERY_S = 10.0
# Keys come from the bus (subjects). Beyond so many the oldest is forgotten, and its next line comes
# at once.
_MAX_KEYS = 256


class QuietLog:
    """Writes the first of a kind at once, and then one in ten seconds. The metrics count all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._written: OrderedDict[tuple[str, str], tuple[float | None, int]] = OrderedDict()

    def warning(self, event: str, key: str, /, **facts: object) -> None:
        """Log a warning, unless one of the same event and key was written a moment ago.

        The field `count` is the number of warnings that this line represents.
        """
        count = self._count(event, key)
        if count:
            get_logger().warning(event, **facts, count=count)

    def info(self, event: str, key: str, /, **facts: object) -> None:
        """As `warning`, for events that need no action."""
        count = self._count(event, key)
        if count:
            get_logger().info(event, **facts, count=count)

    def _count(self, event: str, key: str) -> int:
        """Count the events that a line represents if it is due. 0 when none is due."""
        now = self._clock.monotonic()
        kind = (event, key)
        written_at, left_out = self._written.pop(kind, (None, 0))
        if written_at is not None and now - written_at < _EVERY_S:
            self._written[kind] = (written_at, left_out + 1)
            return 0
        self._written[kind] = (now, 0)
        if len(self._written) > _MAX_KEYS:
            self._written.popitem(last=False)
        return left_out + 1
