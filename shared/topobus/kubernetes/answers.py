"""The answers of an API server that are not an object: refusals as values, and failures that a
caller cannot handle as exceptions.

Parts that only handle answers import this module and not the client, whose libraries (HTTP, TLS,
kubeconfig) take 4 MiB of a process that may never need them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.values.errors import PeerUnavailable

__all__ = ["CONFLICT", "GONE", "INVALID", "NOT_FOUND", "HistoryLost", "NotServed", "Plain", "Rejected"]

Plain = dict[str, Any]
"""An object in the served version's wire shape."""

NOT_FOUND = 404
CONFLICT = 409
GONE = 410
INVALID = 422


class Rejected(Struct, frozen=True, kw_only=True):
    """A refusal by the server: a conflict, an absent object, or an invalid or forbidden request.

    The same request would be refused again.
    """

    code: int
    reason: str = ""
    message: str = ""

    @property
    def is_conflict(self) -> bool:
        """Return whether another writer was first: the object has changed or is gone."""
        return self.code in (NOT_FOUND, CONFLICT)


class HistoryLost(Exception):
    """The server no longer has the changes after our version (410): list again."""


class NotServed(PeerUnavailable):
    """Raised when the server does not serve the path, which it answers in plain text. An absent
    object is answered with a Status.
    """
