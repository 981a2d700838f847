"""A claim as kubelet names it, and the failure that becomes the claim's own error text."""

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

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def owner(self) -> Owner:
        """The owner under which the ledger lists the claim's devices."""
        return Owner(kind=OwnerKind.CLAIM, namespace=self.namespace, name=self.name, uid=self.uid)


class ClaimFailed(Exception):
    """Raised while one claim is handled, with the text that becomes the claim's error.

    `ClaimPreparer` catches it, so it does not affect other claims.
    """

    def __init__(self, text: str, code: str = "") -> None:
        """`code` is the code of a refusal's first reason."""
        super().__init__(text)
        self.code = code


def refused(refusal: Refusal) -> ClaimFailed:
    """Turn a refusal into the claim's failure, with its reasons in one line."""
    text = refusal.why or "refused without a reason: look into the log of the class's device service on the node"
    return ClaimFailed(text, next((reason.code for reason in refusal.reasons), ""))
