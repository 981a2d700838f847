"""A flood of what is said of one key: the store is read a bounded number of times."""

from __future__ import annotations

import asyncio

import pytest

from integration.values import inventory
from support.reading import Reader
from topobus.bus.bus import Bus, Change
from topobus.bus.feeds import key_feed
from topobus.bus.streams.jetstream import JetStream, StoredMessage
from topobus.formats.messages.catalogue import INVENTORY
from topobus.values.device import Inventory

# In memory only: there, time goes by only when nothing is to be done,
# so that the bound is a number.
pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

_KEY = {"node": "n1", "device_class": "ssd"}
_HINTS = INVENTORY.subject(**_KEY)


def _generations(items: list[Change[Inventory]]) -> list[int]:
    return [item.value.generation for item in items if item.value is not None]


async def test_key_is_read_some_times_a_second_when_somebody_floods_the_word(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of forged words costs the store a bounded number of reads, and the next true one is
    heard all the same.
    """
    reads = 0
    read = JetStream.last_message

    async def count(self: JetStream, stream: str, subject: str) -> StoredMessage | None:
        nonlocal reads
        reads += 1
        return await read(self, stream, subject)

    monkeypatch.setattr(JetStream, "last_message", count)
    async with Reader(bus.watch(INVENTORY, **_KEY)) as reader:
        await reader.until(lambda items: len(items) == 1)
        began = asyncio.get_running_loop().time()
        for _ in range(1000):
            await bus._connection.publish(_HINTS)
            # Each is heard before the next is sent, so that nothing but the
            # bound keeps it from being read for.
            await bus._connection.barrier()
        elapsed_s = asyncio.get_running_loop().time() - began
        during = reads
        await bus.put(INVENTORY, inventory(2, device_class="ssd"), **_KEY)
        items = await reader.until(lambda items: 2 in _generations(items))

    # In virtual time nothing goes by meanwhile; a real server on a busy machine takes long for a
    # thousand words, and as many more may be read for.
    assert during <= 2 + key_feed._BURST + key_feed._READS_PER_S * (1 + elapsed_s)
    assert _generations(items) == [2]
