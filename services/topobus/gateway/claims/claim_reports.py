"""The interface by which the cluster learns what happened to claims on this node, and its empty
form for gateways without a cluster.

No call waits or fails, because kubelet and the container runtime wait for the caller.
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
    """Receives what happened to claims, in addition to what happened to them in sandboxes."""

    def prepared(self, entry: ClaimEntry) -> None:
        """Report that containers may have the claim's devices of a class, or may have them as soon
        as they are in their sandbox.
        """
        ...

    def unprepared(self, claim: ClaimKey, device_class: str) -> None:
        """Report that nothing of a claim is prepared any more."""
        ...

    def cpus_differed(self, difference: CpuDifference) -> None:
        """Report that a container ran on other CPUs than promised."""
        ...


class NoClaimReports:
    """Reports nothing."""

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
