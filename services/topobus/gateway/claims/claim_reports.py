"""What is told of claims on this node to whoever shows it to people.

`ClaimReports` itself does nothing: that is all of it on a node without a cluster.
`cluster.claim_statuses` is the form for a cluster. No call waits or fails, because kubelet and the
container runtime wait for the caller.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["ClaimReports"]


class ClaimReports:
    """Receives what happened to claims and to their devices in sandboxes."""

    def prepared(self, entry: ClaimEntry) -> None:
        """Report that containers may have the claim's devices of a class, or may have them as soon
        as they are in their sandbox.
        """

    def unprepared(self, claim: ClaimKey, device_class: str) -> None:
        """Report that nothing of a claim is prepared any more."""

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Report that all devices of a claim are in a sandbox.

        It is called again after each start of the gateway, because earlier reports are not stored.

        Shapes: interfaces — by device; a device that is no network interface is absent.
        """

    def failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why the devices could not be brought into a sandbox.

        Its containers wait, and each new try may report it again.
        """

    def detached(self, entry: ClaimEntry) -> None:
        """Report that the devices are in no sandbox any more, also when the claim is unprepared."""

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why a sandbox's devices could not be taken out unchanged. It is retried."""
