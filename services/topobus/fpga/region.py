"""One reconfigurable region at one reading, as its driver sees it: what is loaded, what fits, and
how it is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topobus.fpga.bitstreams.values import Bitstream

__all__ = ["Region"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """The region behind one device."""

    device: str
    shown: str = ""
    """The function's id as sysfs shows it now; empty: none, or it is not shown."""
    shows_at_once: bool = True
    """False: sysfs may show what was loaded before until a user has opened the card (XRT's xocl),
    so only the wanted id is a sign."""
    fault: str = ""
    """Why what is loaded does not work; empty: nothing is known to be wrong."""
    obstacle: str = ""
    """Why it cannot be programmed here; empty: it can."""
    fits: Callable[[Bitstream], str]
    """Why a bitstream does not fit; empty: it fits."""
    program: Callable[[bytes], None]
    """Errors: raises RegionUntouched, or OSError when it may hold anything."""
    reset: Callable[[], None] | None = None
    """Resets the port; None: there is nothing to reset. Errors: raises OSError."""
