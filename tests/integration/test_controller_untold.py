"""A controller that cannot even write down what is wrong with a claim: that is a write as any other, waited out, and nobody else's trouble."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from integration.test_controller import SETTINGS, Home, claim, home, recorded  # noqa: F401  # fixtures
from topobus.contracts.messages import ApiObject
from topobus.controller.service import serve
from topobus.domain.errors import PeerUnavailable
from topobus.runtime.bus import Bus
from topobus.runtime.clock import SystemClock
from topobus.runtime.config import NatsSettings
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration


class DeafBus:
    """A real bus that does not confirm the first writes of one object."""

    def __init__(self, bus: Bus, name: str, times: int) -> None:
        self._bus = bus
        self._name = name
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def compare_and_set(self, what: Any, value: Any, revision: int, **parts: str) -> Any:
        """Keep silent when it is the object's turn."""
        if parts.get("name") == self._name and self.left:
            self.left -= 1
            raise PeerUnavailable("no answer to the write")
        return await self._bus.compare_and_set(what, value, revision, **parts)


async def test_controller_goes_on_when_it_cannot_write_what_is_wrong(home: Home, nats_server: NatsServer) -> None:  # noqa: F811
    """A malformed claim whose condition could not be written is told later; the controller lives, and other claims are served."""
    bad = ApiObject(
        api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "bad", "uid": "u"}, spec={"devices": {"requests": 5}}
    )
    await home.apply(bad)
    async with Bus.session(NatsSettings(url=nats_server.url), name="controller") as bus:
        deaf: Any = DeafBus(bus, "bad", 2)
        runtime = Runtime(
            name="controller", node="central", bus=deaf, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry()
        )
        task = asyncio.create_task(serve(SETTINGS, runtime))
        try:
            told = asyncio.create_task(home.told("bad", "Malformed"))
            await asyncio.wait({told, task}, return_when=asyncio.FIRST_COMPLETED)
            assert not task.done(), task.exception()
            await home.apply(claim("good"))
            assert len(await home.allocated("good")) == 1
        finally:
            told.cancel()
            task.cancel()
            await asyncio.wait({task, told})

    assert "requests" in told.result()
    assert deaf.left == 0
