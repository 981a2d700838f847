"""The messages by which a reservation in the ledger is committed, and a holding is released."""

from __future__ import annotations

from msgspec import Struct

from topobus.values.outcome import Refusal
from topobus.values.request import Owner

__all__ = ["CommitReply", "CommitRequest", "ReleaseReply", "ReleaseRequest"]


class CommitRequest(Struct, frozen=True, kw_only=True):
    """Commit what an owner has reserved."""

    op_id: str
    owner: Owner


class CommitReply(Struct, frozen=True, kw_only=True):
    """None: it is committed now, or was already.

    Refused when the owner has no reservation (it ran out, or never was).
    """

    refusal: Refusal | None = None
    ledger_sequence: int = 0


class ReleaseRequest(Struct, frozen=True, kw_only=True):
    """Release all that an owner holds."""

    op_id: str
    owner: Owner
    is_undone: bool = False
    """True: the asker has undone what was prepared. Without it devices that are prepared stay held,
    and the answer refuses."""
    keeps_devices: bool = False
    """True: they are not prepared any more, and stay held (a claim that is still allocated)."""
    decision_id: str = ""
    """Let go only of what this decision gave: what the owner was given since stays. Empty: of
    whatever it holds."""


class ReleaseReply(Struct, frozen=True, kw_only=True):
    """The devices that were released, by class (CPUs by device name).

    Empty when the owner held nothing, which is no error.
    """

    refusal: Refusal | None = None
    """Why nothing was released: the devices are prepared."""
    devices: dict[str, tuple[str, ...]] = {}
    ledger_sequence: int = 0
