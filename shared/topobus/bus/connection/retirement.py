"""Retires clients that another one has replaced: each passes on what has arrived, gives the answers
that it owes, and is closed then.

A request is answered by the client that it came by: where a right to answer is given with the
request (`allow_responses`), no other client has it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from topobus.bus.connection.subscriptions import drain_quietly

__all__ = ["Retirement", "close_quietly"]

_DRAIN_S = 5.0
# As long as the server lets a request be answered (`nats_accounts_config`).
_OWES_S = 300.0


class Retirement:
    """The older clients of one connection."""

    def __init__(self) -> None:
        self._owed: Counter[Client] = Counter()
        self._settled = asyncio.Event()
        self._retiring: dict[Client, asyncio.Task[None]] = {}

    def owe(self, request: Msg) -> None:
        """Note a request that will be answered."""
        self._owed[request._client] += 1

    def settle(self, request: Msg) -> None:
        """Note that it has been answered, or will not be."""
        client = request._client
        self._owed[client] -= 1
        if self._owed[client] <= 0:
            del self._owed[client]
            if client in self._retiring:
                self._settled.set()

    def answering(self, request: Msg, present: Client | None) -> Client | None:
        """Return the client that must answer a request: the one that it came by while that is live,
        older or newer than the present one, else the present one.
        """
        client = request._client
        return client if client.is_connected else present

    def retire(self, client: Client, live: Sequence[Subscription]) -> None:
        """Let a client end in its own time.

        Shapes: live — its subscriptions, which other clients take over.
        """
        task = asyncio.create_task(self._retire(client, live), name="bus-retiring-client")
        self._retiring[client] = task
        task.add_done_callback(lambda _: self._retiring.pop(client, None))

    async def close(self) -> None:
        """End those that are still open."""
        tasks = list(self._retiring.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def _retire(self, client: Client, live: Sequence[Subscription]) -> None:
        try:
            draining = [asyncio.create_task(drain_quietly(each)) for each in live]
            if draining:
                # Not cancelled: see `topobus.bus.connection.subscriptions`.
                # The client's end ends them.
                await asyncio.wait(draining, timeout=_DRAIN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_OWES_S):
                    while self._owed[client] > 0 and client.is_connected:
                        self._settled.clear()
                        await self._settled.wait()
        finally:
            await close_quietly(client)


async def close_quietly(client: Client) -> None:
    """Close a client. A client that hangs with its server is abandoned after a second."""
    with suppress(nats.errors.Error, OSError, TimeoutError, AssertionError):
        async with asyncio.timeout(1.0):
            await client.close()
