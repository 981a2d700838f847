"""Reads and changes the sandbox part of a claim's checkpoint entry.

Nothing here waits or writes. Functions return an answer, or the entry to be written next.
"""

from __future__ import annotations

import msgspec

from topobus.gateway.claims.checkpoint import ClaimEntry, SandboxAttachment
from topobus.values.sandbox import Sandbox

__all__ = ["is_attached_to", "is_reserved", "with_attachment", "without_attachment"]


def is_reserved(entry: ClaimEntry, sandbox: Sandbox) -> bool:
    """Return whether the claim is reserved for the sandbox's pod."""
    return sandbox.uid in entry.pods and sandbox.namespace == entry.namespace


def is_attached_to(entry: ClaimEntry | None, sandbox: Sandbox) -> bool:
    """Return whether all devices of the claim are in this sandbox.

    False for an entry that is gone.
    """
    attachment = entry.attachment if entry is not None else None
    return attachment is not None and attachment.is_attached and attachment.sandbox.id == sandbox.id


def with_attachment(entry: ClaimEntry, attachment: SandboxAttachment) -> ClaimEntry:
    """Return the entry with an attachment, unless the claim is being undone."""
    return msgspec.structs.replace(entry, attachment=attachment) if entry.is_running else entry


def without_attachment(entry: ClaimEntry, sandbox: Sandbox) -> ClaimEntry:
    """Return the entry after its devices have left a sandbox. They are not brought back to it."""
    return msgspec.structs.replace(entry, attachment=None, left_sandbox=sandbox.id)
