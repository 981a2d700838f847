"""The bus without a server: `topobus.bus.bus.Bus` as it is, on a nats-server in memory.

State, events, asks, feeds and their errors are the runtime's own code. Only nats-py and the server
are replaced. The bus's contract suite (tests/integration/bus/test_bus_*.py) runs on both.

>>> import asyncio
>>> from topobus.formats.messages.catalogue import LEDGER
>>> from topobus.values.ledger import Ledger
>>> async def example() -> int:
...     async with MemoryBus.session(MemoryNats(), name="topology") as bus:
...         await bus.provision()
...         return await bus.put(LEDGER, Ledger(node="n1"), node="n1")
>>> asyncio.run(example())
1
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import msgspec
from prometheus_client import CollectorRegistry

from lab.memory_nats.fates import FatedBus, Fates
from lab.memory_nats.memory_server import MemoryNats
from topobus.bus.bus import Bus
from topobus.bus.connection.connection import Connection
from topobus.process.clock import Clock, SystemClock
from topobus.process.config import NatsSettings
from topobus.process.metrics import BusMetrics
from topobus.process.readiness import Readiness

if TYPE_CHECKING:
    from topobus.bus.connection.client import GatedClient

__all__ = ["FatedBus", "Fates", "MemoryBus", "MemoryNats"]


class MemoryBus:
    """Makes buses on a server in memory.

    Several with one server talk to each other, as processes do.
    """

    @staticmethod
    @asynccontextmanager
    async def session(
        server: MemoryNats,
        *,
        name: str,
        clock: Clock | None = None,
        settings: NatsSettings | None = None,
        fates: Fates | None = None,
        release: str | None = None,
    ) -> AsyncIterator[Bus]:
        """Connect for the length of a block. `release` is the release that peers see, `fates`
        decide the result of its operations.
        """
        connection = Connection(
            msgspec.structs.replace(settings or NatsSettings(), url=server.url),
            name,
            clock or SystemClock(),
            BusMetrics(CollectorRegistry()),
            Readiness(),
            new_client=cast("Callable[[str], GatedClient]", server.new_client),
            release=release,
        )
        await connection.open()
        bus = Bus(connection)
        fated = FatedBus(bus, fates) if fates is not None else bus
        try:
            yield fated
        finally:
            if fated is not bus:
                await fated.stop_answering()
            await bus.close()
