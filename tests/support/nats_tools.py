"""What NATS' own tools do, by a bare client: `nats micro ls`, `info`, `stats` and `ping` ask all services at once, each answer comes to one inbox; `nats stream ls` pages through a list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from nats.aio.client import Client
from nats.aio.msg import Msg

from topobus.contracts.service_protocol import TOOLS_INBOX
from topobus.runtime import connection
from topobus.runtime.bus import Bus
from topobus.runtime.reply_inbox import new_token

__all__ = ["OPEN_INBOX", "Tool", "introduced", "open_tool"]

_LIMIT_S = 60.0
OPEN_INBOX = "_INBOX"
"""Where a tool awaits answers unless it is told otherwise."""


class Tool:
    """A tool that awaits answers below one prefix."""

    def __init__(self, client: Client, *, inbox_prefix: str = TOOLS_INBOX) -> None:
        self.client = client
        self._prefix = inbox_prefix

    async def ask(self, verb: str, *where: str, wanted: int) -> list[dict[str, Any]]:
        """Ask all services, those of a name, or one process of a name; gives so many answers, by name and id."""
        async with self.listening() as (inbox, answers):
            await self.client.publish(".".join(("$SRV", verb, *where)), b"", reply=inbox)
            async with asyncio.timeout(_LIMIT_S):
                said = [json.loads((await answers.get()).data) for _ in range(wanted)]
        return sorted(said, key=lambda answer: (answer["name"], answer["id"]))

    async def lists(self, subject: str, key: str, query: dict[str, Any] | None = None) -> list[Any]:
        """Read a list of JetStream to its end."""
        rows: list[Any] = []
        while True:
            async with self.listening() as (inbox, answers):
                await self.client.publish(subject, json.dumps({**(query or {}), "offset": len(rows)}).encode(), reply=inbox)
                async with asyncio.timeout(_LIMIT_S):
                    page = json.loads((await answers.get()).data)
            rows += page[key] or []
            if len(rows) >= page["total"]:
                return rows

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[str, asyncio.Queue[Msg]]]:
        """Listen at a fresh inbox until the block ends."""
        inbox = f"{self._prefix}.{new_token()}.{new_token()}"
        answers: asyncio.Queue[Msg] = asyncio.Queue()

        async def take(message: Msg) -> None:
            answers.put_nowait(message)

        subscription = await self.client.subscribe(inbox, cb=take)
        try:
            yield inbox, answers
        finally:
            await subscription.unsubscribe()


@asynccontextmanager
async def open_tool(url: str, *, inbox_prefix: str = TOOLS_INBOX) -> AsyncIterator[Tool]:
    """Run a tool with what the URL says, on a real server or on the one in memory, as our own clients are made."""
    client = cast("Callable[[], Client]", connection.GatedClient)()
    await client.connect([url], allow_reconnect=False)
    try:
        yield Tool(client, inbox_prefix=inbox_prefix)
    finally:
        await client.close()


async def introduced(bus: Bus, node: str = "") -> None:
    """Let a process say who it is, and wait until the server knows."""
    await bus.introduce(node=node)
    await bus._connection.barrier()
