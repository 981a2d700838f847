"""What topology waits for before it decides an adoption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.alignment_nodes import dgx_facts
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.process.readiness import Readiness
from topobus.topology.node_inputs import NodeInputs
from topobus.values.view import NodeAlignment

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NODE = "demo-node"


@pytest_asyncio.fixture
async def inputs(bus: Bus) -> AsyncIterator[NodeInputs]:
    """The inputs of a node whose device services have published nothing yet."""
    made = NodeInputs(bus, NodeAlignment(node=NODE), Readiness())
    watching = asyncio.create_task(made.watch())
    yield made
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_adoption_waits_for_the_inventory_when_the_gateway_is_ahead(bus: Bus, inputs: NodeInputs) -> None:
    """A device that kubelet was offered is known by the time of the decision."""
    _, inventories = dgx_facts()
    waiting = asyncio.create_task(inputs.wait_listed({"gpu": ("gpu-0", "gpu-7")}, {}))
    await asyncio.wait({waiting}, timeout=0.2)
    waits = not waiting.done()

    await bus.put(INVENTORY, inventories["gpu"], node=NODE, device_class="gpu")
    await waiting

    assert waits
    assert "gpu" in inputs.inventories


async def test_adoption_is_decided_after_a_moment_when_no_inventory_lists_its_device(
    bus: Bus, inputs: NodeInputs
) -> None:
    """A device that does not exist is refused, with its reason, before the gateway gives up."""
    _, inventories = dgx_facts()
    await bus.put(INVENTORY, inventories["gpu"], node=NODE, device_class="gpu")
    loop = asyncio.get_running_loop()
    began = loop.time()

    await inputs.wait_listed({"gpu": ("gpu-99",), "cpu": ("cpu-0",)})

    assert loop.time() - began >= 0.29


async def test_adoption_waits_for_nothing_when_it_takes_cpus_alone(inputs: NodeInputs) -> None:
    """CPUs are the machine's, whatever lists them: the call ends at its first step."""
    with pytest.raises(StopIteration):
        inputs.wait_listed({"cpu": ("cpu-0",)}, {}).send(None)
