"""Plans that come in masses: pods are scheduled and plans for one node answered as if they were not
there.

Counted in answers, not in time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from support.scheduling_home import Place, pod
from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceReply, PlaceRequest
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanReply, PlanRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable
from topobus.values.machine import Machine
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

_SLOW = "n3"
_COUNT = 300
_REFUSED = Refusal(reasons=(Reason(code="numa-capacity", message="full"),))


def plan(number: int, *, node: str = "") -> PlanRequest:
    """Ask where a pod would go."""
    owner = Owner(kind=OwnerKind.POD, name=f"flood-{number}", uid=f"flood-{number}")
    containers = (ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=1),)),)
    return PlanRequest(
        op_id=f"flood-{number}-{node}", pod=PodRequest(owner=owner, containers=containers), node=node, is_dry_run=True
    )


async def test_pods_are_scheduled_when_one_user_floods_the_controller_with_plans(
    served: Place, nats_server: NatsServer
) -> None:
    """Hundreds of plans that wait for a slow node keep no pod from its node and no plan for one
    node from its answer.

    Those without room are told when to ask again.
    """
    held = asyncio.Event()

    async def slow_for_plans(request: PlaceRequest) -> PlaceReply:
        if request.pod.owner.name.startswith("flood"):
            held.set()
            await asyncio.Event().wait()
        return PlaceReply(decision_id="d", node=_SLOW, result=_REFUSED)

    async def ask(number: int) -> PlanReply | None:
        with suppress(PeerUnavailable):
            return await flooding.ask(catalogue.PLAN, plan(number), node=CLUSTER, timeout_s=3600)
        return None

    await served.apply(pod("before", gpus=1))
    await served.scheduled("before")
    (machine,) = [entry.value for entry in await served.bus.list(catalogue.MACHINE, node="n1")]
    settings = NatsSettings(url=nats_server.url)
    async with Bus.session(settings, name="topology") as slow, Bus.session(settings, name="topobus-cli") as flooding:
        await slow.answer(catalogue.PLACE, slow_for_plans, node=_SLOW)
        await served.bus.put(
            catalogue.MACHINE, Machine(node=_SLOW, numa_nodes=machine.numa_nodes, cpus=machine.cpus), node=_SLOW
        )
        # The controller knows the slow node as soon as it asks it.
        is_held = asyncio.create_task(held.wait())
        while not is_held.done():
            first = asyncio.create_task(ask(1000))
            await asyncio.wait({first, is_held}, return_when=asyncio.FIRST_COMPLETED)
        flood = [asyncio.create_task(ask(number)) for number in range(_COUNT)]
        # One runs already, three and those that wait have room.
        refused = _COUNT - 3 - 256
        while sum(task.done() for task in flood) < refused:
            await asyncio.wait([task for task in flood if not task.done()], return_when=asyncio.FIRST_COMPLETED)

        cheap = await served.bus.ask(catalogue.PLAN, plan(2000, node="n1"), node=CLUSTER)
        await served.apply(pod("wanted", gpus=1))
        node = await served.scheduled("wanted")
        done = [task.result() for task in flood if task.done()]

        assert cheap.chosen is not None
        assert node in {"n1", "n2"}
        # Not one that was begun has ended yet: the pod waited for none of them.
        assert all(reply is not None and reply.retry_after_s >= 1 for reply in done)
        assert len(done) == refused
        for task in (first, *flood):
            task.cancel()
        await asyncio.wait({first, *flood})
        await slow.stop_answering()
