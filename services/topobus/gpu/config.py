"""Settings of the gpu service: those of every device service, and what is done about what an owner left on a GPU."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from topobus.devicekit.settings import DeviceServiceSettings

__all__ = ["GpuSettings", "LeftoverSettings"]


class LeftoverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a GPU is clean after its last owner."""

    check: bool = True
    """Whether a GPU is looked at after its last owner. It needs a folder for the journal, and to see the host's processes; without, false."""
    wait_s: Annotated[float, Meta(gt=0, le=20)] = 5.0
    """Seconds that what is left may take to end by itself, and once more after a kill. 5 s: the driver gives 80 GiB of a killed process back in two. At most 20,
    for a try has `cleaning.limit_s` in all."""
    kill: bool = False
    """Whether processes that pods left on a GPU are killed then; those of the host never are. False: a person decides. It needs the host's pid namespace and
    CAP_KILL."""
    memory_slack_mib: Annotated[int, Meta(ge=0)] = 256
    """MiB by which a clean GPU's memory may exceed what was in use before its owner came. 256: the driver keeps some for what it did."""
    idle_memory_mib: Annotated[int, Meta(ge=0)] = 1024
    """MiB that may be in use where nobody knows what was before (the service restarted meanwhile). 1024: an idle GPU of 80 GiB shows about 500."""


class GpuSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gpu service."""

    leftovers: LeftoverSettings = LeftoverSettings()
    """When a GPU is clean after its last owner."""
