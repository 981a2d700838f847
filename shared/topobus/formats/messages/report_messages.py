"""The messages by which others report how devices are to the device service of their class."""

from __future__ import annotations

from msgspec import Struct

from topobus.values.outcome import Refusal
from topobus.values.verdict import Verdict

__all__ = ["ReportReply", "ReportRequest", "Taken"]


class Taken(Struct, frozen=True, kw_only=True, tag="taken", tag_field="outcome"):
    """The verdict is stored, and a restart of the service does not lose it."""

    devices: tuple[str, ...] = ()
    """The devices that it is about, by name."""
    is_newest: bool = True
    """False: nothing changed, because it was stored before, or a newer one of its source is."""


class ReportRequest(Struct, frozen=True, kw_only=True):
    """Report a verdict."""

    verdict: Verdict


class ReportReply(Struct, frozen=True, kw_only=True):
    """The answer. The same verdict may be reported again at any time."""

    result: Taken | Refusal
