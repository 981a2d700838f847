"""What the services of a node were asked, for tests that look at it, hold a request or lose it."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["AskRecord"]


class AskRecord:
    """Notes each request, and holds it where a test wants that. Services of one node share one."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        """Verb and request, in order; with the verb's past form (`adopted`, `released`) what a
        service has done and answered."""
        self.gates: dict[str, asyncio.Event] = {}
        """Verb to what its requests wait for before the service hears of them: a service that is
        frozen, or late."""
        self.hung: set[str] = set()
        """Verbs whose requests reach no service and get no answer. What came while a verb was here
        is lost, also when the verb goes."""
        self._noted = asyncio.Condition()

    def hold(self, verb: str) -> asyncio.Event:
        """Hold a verb's requests until the event is set."""
        self.gates[verb] = asyncio.Event()
        return self.gates[verb]

    def requests(self, verb: str) -> list[Any]:
        """Give what was asked of one verb, in order."""
        return [request for name, request in self.asked if name == verb]

    async def wait_for(self, verb: str, count: int = 1, timeout_s: float = 60.0) -> Any:
        """Wait until a verb was asked so often; gives the last of these requests."""
        async with asyncio.timeout(timeout_s), self._noted:
            await self._noted.wait_for(lambda: len(self.requests(verb)) >= count)
        return self.requests(verb)[count - 1]

    async def note(self, verb: str, request: object) -> None:
        """Note a request, and hold it as long as the test wants."""
        async with self._noted:
            self.asked.append((verb, request))
            self._noted.notify_all()
        if verb in self.gates:
            await self.gates[verb].wait()
        if verb in self.hung:
            await asyncio.Event().wait()
