"""Runs modules as child processes until a block ends, and reads the lines that they print."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from topobus.values.errors import PeerUnavailable

__all__ = ["child_process", "end_process", "read_line"]

_STOP_LIMIT_S = 10.0
# All nodes of a large fleet come between two lines.
_LINE_LIMIT_S = 1800.0


@asynccontextmanager
async def child_process(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `python -m MODULE` until the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        await end_process(process)


async def read_line(process: asyncio.subprocess.Process) -> str:
    """Read the next line that a process prints.

    Errors: raises PeerUnavailable when it ends before, TimeoutError when it prints none in half an
    hour.
    """
    assert process.stdout is not None
    async with asyncio.timeout(_LINE_LIMIT_S):
        line = await process.stdout.readline()
    if not line:
        raise PeerUnavailable(f"a process of the benchmark ended with {await process.wait()}; its errors are above")
    return line.decode().strip()


async def end_process(process: asyncio.subprocess.Process) -> None:
    """End a process, by force if it does not end by itself."""
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
