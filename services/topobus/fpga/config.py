"""Settings of the fpga service: those of every device service, and which functions its cards may be
programmed with.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from topobus.devicekit.settings import DeviceServiceSettings
from topobus.fpga.bitstreams.store import DEFAULT_STORE

__all__ = ["FpgaSettings", "FunctionSettings"]


class FunctionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How cards get the functions that claims ask for."""

    program: bool = False
    """Whether a card is programmed with what a claim asks for, and its port is reset after each
    user. False: claims get cards that have the function already. It needs the nodes of the cards
    and a folder for the journal (docs/how-to/fpga-functions.md)."""
    store: str = DEFAULT_STORE
    """Folder of the bitstreams, filled by `topobus-fpga-store`. The store also lists who
    may have a function, so it is read even where nothing is programmed."""
    limit_s: Annotated[float, Meta(gt=0, le=600)] = 120.0
    """Seconds that programming one card may take. 120 s: an xclbin of 100 MiB takes some 20 s, and
    XRT's own plugin waits as long again."""


class FpgaSettings(DeviceServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the fpga service."""

    functions: FunctionSettings = FunctionSettings()
    """How cards get the functions that claims ask for."""
