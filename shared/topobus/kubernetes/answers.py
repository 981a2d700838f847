"""What an API server answers when it does not give an object: its refusals as values, and what a
caller cannot go on with as exceptions.

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
    """The server's no: a conflict, an absent object, something invalid or forbidden.

    Asked again unchanged, it would be no again.
    """

    code: int
    reason: str = ""
    message: str = ""

    @property
    def is_conflict(self) -> bool:
        """Say whether somebody else was faster: the object is another now, or gone."""
        return self.code in (NOT_FOUND, CONFLICT)


class HistoryLost(Exception):
    """The server has forgotten what came after our version (410): list again."""


class NotServed(PeerUnavailable):
    """Raised when the server has no such path, and therefore says so in plain text: an object that
    is not there is a Status.
    """
