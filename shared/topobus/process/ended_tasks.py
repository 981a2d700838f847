"""Ends tasks for certain: a cancellation that is dropped on its way is repeated."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["end_tasks"]

_CANCEL_AGAIN_S = 0.5


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended: nats-py connects under `asyncio.wait_for`, which before
    Python 3.12 drops a cancellation (bpo-37658).
    """
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
