"""Reads and rewrites what a claim's checkpoint entry says of its sandbox.

Flows in: an entry of the checkpoint, a sandbox, an attachment. Flows out: an answer, or the entry
as it is written next. Nothing here waits or writes.
"""

from __future__ import annotations

import msgspec

from topobus.gateway.claims.checkpoint import ClaimEntry, SandboxAttachment
from topobus.values.sandbox import Sandbox

__all__ = ["is_attached_to", "is_reserved", "with_attachment", "without_attachment"]


def is_reserved(entry: ClaimEntry, sandbox: Sandbox) -> bool:
    """Say whether the claim names the sandbox's pod as one of its own."""
    return sandbox.uid in entry.pods and sandbox.namespace == entry.namespace


def is_attached_to(entry: ClaimEntry | None, sandbox: Sandbox) -> bool:
    """Say whether all devices of the claim are in this sandbox.

    An entry that is gone is in none.
    """
    attachment = entry.attachment if entry is not None else None
    return attachment is not None and attachment.is_attached and attachment.sandbox.id == sandbox.id


def with_attachment(entry: ClaimEntry, attachment: SandboxAttachment) -> ClaimEntry:
    """Write an attachment, unless the claim is being undone by now."""
    return msgspec.structs.replace(entry, attachment=attachment) if entry.is_running else entry


def without_attachment(entry: ClaimEntry, sandbox: Sandbox) -> ClaimEntry:
    """Write that the devices have left a sandbox, which is not one to come back to."""
    return msgspec.structs.replace(entry, attachment=None, left_sandbox=sandbox.id)
