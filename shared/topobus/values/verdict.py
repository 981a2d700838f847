"""A verdict: what somebody other than its driver says of a device, such as DCGM, a condition of the
Node, or an exporter.

The device service keeps the newest verdict of each source, and the setting `health.sources` decides
what it counts for. Silence of a source is no verdict.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from topobus.values.health import Dimension

__all__ = ["KeptVerdict", "Verdict", "VerdictState"]


class VerdictState(StrEnum):
    """What a source says of a device."""

    HEALTHY = "healthy"
    """It takes back what it said before, of this device and dimension."""
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Verdict(Struct, frozen=True, kw_only=True):
    """What one source says of a device, or of all devices of a class, in one dimension.

    The class is the one of the service that it is sent to.
    """

    source: str
    """Who says it, by the name in `health.sources`. A source with several checks names the check
    after a slash, so that one does not take back what another said: `dcgm`,
    `node-condition/KernelDeadlock`."""
    state: VerdictState
    device: str = ""
    """Its name, PCI address or UUID. A card's verdict also counts for its parts. Empty: every
    device of the class, also one that comes later."""
    dimension: Dimension = Dimension.COMPUTE
    code: str = ""
    """The source's own code of what it saw, up to 64 bytes."""
    message: str = ""
    """For people, up to 256 bytes."""
    observed_at: str = ""
    """RFC 3339: when the source saw it. Of two verdicts the later one counts, in whichever order
    they arrive. Empty: when the device service got it."""


class KeptVerdict(Struct, frozen=True, kw_only=True):
    """The newest verdict of a source about a device, as its device service keeps it."""

    verdict: Verdict
    forgiven: tuple[str, ...] = ()
    """Devices, by name, for which an operator has forgiven it: it does not count for them until the
    source says something newer."""
