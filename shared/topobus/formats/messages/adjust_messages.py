"""The messages between the gateway and a device service about one container that is about to be
made: what it gets beyond the edits of `prepare`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Refusal
from topobus.values.request import Owner
from topobus.values.sandbox import ContainerName

__all__ = ["AdjustReply", "AdjustRequest", "Adjusted"]


class AdjustRequest(Struct, frozen=True, kw_only=True):
    """Ask what a container with these prepared devices gets.

    Nothing outside the container is changed. The same request gets the same answer.
    """

    op_id: str
    owner: Owner
    devices: tuple[str, ...]
    container: ContainerName
    config: tuple[dict[str, Any], ...] = ()
    """As it was for `prepare`."""
    device_config: dict[str, tuple[dict[str, Any], ...]] = {}
    """As it was for `prepare`."""


class Adjusted(Struct, frozen=True, kw_only=True, tag="adjusted", tag_field="outcome"):
    """What the container gets."""

    edits: dict[str, ContainerEdits]
    """By device; every device asked for is here."""


class AdjustReply(Struct, frozen=True, kw_only=True):
    """The answer of `adjust`. It is valid as long as the container lives."""

    result: Adjusted | Refusal
