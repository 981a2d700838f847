"""Decides which verdicts of others are kept, for which devices they count, and as what. Pure.

The newest verdict of each source, device and dimension is kept, by the time at which its source saw
it, so the order of arrival decides nothing. A verdict of Healthy is kept as well: an older one that
arrives later does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import structs

from topobus.devicekit.pci import pci_device_name
from topobus.values.device import Device
from topobus.values.health import HealthState, Observation
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.timestamps import rfc3339
from topobus.values.verdict import KeptVerdict, Verdict, VerdictState

__all__ = [
    "REPORTED",
    "VERDICTS_KEPT",
    "checked",
    "counts_for",
    "is_about",
    "observations",
    "with_forgiven",
    "with_verdict",
]

REPORTED = "reported-by-source"
"""The reason of every verdict; source and code are in the evidence."""
VERDICTS_KEPT = 256
"""Verdicts that one class keeps: with the longest texts three quarters of what the bucket takes of a
value."""

# A clock that is ahead by more would have the last word for as long.
_AHEAD = timedelta(minutes=1)
_SOURCE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}(/[A-Za-z0-9][A-Za-z0-9._/-]{0,127})?")
_LIMITS = {"device": 128, "code": 64, "message": 256}
_SEVERITY = (VerdictState.HEALTHY, VerdictState.DEGRADED, VerdictState.UNHEALTHY)


def checked(
    verdict: Verdict, devices: Iterable[Device], trust: Mapping[str, str], *, device_class: str, now: datetime
) -> Verdict | Refusal:
    """Check a verdict, and name its device and time as they are kept.

    Shapes: trust — `health.sources`.
    Errors: returns Refusal(`source-unlisted`, `verdict-malformed` or `device-unknown`).
    """
    name = verdict.source.partition("/")[0]
    if fault := _fault(verdict, now):
        field, got = fault
        return refuse("verdict-malformed", f"a verdict's {field} {got}", field=field, source=verdict.source[:160])
    if name not in trust:
        listed = ", ".join(sorted(trust)) or "none"
        return refuse(
            "source-unlisted",
            f"source {name!r} is not believed on this node: health.sources of the {device_class} service lists "
            f"{listed}; add it as evidence or as advice",
            source=name,
            setting="health.sources",
        )
    target = _target(verdict.device, devices)
    if target is None:
        return refuse(
            "device-unknown",
            f"class {device_class} has no device with name, PCI address or UUID {verdict.device!r} on this node",
            device=verdict.device,
        )
    moment = datetime.fromisoformat(verdict.observed_at) if verdict.observed_at else now
    return structs.replace(verdict, device=target, observed_at=rfc3339(moment))


def with_verdict(kept: Sequence[KeptVerdict], verdict: Verdict) -> tuple[KeptVerdict, ...] | Refusal:
    """Keep a verdict, unless a newer one of its source, device and dimension is kept.

    Of two of one time the worse counts. Where too many are kept, the oldest of Healthy makes room.

    Errors: returns Refusal(`verdicts-full`) when all that are kept withhold something.
    """
    before = next((old for old in kept if _key(old.verdict) == _key(verdict)), None)
    if before is not None and _rank(before.verdict) >= _rank(verdict):
        return tuple(kept)
    others = sorted((old for old in kept if old is not before), key=lambda old: _rank(old.verdict))
    if len(others) >= VERDICTS_KEPT:
        healthy = next((old for old in others if old.verdict.state is VerdictState.HEALTHY), None)
        if healthy is None:
            return refuse(
                "verdicts-full",
                f"{len(others)} verdicts are kept for this class, wanted fewer than {VERDICTS_KEPT}: let the sources "
                "report Healthy what is well, or name cards instead of their parts",
                kept=len(others),
            )
        others.remove(healthy)
    return tuple(sorted((*others, KeptVerdict(verdict=verdict)), key=lambda old: _key(old.verdict)))


def observations(device: Device, kept: Iterable[KeptVerdict], trust: Mapping[str, str]) -> tuple[Observation, ...]:
    """Return what the verdicts say of a device, as observations.

    Shapes: trust — `health.sources`; a source that it does not list any more counts for nothing.
    """
    return tuple(
        _observation(old.verdict, trust[name])
        for old in kept
        if counts_for(old, device) and (name := old.verdict.source.partition("/")[0]) in trust
    )


def counts_for(kept: KeptVerdict, device: Device) -> bool:
    """Say whether a verdict holds something against a device."""
    return (
        kept.verdict.state is not VerdictState.HEALTHY
        and is_about(kept.verdict, device)
        and device.name not in kept.forgiven
    )


def is_about(verdict: Verdict, device: Device) -> bool:
    """Say whether a verdict is about a device: by its name, by that of its card, or with all."""
    return verdict.device in ("", device.name, device.parent, device.partition_of)


def with_forgiven(kept: Iterable[KeptVerdict], device: Device) -> tuple[KeptVerdict, ...]:
    """Forgive a device all that sources say of it now. What they say later counts."""
    return tuple(
        structs.replace(old, forgiven=(*old.forgiven, device.name)) if counts_for(old, device) else old for old in kept
    )


def _observation(verdict: Verdict, trust: str) -> Observation:
    is_unhealthy = verdict.state is VerdictState.UNHEALTHY and trust == "evidence"
    return Observation(
        dimension=verdict.dimension,
        state=HealthState.UNHEALTHY if is_unhealthy else HealthState.DEGRADED,
        reason=REPORTED,
        message=f"{verdict.source}: {verdict.message or verdict.code or verdict.state}",
        evidence={"code": verdict.code, "said": verdict.state, "source": verdict.source, "trust": trust},
        source=verdict.source,
    )


def _fault(verdict: Verdict, now: datetime) -> tuple[str, str] | None:
    """Name the field that cannot be taken, with what it has and what was wanted."""
    if not _SOURCE.fullmatch(verdict.source):
        return "source", f"is {verdict.source[:160]!r}, wanted a name such as dcgm, or with its check: dcgm/pcie"
    for field, limit in _LIMITS.items():
        text: str = getattr(verdict, field)
        if len(text.encode()) > limit or not text.isprintable():
            return field, f"has {len(text.encode())} bytes, wanted one printable line of at most {limit}"
    try:
        moment = datetime.fromisoformat(verdict.observed_at) if verdict.observed_at else now
    except ValueError:
        moment = now.replace(tzinfo=None)
    if moment.tzinfo is None:
        return "observed_at", f"is {verdict.observed_at[:40]!r}, wanted RFC 3339 such as 2026-01-02T03:04:05Z"
    if moment > now + _AHEAD:
        return "observed_at", f"is {verdict.observed_at[:40]}, and it is {rfc3339(now)} here: set the clocks"
    return None


def _target(named: str, devices: Iterable[Device]) -> str | None:
    """Find the name under which verdicts of a device are kept, whichever of its names is used: a
    card's, also where only its parts are offered. None: there is none.
    """
    listed = tuple(devices)
    if not named or any(named in (device.name, device.parent) for device in listed):
        return named
    try:
        address = str(PciAddress.parse(named))
    except ValueError:
        address = ""
    for device in listed:
        is_at = bool(address) and str(device.pci) == address
        is_part_at = (
            is_at and device.pci is not None and pci_device_name(device.device_class, device.pci) == device.parent
        )
        if is_part_at or device.attributes.get("parentUUID") == named:
            return device.parent
        if is_at or device.uuid == named:
            return device.name
    return None


def _key(verdict: Verdict) -> tuple[str, str, str]:
    return (verdict.device, verdict.source, verdict.dimension)


def _rank(verdict: Verdict) -> tuple[str, int, str, str]:
    return (verdict.observed_at, _SEVERITY.index(verdict.state), verdict.code, verdict.message)
