"""When the controller asks the device services of its nodes whether they are there: by need, for
each question costs the hub two messages.
"""

from __future__ import annotations

from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from topobus.bus.bus import Bus
from topobus.controller.standalone.silent_services import SilentServices
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.health.silence import Answered, SilenceSettings, Silent, SilentBecause
from topobus.formats.messages.messages import ApiObject
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.clock import ManualClock
from topobus.values.device import Inventory

SETTINGS = SilenceSettings(every_s=3.0)
CLAIM = ObjectKey("resourceclaim", "default", "job")
POD = ObjectKey("pod", "default", "job")


class Peers:
    """A bus with the services of three nodes, which answer or not; counts who was asked."""

    is_connected = True

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.asked: list[str] = []

    async def is_answered(self, _: object, *, node: str, **__: object) -> Answered | Silent:
        """Answer for a service."""
        self.asked.append(node)
        return Silent(because=SilentBecause.NOBODY) if node in self.away else Answered()

    def take(self) -> list[str]:
        """Give who was asked since the last time."""
        asked, self.asked = sorted(self.asked), []
        return asked


class World:
    """Three nodes with two classes each, and the looks at them under the test's hand."""

    def __init__(self) -> None:
        self.peers, self.clock, self.state = Peers(), ManualClock(), StandaloneState()
        for node in ("n1", "n2", "n3"):
            for device_class in ("gpu", "nic"):
                self.state.put_inventory(Inventory(node=node, device_class=device_class, generation=1))
        runtime = Runtime(
            name="controller",
            node="central",
            bus=cast("Bus", self.peers),
            clock=self.clock,
            readiness=Readiness(),
            registry=CollectorRegistry(),
        )
        self.services = SilentServices(SETTINGS, 8, runtime, self.state, lambda: None, self.state.has_waiting)

    async def look(self, seconds: int) -> list[str]:
        """Let seconds pass, with a look at each of the controller's ticks.

        Gives which nodes were asked.
        """
        for _ in range(0, seconds, 3):
            await self.services.check()
            self.clock.advance(3.01)
        return self.peers.take()

    def put(self, key: ObjectKey, *, is_done: bool) -> None:
        """Store a claim or a pod that waits, or does not."""
        if key is CLAIM:
            value = ApiObject(
                api_version="v1",
                kind="ResourceClaim",
                metadata=_metadata(key),
                status={"allocation": {"devices": {}}} if is_done else {},
            )
        else:
            status = {"conditions": [{"type": "PodScheduled", "status": "True"}]} if is_done else {}
            value = ApiObject(
                api_version="v1", kind="Pod", metadata=_metadata(key), spec={"nodeName": "n1"}, status=status
            )
        self.state.put_object(key, Stored(1, value))


def _metadata(key: ObjectKey) -> dict[str, object]:
    return {"name": key.name, "namespace": key.namespace}


@pytest.fixture
def world() -> World:
    """What is tested, with nothing that waits."""
    return World()


async def test_services_are_asked_once_when_nothing_waits(world: World) -> None:
    """Each service is heard once; after that a fleet at rest hears nothing of the controller."""
    first = await world.look(3)
    then = await world.look(600)

    assert first == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert then == []


@pytest.mark.parametrize("key", [CLAIM, POD], ids=["claim", "pod"])
async def test_services_are_asked_while_something_waits_for_devices(world: World, key: ObjectKey) -> None:
    """A claim without devices or a pod without a node makes the controller look, every third pause,
    until it is served.
    """
    await world.look(3)
    world.put(key, is_done=False)
    waiting = await world.look(18)
    world.put(key, is_done=True)
    served = await world.look(60)

    assert waiting == ["n1"] * 4 + ["n2"] * 4 + ["n3"] * 4
    assert served == []


async def test_silent_node_is_known_soon_when_a_claim_comes_after_a_long_rest(world: World) -> None:
    """A service that died while nobody looked is silent after the pauses that its judgement takes,
    and is asked until it answers, also when nothing waits any more.
    """
    await world.look(3)
    world.peers.away = {"n2"}
    await world.look(600)
    world.put(CLAIM, is_done=False)
    await world.look(12)
    silent = set(world.state.silent)
    world.put(CLAIM, is_done=True)
    asked = set(await world.look(9))
    world.peers.away = set()
    await world.look(3)

    assert silent == {("n2", "gpu"), ("n2", "nic")}
    assert asked == {"n2"}
    assert world.state.silent == {}


async def test_new_node_is_asked_when_nothing_waits(world: World) -> None:
    """A node that comes is heard once, by itself."""
    await world.look(3)
    world.state.put_inventory(Inventory(node="n4", device_class="gpu", generation=1))

    assert await world.look(30) == ["n4"]
