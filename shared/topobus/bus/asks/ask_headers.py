"""The headers of a request and of its answer: deadline, clocks, signs of life, and an error as a
code and a sentence.

A traceback never travels, and a header that should be a number and is not is ignored. The names are
part of the wire: they change by an ADR.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from topobus.bus.connection.connection import Headers
from topobus.bus.feeds.numbers import read_count
from topobus.formats.messages.nouns import Ask
from topobus.process.clock import Clock
from topobus.values.errors import (
    ConfigError,
    ContractError,
    HardwareError,
    InvariantError,
    PeerUnavailable,
    TopobusError,
    UnderWay,
)
from topobus.values.timestamps import rfc3339

__all__ = [
    "ANSWER_AT",
    "CLOCK",
    "DEADLINE",
    "ERROR",
    "MESSAGE",
    "PING",
    "SENT",
    "STALE",
    "TWIN",
    "code_of",
    "error_headers",
    "moment_text",
    "now_ms",
    "raise_error",
    "read_number",
]

ERROR = "Topobus-Error"
STALE = "stale"
"""The error code of a request that was too old to be served."""
MESSAGE = "Topobus-Error-Message"
RETRY_AFTER = "Topobus-Retry-After-Ms"
DEADLINE = "Topobus-Deadline-Ms"
"""How long the asker still waits, from the moment of sending."""
SENT = "Topobus-Sent-Ms"
"""When it was sent, by the asker's clock, in milliseconds since 1970."""
CLOCK = "Topobus-Clock-Ms"
"""The answerer's clock, in milliseconds since 1970: with a sign of life, and where a request was
too old by it."""
PING = "Topobus-Ping"
"""Marks the question "does somebody answer here?"; the value is the asker, and the answer's value
the instance."""
ANSWER_AT = "Topobus-Answer-At"
"""Where the asker awaits the answer, for who is asked from another account: the server gives that
one a reply subject of its own, which does not name the asker."""
TWIN = "Topobus-Twin"
"""Marks the question "does somebody answer here already?" and its answer; the value is the
instance."""

_SAFE = " !#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_CODES: tuple[tuple[type[TopobusError], str], ...] = (
    (ContractError, "contract"),
    (UnderWay, "under-way"),
    (PeerUnavailable, "unavailable"),
    (HardwareError, "hardware"),
    (ConfigError, "config"),
    (InvariantError, "internal"),
)


def code_of(err: TopobusError) -> str:
    """Give the code under which an error travels."""
    return next(code for kind, code in _CODES if isinstance(err, kind))


def error_headers(code: str, err: TopobusError) -> Headers:
    """Write an error as headers: its code, its sentence in at most 2000 characters, and when to try
    again if the error has that.
    """
    headers = {ERROR: code, MESSAGE: quote(str(err)[:2000].strip(), safe=_SAFE)}
    if isinstance(err, PeerUnavailable):
        headers[RETRY_AFTER] = str(round(err.retry_after_s * 1000))
    return headers


def raise_error(ask: Ask[Any, Any], subject: str, headers: Headers) -> None:
    """Raise the error in the headers of an answer, if there is one.

    Errors: raises ContractError, HardwareError, PeerUnavailable or UnderWay with the peer's code as
    the fact `code`. A bug of ours on the other side is raised as PeerUnavailable.
    """
    code = headers.get(ERROR)
    if code is None:
        return
    text = f"{ask.name} at {subject}: {unquote(headers.get(MESSAGE, '')) or code}"
    if code in ("contract", "config"):
        raise ContractError(text, code=code)
    if code == "hardware":
        raise HardwareError(text, code=code)
    kind = UnderWay if code == "under-way" else PeerUnavailable
    raise kind(text, retry_after_s=(read_number(headers.get(RETRY_AFTER)) or 1000) / 1000, code=code)


def read_number(text: str | None) -> int | None:
    """Read a header's number. None when the header is absent or not a number."""
    try:
        return read_count(text) if text is not None else None
    except ContractError:
        return None


def moment_text(milliseconds: int) -> str:
    """Write a clock's reading as a date. A reading outside the calendar stays a number."""
    try:
        return rfc3339(datetime.fromtimestamp(milliseconds / 1000, UTC))
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def now_ms(clock: Clock) -> int:
    """Read the clock in milliseconds since 1970."""
    return round(clock.now().timestamp() * 1000)
