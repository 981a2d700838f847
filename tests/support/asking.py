"""Questions to a service that is starting: asked again until somebody answers."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from support.looks import next_look
from topobus.bus.bus import Bus
from topobus.formats.messages.nouns import Ask
from topobus.values.errors import PeerUnavailable

__all__ = ["ask_patiently"]

Q = TypeVar("Q")
R = TypeVar("R")

LIMIT_S = 60.0
# No event shows an asker that somebody listens now. NATS answers "no responders" at once, so a
# pause keeps the test from spinning.
_PAUSE_S = 0.05


async def ask_patiently(bus: Bus, ask: Ask[Q, R], request: Q, *, limit_s: float = LIMIT_S, **parts: str) -> R:
    """Ask until somebody answers.

    The request carries its operation id, so that asking again is the same question.

    Errors: raises TimeoutError after `limit_s`, and at once whatever else the peer answers.
    """
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await bus.ask(ask, request, **parts)
            except PeerUnavailable:
                await next_look()
