"""A node whose topology service is asked for more plans than it can make: what is cheap does not
wait for them.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from support.card_node import CARDS, MACHINE
from support.real_topology import real_topology
from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.placement import place
from topobus.formats.messages.catalogue import PLACE, RELEASE
from topobus.formats.messages.messages import PlaceRequest, ReleaseRequest
from topobus.topology import ask_handlers
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

# Ends a test that waits for what never comes; nothing is measured with it.
_LIMIT_S = 120.0
_FLOOD = 40


class _SlowPlans:
    """Plans that take as long as the test says: each waits for a permit, in its thread."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._permits = threading.Semaphore(0)

    def permit(self, count: int = 1) -> None:
        """Let so many plans come to an end."""
        self.began.clear()
        self._permits.release(count)

    def place(self, *arguments: Any, **named: Any) -> Any:
        """Plan, when there is a permit."""
        self._loop.call_soon_threadsafe(self.began.set)
        assert self._permits.acquire(timeout=_LIMIT_S)
        return place(*arguments, **named)


def _request(name: str) -> PlaceRequest:
    owner = Owner(kind=OwnerKind.POD, namespace="default", name=name, uid=f"uid-{name}")
    containers = (ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=1),)),)
    return PlaceRequest(op_id=f"op-{name}", pod=PodRequest(owner=owner, containers=containers))


async def test_release_waits_for_two_plans_at_most_when_many_are_asked_for(
    bus: Bus, topologies: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of plans, however long each of them takes, holds a release up for the one that is
    being made and one more.
    """
    node = MACHINE.node
    await topologies.enter_async_context(real_topology(bus, MACHINE, [CARDS]))
    first = await bus.ask(PLACE, _request("first"), timeout_s=_LIMIT_S, node=node)
    plans = _SlowPlans()
    monkeypatch.setattr(ask_handlers, "place", plans.place)
    flood = [
        asyncio.create_task(bus.ask(PLACE, _request(f"flood-{number}"), timeout_s=_LIMIT_S, node=node))
        for number in range(_FLOOD)
    ]
    try:
        await asyncio.wait_for(plans.began.wait(), _LIMIT_S)
        # Answered behind all of the flood: it has arrived.
        await bus.is_answered(PLACE, timeout_s=_LIMIT_S, node=node)
        released = ReleaseRequest(op_id="op-release", owner=_request("first").pod.owner)
        release = asyncio.create_task(bus.ask(RELEASE, released, timeout_s=_LIMIT_S, node=node))
        await bus.is_answered(RELEASE, timeout_s=_LIMIT_S, node=node)
        permits = 0
        while not release.done() and permits < _FLOOD:
            plans.permit()
            permits += 1
            began = asyncio.create_task(plans.began.wait())
            await asyncio.wait({release, began}, timeout=_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            began.cancel()
        reply = await asyncio.wait_for(release, _LIMIT_S)
    finally:
        plans.permit(_FLOOD)
        await asyncio.gather(*flood, return_exceptions=True)

    assert permits <= 2
    assert reply.devices == first.result.containers[0].devices  # type: ignore[union-attr]  # a placement: there is a card for it
