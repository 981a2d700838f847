"""Reads the hub as a controller does, and records when each node was first known completely.

For each node that is the moment at which each of its states had been read, by the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Self

from lab.leaves.node_content import NodeContent
from topobus.bus.bus import Bus, ChangeKind
from topobus.bus.server_config.up_subjects import up_nouns
from topobus.formats.messages.nouns import State

__all__ = ["Watcher"]

_LIMIT_S = 900.0


class Watcher:
    """Use as `async with Watcher(bus, content) as watcher`. `content` defines what a complete node
    has.
    """

    def __init__(self, bus: Bus, content: NodeContent) -> None:
        self._bus = bus
        self._states: list[State[Any]] = [noun for noun in up_nouns() if isinstance(noun, State)]
        names = {state.name for state in self._states}
        self._whole = {
            (saying.noun, saying.parts.get("device_class", "")) for saying in content.sayings if saying.noun in names
        }
        self._known: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self._whole_at: dict[str, float] = {}
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def wait_for(self, nodes: Sequence[str]) -> list[float]:
        """Wait until these nodes are known completely, and return since when."""
        async with asyncio.timeout(_LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: self._whole_at.keys() >= set(nodes))
        return [self._whole_at[node] for node in nodes]

    async def __aenter__(self) -> Self:
        begun = [asyncio.Event() for _ in self._states]
        self._tasks = [
            asyncio.create_task(self._follow(state, event)) for state, event in zip(self._states, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _follow(self, state: State[Any], begun: asyncio.Event) -> None:
        async with aclosing(self._bus.watch(state)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.SNAPSHOT_END:
                    begun.set()
                if change.kind is not ChangeKind.PUT:
                    continue
                node = change.parts["node"]
                self._known[node].add((state.name, change.parts.get("device_class", "")))
                if node not in self._whole_at and self._known[node] >= self._whole:
                    self._whole_at[node] = time.monotonic()
                    async with self._changed:
                        self._changed.notify_all()
