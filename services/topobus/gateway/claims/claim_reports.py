"""The door to whoever tells the cluster what became of claims on this node, and its empty form for
gateways without a cluster.

Flows in: claims that were prepared, attached, refused, detached, undone. Flows out: nothing; no
call waits or fails, for kubelet and the container runtime wait for its caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from topobus.gateway.claims.attachments import AttachmentReports
from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.gateway.claims.claim_key import ClaimKey
from topobus.gateway.containers.rules.cpusets import CpuDifference
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["ClaimReports", "NoClaimReports"]


class ClaimReports(AttachmentReports, Protocol):
    """Hears of claims, besides of what becomes of them in sandboxes."""

    def prepared(self, entry: ClaimEntry) -> None:
        """Hear that containers may have the claim's devices of a class, or may as soon as these are
        in their sandbox.
        """
        ...

    def unprepared(self, claim: ClaimKey, device_class: str) -> None:
        """Hear that nothing of a claim is prepared any more."""
        ...

    def cpus_differed(self, difference: CpuDifference) -> None:
        """Hear that a container was on other CPUs than was promised."""
        ...


class NoClaimReports:
    """Tells nobody."""

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Do nothing."""

    def failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Do nothing."""

    def detached(self, entry: ClaimEntry) -> None:
        """Do nothing."""

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Do nothing."""

    def prepared(self, entry: ClaimEntry) -> None:
        """Do nothing."""

    def unprepared(self, claim: ClaimKey, device_class: str) -> None:
        """Do nothing."""

    def cpus_differed(self, difference: CpuDifference) -> None:
        """Do nothing."""
