"""The floor of the idle benchmark: a Python process with asyncio and a NATS client that sends the
same heartbeats as a service, and does nothing else.

`python -m lab.bench.idle_floor URL BEAT_S ECHO_S` runs until it is killed. It imports nothing of
Topobus, so the ratio to it shows what the runtime costs, in memory as well.
"""

from __future__ import annotations

import asyncio
import sys

import nats

__all__ = ["main"]


async def main(url: str, beat_s: float, echo_s: float) -> None:
    """Send heartbeats, and messages to ourselves, until killed."""
    client = await nats.connect(url, name="floor-0", allow_reconnect=False)
    inbox = client.new_inbox()
    came = asyncio.Event()

    async def on_message(_: object) -> None:
        came.set()

    await client.subscribe(inbox, cb=on_message)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_beat(beat_s))
        while True:
            came.clear()
            await client.publish(inbox, b"")
            await came.wait()
            await asyncio.sleep(echo_s)


async def _beat(every_s: float) -> None:
    while True:  # noqa: ASYNC110 - a beat waits for nothing but time
        await asyncio.sleep(every_s)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
