"""The messages by which an operator has all stored keys of a node that is gone removed."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from topobus.values.outcome import Refusal

__all__ = ["ForgetReply", "ForgetRequest", "ForgottenKey", "KeyOutcome"]


class ForgetRequest(Struct, frozen=True, kw_only=True):
    """Remove the stored keys of one node. A repeated request removes those that are still there."""

    node: str
    is_dry_run: bool = False
    is_forced: bool = False
    """Also where the node's ledger gives something to somebody, or an operator keeps a device of it
    back."""


class KeyOutcome(StrEnum):
    """What became of a key."""

    PRESENT = "present"
    """It is there, and nothing was done: a dry run, or a refusal."""
    REMOVED = "removed"
    KEPT = "kept"
    """It is as it was, or as somebody wrote it meanwhile."""
    UNKNOWN = "unknown"
    """The server did not confirm: it may be removed or not."""


class ForgottenKey(Struct, frozen=True, kw_only=True):
    """One key of a bucket."""

    bucket: str
    key: str
    outcome: KeyOutcome
    why: str = ""
    """Why it is kept, or unknown."""


class ForgetReply(Struct, frozen=True, kw_only=True):
    """The keys of the node, and what became of each."""

    node: str
    keys: tuple[ForgottenKey, ...] = ()
    """In the order in which they are removed; empty: no bucket has anything of the node."""
    events: dict[str, int] = {}
    """By stream: of how many devices a present state was ended, or would be. Events of the past
    stay until their stream drops them."""
    refusal: Refusal | None = None
    """Why nothing was removed; in a dry run, why nothing would be."""
