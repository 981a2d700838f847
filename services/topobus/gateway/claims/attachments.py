"""Interfaces for bringing a claim's devices into a pod's sandbox: attaching them, reporting about
them, and reading pod facts that the container runtime does not give.

`NoPodDetails` is the form for gateways without a cluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from topobus.gateway.claims.checkpoint import ClaimEntry
from topobus.values.outcome import Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["AttachmentReports", "Attachments", "Describe", "NoPodDetails", "PodDetails"]


class Attachments(Protocol):
    """Brings devices into the sandboxes of their pods.

    The code that prepares and unprepares claims depends only on this.
    """

    def check(self, entry: ClaimEntry) -> None:
        """Check that a claim's devices can be brought into its pod later.

        Errors: raises PeerUnavailable when the container runtime is needed and not connected.
        """
        ...

    async def detach(self, entry: ClaimEntry) -> None:
        """Take a claim's devices out of any sandbox, before their preparation is undone.

        Errors: raises ClaimFailed when the device service refuses, PeerUnavailable when it is away.
        """
        ...


Describe = Callable[[ClaimEntry, Mapping[str, AttachedInterface]], Awaitable[None]]
"""Writes what devices became in a sandbox to files that its containers read."""


class AttachmentReports(Protocol):
    """Receives what happened to a claim's devices in a pod's sandbox.

    Calls must not block, because the container runtime waits for their end.
    """

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Report that all devices of a claim are in a sandbox.

        It is called again after each start of the gateway, because earlier reports are not stored.

        Shapes: interfaces — by device; a device that is no network interface is absent.
        """
        ...

    def failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why the devices could not be brought into a sandbox.

        Its containers wait, and each new try may report it again.
        """
        ...

    def detached(self, entry: ClaimEntry) -> None:
        """Report that the devices are in no sandbox any more, also when the claim is unprepared."""
        ...

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Report why a sandbox's devices could not be taken out unchanged. It is retried."""
        ...


class PodDetails(Protocol):
    """Reads facts of a pod that the runtime does not give."""

    async def of(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox with its host ports, or with the reason why they are unknown
        (`ports_unknown`). In that case only devices that must open the ports are refused.

        Answers within half a second, because the runtime waits. Errors: raises nothing.
        """
        ...


class NoPodDetails:
    """Adds nothing to what the runtime gives."""

    async def of(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox unchanged."""
        return sandbox
