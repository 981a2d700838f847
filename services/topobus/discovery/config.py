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
    """Where the machine is read and how often (`topobus.sysfs.tree`)."""
    full_rescan_s: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds between two complete reads, whether or not anything seems to have changed. In
    between, each read (`hardware.rescan_s`) covers what a running kernel changes: CPUs, memory,
    huge pages, our cpuset, PCI functions and their drivers. A read that finds a change is
    followed by a complete one. 300 s: what only a complete read finds (an edited file of a
    recorded machine) does not change on a running machine."""
