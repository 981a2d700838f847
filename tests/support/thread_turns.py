"""A pause between two looks at what another thread of this process does."""

from __future__ import annotations

import asyncio

__all__ = ["other_threads"]

# A loop that looks again at once takes the interpreter's lock back after every call of a thread to
# the kernel: work of milliseconds then takes a minute.
_PAUSE_S = 0.001


async def other_threads() -> None:
    """Let the other threads run. A caller that waits for a thread without an event checks again
    after this.
    """
    await asyncio.sleep(_PAUSE_S)
