"""What nats-py does to its caller: a client that it has closed and has not told us about yet, a
cancellation that it drops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client import CollectorRegistry

from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from lab.memory_nats.memory_client import MemoryClient
from topobus.bus.connection.connection import Connection
from topobus.formats.messages.catalogue import LEDGER
from topobus.process.clock import SystemClock
from topobus.process.config import NatsSettings
from topobus.process.metrics import BusMetrics
from topobus.process.readiness import Readiness
from topobus.values.errors import PeerUnavailable

if TYPE_CHECKING:
    from topobus.bus.connection.client import GatedClient

# Far more turns than a replacement takes; without an end, a defect here
# would hold the event loop for ever.
_TURNS = 10_000


@pytest.mark.virtual_time
async def test_client_is_replaced_when_it_is_closed_unsaid_and_a_reader_never_pauses() -> None:
    """A reader that fails, waits for the connection and reads again leaves the event loop its
    turns: a new client comes up and answers.
    """
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        await bus.provision()
        connection = bus._connection
        closed, generation = cast("MemoryClient", connection._client), connection.generation
        # As nats-py is between `_status = CLOSED` and its closed callback.
        closed.is_connected = False

        is_read = False
        for _ in range(_TURNS):
            try:
                await bus.get(LEDGER, node="n1")
            except PeerUnavailable:
                await bus.wait_connected()
            else:
                is_read = True
                break

        assert is_read
        assert connection.generation == generation + 1


@pytest.mark.virtual_time
async def test_connection_is_called_lost_when_its_client_is_closed_unsaid() -> None:
    """`is_connected` is what the next message would meet, and waiting for a connection ends with a
    new client.
    """
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        connection = bus._connection
        generation = connection.generation
        cast("MemoryClient", connection._client).is_connected = False

        was_connected = bus.is_connected
        async with asyncio.timeout(30.0):
            await bus.wait_connected()

        assert not was_connected
        assert bus.is_connected
        assert connection.generation == generation + 1


class _DeafClient(MemoryClient):
    """Drops a cancellation while it connects, as `asyncio.wait_for` of Python 3.11 does when the
    server refuses at that moment.
    """

    dropped = 0

    async def connect(self, servers: list[str], **options: Any) -> None:
        """Wait for a server that never answers."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            type(self).dropped += 1
            raise ConnectionRefusedError from None


@pytest.mark.virtual_time
async def test_close_ends_when_a_connecting_client_drops_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that gives up on a server ends, whatever nats-py made of the cancellation."""
    monkeypatch.setattr(_DeafClient, "dropped", 0)
    connection = Connection(
        NatsSettings(),
        "cli",
        SystemClock(),
        BusMetrics(CollectorRegistry()),
        Readiness(),
        new_client=cast("Callable[[str], GatedClient]", lambda _: _DeafClient(MemoryNats())),
    )
    opening = asyncio.create_task(connection.open())
    await asyncio.sleep(1.0)

    opening.cancel()
    async with asyncio.timeout(60.0):
        await asyncio.wait({opening})

    assert opening.cancelled()
    assert _DeafClient.dropped >= 1
