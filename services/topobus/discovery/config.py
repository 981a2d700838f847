"""Settings of the discovery service."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from topobus.process.config import ServiceSettings
from topobus.sysfs.tree import HardwareSettings

__all__ = ["DiscoverySettings"]


class DiscoverySettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the discovery service."""

    hardware: HardwareSettings = HardwareSettings()
    """Where the machine is read and how often; see `topobus.sysfs.tree`."""
    full_rescan_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds between two looks at everything, whether anything seems to have changed or not. In
    between, each look (`hardware.rescan_s`) reads what a running kernel changes: CPUs, memory, huge
    pages, our cpuset, PCI functions and their drivers; one that finds a change reads everything.
    300 s: what only this finds (a file of a recorded machine that somebody edits) is no news of a
    running machine."""
