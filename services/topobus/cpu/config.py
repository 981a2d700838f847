"""Settings of the cpu service: those of every device service."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from topobus.devicekit.settings import DeviceServiceSettings

__all__ = ["CpuGroupSettings", "CpuSettings", "Grouping"]

Grouping = Literal["cpu", "numa", "socket", "l3", "machine"]
"""What one device of class `cpu` is."""


class CpuGroupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How CPUs are offered."""

    groups: Grouping = "cpu"
    """`cpu`: each by itself, so that a claim may choose by CPU. `numa`, `socket`, `l3`, `machine`:
    one device for all CPUs of such a unit, with a capacity `cpus` of which claims have shares;
    which CPUs is decided on the node when a claim is prepared, as kubelet's static policy does it.
    Groups need consumable capacity (DRAConsumableCapacity) in the cluster; they are few, where a
    large machine has hundreds of CPUs. The default needs nothing."""
    whole_cores: bool = False
    """Of groups give whole cores only: what a claim asks for is rounded up to the threads of a
    core. Set it with `alignment.cpu.full_pcpus_only` of the topology service, which refuses half
    cores; off, as that is."""


class CpuSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the cpu service."""

    cpus: CpuGroupSettings = CpuGroupSettings()
    """How CPUs are offered."""
