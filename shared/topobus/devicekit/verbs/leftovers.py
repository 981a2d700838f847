"""The host's own observations of a device: that its last owner's traces are being removed, could
not be removed, or are unknown. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from topobus.engine.health.inventory_merge import DriverView
from topobus.values.health import Observation
from topobus.values.health_reasons import sign
from topobus.values.request import Owner

__all__ = ["cleaning", "dirty", "journal_unreadable", "with_leftovers"]


def cleaning(owner: Owner | None, why_not_yet: str = "") -> Observation:
    """Make the observation that a device is being cleaned.

    It is not available, and nothing is known to be wrong, so it is Healthy again at once
    afterwards.
    """
    return sign(
        "cleaning",
        f"it is being cleaned after {owner or 'somebody'}{f': {why_not_yet}' if why_not_yet else ''}",
        evidence={"owner": owner.key if owner else ""},
    )


def dirty(owner: Owner | None, why: str, evidence: Mapping[str, str] = MappingProxyType({})) -> Observation:
    """Make the observation that what an owner left could not be removed. `evidence` is the
    driver's.
    """
    return sign(
        "dirty",
        f"{owner or 'an operation'} left it dirty, it is tried again: {why}",
        evidence={**evidence, "owner": owner.key if owner else ""},
    )


def journal_unreadable(why: str) -> Observation:
    """Make the observation that the acts on a device are unknown."""
    return sign(
        "journal-unreadable",
        f"what was done to it cannot be read: {why}; mend the file, or remove it when the device is as it should be",
    )


def with_leftovers(views: Mapping[str, DriverView], own: Mapping[str, Observation]) -> dict[str, DriverView]:
    """Add the host's observations to those of the drivers.

    Each driver's view gets those of its own devices.
    """
    if not own:
        return dict(views)
    return {name: _with_own(view, own) for name, view in views.items()}


def _with_own(view: DriverView, own: Mapping[str, Observation]) -> DriverView:
    names = {*(device.name for device in view.devices or ()), *view.away} & own.keys()
    if not names:
        return view
    observations = {name: (*view.observations.get(name, ()), own[name]) for name in sorted(names)}
    return replace(view, observations={**view.observations, **observations})
