"""A claim as kubelet names it, and the failure that becomes the claim's own error text.

Flows in: namespace, name and uid of kubelet's calls and of the checkpoint. Flows out: the owner
that the ledger knows, and sentences for kubelet.
"""

from __future__ import annotations

from msgspec import Struct

from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = ["ClaimFailed", "ClaimKey", "refused"]


class ClaimKey(Struct, frozen=True, kw_only=True):
    """A claim as kubelet names it."""

    namespace: str
    name: str
    uid: ClaimUid

    @property
    def owner(self) -> Owner:
        """Who holds the claim's devices."""
        return Owner(kind=OwnerKind.CLAIM, namespace=self.namespace, name=self.name, uid=self.uid)


class ClaimFailed(Exception):
    """Raised on the way of one claim for what becomes its own error text; `ClaimPreparer` catches
    it, and no other claim sees it.
    """

    def __init__(self, text: str, code: str = "") -> None:
        """Take the text and, of a refusal, the code of its first reason."""
        super().__init__(text)
        self.code = code


def refused(refusal: Refusal) -> ClaimFailed:
    """Turn a refusal into the claim's failure: its reasons in one line."""
    text = (
        "; ".join(reason.message for reason in refusal.reasons)
        or "refused without a reason: look into the log of the class's device service on the node"
    )
    return ClaimFailed(text, next((reason.code for reason in refusal.reasons), ""))
