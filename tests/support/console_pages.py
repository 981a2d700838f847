"""Requests to the console, and its live stream as a page reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

Events = AsyncIterator[tuple[str, str, list[dict[str, Any]]]]


async def ask(
    port: int, path: str, *, method: str = "GET", body: str = "", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Send one request and read its answer to the end."""
    sent = {"Host": f"127.0.0.1:{port}", "Connection": "close", "Content-Length": str(len(body)), **headers}
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = "".join(f"{key}: {value}\r\n" for key, value in sent.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n{body}".encode())
        head, _, content = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    lines = head.split("\r\n")
    return (
        int(lines[0].split()[1]),
        {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])},
        content,
    )


@asynccontextmanager
async def stream(port: int, **headers: str) -> AsyncIterator[Events]:
    """Open the live stream; gives id, kind and entries of each event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    lines = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    writer.write(f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{lines}\r\n".encode())

    async def events() -> AsyncIterator[tuple[str, str, list[dict[str, Any]]]]:
        fields: dict[str, str] = {}
        async for raw in reader:
            name, _, value = raw.decode().rstrip("\r\n").partition(": ")
            if name in ("id", "event", "data"):
                fields[name] = value
            if name == "data":
                yield fields["id"], fields["event"], json.loads(value)

    try:
        async with asyncio.timeout(60):
            yield events()
    finally:
        writer.close()


async def until_entry(events: Events, topic: str, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Read until an entry of a topic is as wanted."""
    async for _, _, entries in events:
        for entry in entries:
            if entry["topic"] == topic and entry["value"] is not None and is_wanted(entry["value"]):
                return dict(entry["value"])
    raise AssertionError("the stream ended")


class Shown:
    """What a page shows: the entries by topic and key, kept by the stream's events."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.entries: dict[str, dict[str, dict[str, Any]]] = {}

    async def until(self, is_shown: Callable[[Shown], object]) -> None:
        """Read until the page shows what is wanted."""
        while not is_shown(self):
            _, kind, entries = await anext(self._events)
            if kind == "snapshot":
                self.entries.clear()
            for entry in entries:
                topic = self.entries.setdefault(entry["topic"], {})
                if entry["value"] is None:
                    topic.pop(entry["key"], None)
                else:
                    topic[entry["key"]] = entry["value"]

    def topic(self, name: str) -> dict[str, dict[str, Any]]:
        """Give the entries of a topic by key."""
        return self.entries.get(name, {})
