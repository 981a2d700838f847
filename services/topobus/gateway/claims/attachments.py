"""The doors around a claim's devices in a pod's sandbox: who hears of them, and who knows more of a
pod than the container runtime tells.

Flows in: nothing. Flows out: Protocols, and an empty form for gateways without a cluster.
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

    What prepares and unprepares claims needs to know no more of it.
    """

    def check(self, entry: ClaimEntry) -> None:
        """Let a claim be prepared only when its devices can be brought into its pod later.

        Errors: raises PeerUnavailable when the container runtime is not there for it.
        """
        ...

    async def detach(self, entry: ClaimEntry) -> None:
        """Take a claim's devices out of wherever they are, before they are undone.

        Errors: raises ClaimFailed when the device service refuses, PeerUnavailable when it is away.
        """
        ...


Describe = Callable[[ClaimEntry, Mapping[str, AttachedInterface]], Awaitable[None]]
"""Writes what devices became in a sandbox where containers of it will read it."""


class AttachmentReports(Protocol):
    """Hears what became of a claim's devices in a pod's sandbox.

    Calls must not block: the container runtime waits for their end.
    """

    def attached(self, entry: ClaimEntry, sandbox: Sandbox, interfaces: Mapping[str, AttachedInterface]) -> None:
        """Hear that all devices of a claim are in a sandbox.

        Also once more after each start of the gateway, since nobody remembers what was told.

        Shapes: interfaces — by device; a device that is no network interface is absent.
        """
        ...

    def failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Hear why a sandbox does not get them.

        Its containers wait, and each new try may say it again.
        """
        ...

    def detached(self, entry: ClaimEntry) -> None:
        """Hear that they are in no sandbox any more; also where the claim is being unprepared."""
        ...

    def detach_failed(self, entry: ClaimEntry, sandbox: Sandbox, refusal: Refusal) -> None:
        """Hear why they could not be taken back from a sandbox as they were; it is tried again."""
        ...


class PodDetails(Protocol):
    """Knows of a pod what the runtime does not tell."""

    async def of(self, sandbox: Sandbox) -> Sandbox:
        """Give the sandbox with its host ports, or with why they are not known (`ports_unknown`):
        then only what has to open them is refused.

        Within half a second: the runtime starts nothing meanwhile. Errors: raises nothing.
        """
        ...


class NoPodDetails:
    """Knows nothing more than the runtime."""

    async def of(self, sandbox: Sandbox) -> Sandbox:
        """Give it as it is."""
        return sandbox
