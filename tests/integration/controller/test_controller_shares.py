"""Shares of GPUs stand-alone: the controller gives four quarters, holds them on the node with their
amounts, and says what is short for the fifth.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.controller_home import NODE, Home, claim
from support.controllers import controller
from support.shared_devices import GIB
from topobus.devicekit.sharing.shared_devices import SharedPool, with_sharing
from topobus.formats.messages import catalogue
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.pools import Condition

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

ONE = 'device.allowMultipleAllocations && device.attributes["topobus.dev"].tenant == "one"'


async def share_one_gpu(home: Home) -> Device:
    """Have the operator of the demo node share one GPU of 80 GiB; the others stay whole."""
    inventory = next(inventory for inventory in home.inventories if inventory.device_class == "gpu")
    first, *others = inventory.devices
    whole = structs.replace(
        first, attributes={**first.attributes, "tenant": "one"}, pool="gpu-shared", capacity={"memory": 80 * GIB}
    )
    pool = SharedPool(name="gpu-shared", where=(Condition(field="attributes.tenant", equals="one"),), replicas=4)
    (shared,) = with_sharing([whole], [pool])
    changed: Inventory = structs.replace(inventory, generation=inventory.generation + 1, devices=(shared, *others))
    revision = await home.bus.put(catalogue.INVENTORY, changed, node=NODE, device_class="gpu")
    await home.topology.wait_until_heard(catalogue.INVENTORY, revision)
    return shared


async def test_four_claims_share_a_gpu_and_the_fifth_is_told_what_is_short(home: Home, nats_server: NatsServer) -> None:
    """The ledger has each claim's amounts.

    The fifth waits with the numbers, and has its quarter when another one goes.
    """
    shared = await share_one_gpu(home)
    async with controller(nats_server.url):
        for name in "abcd":
            await home.put(claim(name, expression=ONE))
        results = [await home.results(name) for name in "abcd"]
        amounts = [
            holding.shares["gpu"][shared.name].amounts
            for allocation in home.topology.ledger.allocations.values()
            for holding in allocation.holdings
        ]
        await home.put(claim("e", expression=ONE))
        refused = await home.until_reason("e", "DoesNotFit")
        await home.delete("resourceclaim", "b")
        late = await home.results("e")

    assert [[(granted["device"], granted["consumedCapacity"]["memory"]) for granted in given] for given in results] == [
        [(shared.name, "20Gi")]
    ] * 4
    assert amounts == [{"memory": 20 * GIB, "shares": 1}] * 4
    assert "memory: 20Gi wanted, 0 left of 80Gi" in refused
    assert shared.name in refused
    assert [granted["device"] for granted in late] == [shared.name]
