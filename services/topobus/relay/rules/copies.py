"""Decides the next step for one key of a state, so that the hub's copy becomes what the node's
server has.

The node's relay is the only writer of the hub's copies, and each write names the sequence that it
replaces. So an older value can neither follow nor replace a newer one.
"""

from __future__ import annotations

import hashlib
from enum import Enum

from msgspec import Struct

__all__ = ["NOTHING_THERE", "Copy", "Step", "digest_of", "next_step"]

NOTHING_THERE = ""
"""The digest of a key that was deleted or never written."""


class Copy(Struct, frozen=True, kw_only=True):
    """What is known of the hub's copy of one key."""

    sequence: int
    digest: str
    is_certain: bool
    """False after the connection was lost, and for a copy that was read (a replica of the hub
    may lag). The sequence is read again before anything is concluded."""


class Step(Enum):
    """The next step for a key."""

    NOTHING = "nothing"
    READ = "read"
    """Nothing is known: read the hub's copy."""
    COMPARE = "compare"
    """The hub seems to have it: read only its sequence."""
    WRITE = "write"
    """Write the node's value over the known sequence."""


def digest_of(data: bytes | None, release: str = "") -> str:
    """Return a digest of a value and the release that wrote it. None is an absent key."""
    return NOTHING_THERE if data is None else hashlib.sha256(release.encode() + b"\0" + data).hexdigest()


def next_step(kept: str, copy: Copy | None) -> Step:
    """Return the next step for a key.

    Shapes: kept — the digest of the value in the node's server; copy — None: nothing is known of
    the hub's copy, or the outcome of the last write is unknown.

    >>> next_step("a", None), next_step("a", Copy(sequence=1, digest="a", is_certain=False)), next_step("a", Copy(sequence=1, digest="b", is_certain=False))
    (<Step.READ: 'read'>, <Step.COMPARE: 'compare'>, <Step.WRITE: 'write'>)
    """  # noqa: E501
    if copy is None:
        return Step.READ
    if copy.digest != kept:
        # Also when the copy is uncertain: a write over another sequence than the present one is
        # refused.
        return Step.WRITE
    return Step.NOTHING if copy.is_certain else Step.COMPARE
