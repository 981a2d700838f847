"""Handles errors that nats-py reports only to its error callback: counts them, logs them without
flooding, and makes the process not ready after a denial.
"""

from __future__ import annotations

import re

from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.process.metrics import BusMetrics
from topobus.process.readiness import Readiness

__all__ = ["NatsErrors", "error_text", "is_refused_login", "next_step"]

# An error may come with each message. One line per kind in so many seconds is enough.
_REPORT_EVERY_S = 5.0
# nats-py gives it in lower case.
_DENIAL = re.compile(r'permissions violation(?: for \w+ to "([^"]*)")?', re.IGNORECASE)


def error_text(err: Exception) -> str:
    """Return an error's text, or its kind.

    Several errors of nats-py and asyncio have no text, and a task group's does not mention the
    errors that it wraps.
    """
    while isinstance(err, ExceptionGroup):
        err = err.exceptions[0]
    if not str(err) and isinstance(err, TimeoutError):
        return "no answer in time"
    return str(err) or type(err).__name__


def is_refused_login(error: str) -> bool:
    """Return whether this is the server's error for a wrong or missing login.

    >>> is_refused_login("nats: 'Authorization Violation'")
    True
    """
    return "authorization violation" in error.lower()


def next_step(error: str) -> str:
    """Name the step that ends the wait for a server after this error."""
    text = error.lower()
    if "authorization" in text or "authentication" in text:
        return "name the user and the file of its password: nats.user, nats.password_file (docs/how-to/secure-nats.md)"
    if "certificate" in text or "tls" in text:
        return "name the authority that signed the server's certificate: nats.tls_ca_file (docs/how-to/secure-nats.md)"
    return "start a NATS server there, or name another: nats.url (TOPOBUS_ALL__NATS__URL)"


class NatsErrors:
    """Counts and logs errors, and remembers denials."""

    def __init__(self, metrics: BusMetrics, readiness: Readiness, clock: Clock) -> None:
        self._metrics = metrics
        self._readiness = readiness
        self._clock = clock
        self._reported: dict[str, float] = {}
        self._is_denied = False
        self.last = ""

    def note(self, err: Exception, *, is_current: bool) -> None:
        """Count an error, and log it only if it is the current client's."""
        kind = type(err).__name__
        self.last = error_text(err)
        self._metrics.errors.labels(kind).inc()
        if not is_current:
            return
        is_denial = _DENIAL.search(self.last) is not None
        if is_denial:
            # The server refuses and nats-py continues. Without this the process would wait without
            # end and report itself ready.
            self._is_denied = True
            self._readiness.set("bus-permissions", is_ready=False, why=self.last)
        now = self._clock.monotonic()
        if now - self._reported.get(kind, -_REPORT_EVERY_S) >= _REPORT_EVERY_S:
            self._reported[kind] = now
            (get_logger().error if is_denial else get_logger().warning)(
                "bus.error-reported", kind=kind, error=self.last
            )

    def clear_denials(self) -> None:
        """Forget denials: a new client may have other rights."""
        self.last = ""
        if self._is_denied:
            self._is_denied = False
            self._readiness.set("bus-permissions", is_ready=True)
