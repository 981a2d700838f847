"""The messages between the gateway and a device service about a pod's sandbox: attach a device to
it, detach it, and long work in progress.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from topobus.values.outcome import Refusal
from topobus.values.request import Owner
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["Accepted", "AttachReply", "AttachRequest", "Attached", "DetachReply", "DetachRequest"]

_Seconds = Annotated[float, Meta(ge=0, le=86400)]


class Accepted(Struct, frozen=True, kw_only=True, tag="accepted", tag_field="outcome"):
    """The work has begun and is not finished: send the same request again.

    Over its limit the same request is refused.
    """

    retry_after_s: _Seconds
    """Seconds until it is worth to ask again."""
    limit_s: _Seconds
    """Seconds that are left until the work is refused."""
    what: str = ""
    """What takes so long, for people: `programming the region of fpga-0`."""


class AttachRequest(Struct, frozen=True, kw_only=True):
    """Attach prepared devices to their pod's sandbox, before any container of it starts."""

    op_id: str
    owner: Owner
    devices: tuple[str, ...]
    sandbox: Sandbox
    config: tuple[dict[str, Any], ...] = ()
    """As it was for `prepare`."""
    device_config: dict[str, tuple[dict[str, Any], ...]] = {}
    """As it was for `prepare`."""


class Attached(Struct, frozen=True, kw_only=True, tag="attached", tag_field="outcome"):
    """All devices are in the sandbox."""

    interfaces: dict[str, AttachedInterface]
    """By device; one that is no network interface is absent."""


class AttachReply(Struct, frozen=True, kw_only=True):
    """The answer of `attach`, the same for the same owner, device and sandbox."""

    result: Attached | Refusal | Accepted


class DetachRequest(Struct, frozen=True, kw_only=True):
    """Undo `attach`. Devices that are not attached are no error.

    The sandbox's namespaces may be gone by now.
    """

    op_id: str
    owner: Owner
    devices: tuple[str, ...]
    sandbox: Sandbox


class DetachReply(Struct, frozen=True, kw_only=True):
    """Done, or why not."""

    refusal: Refusal | None = None
