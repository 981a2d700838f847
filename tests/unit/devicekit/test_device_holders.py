"""The holders that a scrape reads from its own thread."""

from __future__ import annotations

import asyncio

from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.formats.messages.catalogue import LEDGER
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

NODE = "n1"
FIRST, SECOND = (Owner(kind=OwnerKind.CLAIM, name=name, uid=name) for name in ("first", "second"))


def ledger(owner: Owner) -> Ledger:
    """A ledger in which a claim holds a GPU."""
    allocation = Allocation(owner=owner, holdings=(Holding(devices={"gpu": ("gpu-0",)}),))
    return Ledger(node=NODE, allocations={owner.key: allocation})


async def test_scrape_has_the_holder_of_its_moment_and_the_former_one_when_the_loop_does_not_turn() -> None:
    """A busy process delays a scrape by its limit and no more."""
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        await bus.provision()
        holders = DeviceHolders(bus, node=NODE, device_class="gpu")
        seen = []
        for owner in (FIRST, SECOND):
            await bus.put(LEDGER, ledger(owner), node=NODE)
            # In the loop's own thread: it cannot turn meanwhile.
            holders.read_from_thread(0.0)
            seen.append(holders.owners("gpu-0"))
            await asyncio.to_thread(holders.read_from_thread, 60.0)
            seen.append(holders.owners("gpu-0"))

    assert seen == [(), (FIRST,), (FIRST,), (SECOND,)]
