"""A controller that cannot even write down what is wrong with a claim: that is a write as any
other, waited out, and nobody else's trouble.
"""

from __future__ import annotations

import asyncio

import pytest

from lab.memory_nats.fates import Fate, FatedBus, Fates, Refused, Step
from support.controller_home import Home, claim
from support.controllers import SETTINGS, runtime_on
from topobus.bus.bus import Bus
from topobus.controller.standalone.service import serve
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]


async def test_controller_goes_on_when_it_cannot_write_what_is_wrong(home: Home, nats_server: NatsServer) -> None:
    """A malformed claim whose condition could not be written is told later.

    The controller lives, and other claims are served.
    """
    bad = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "bad", "uid": "u"},
        spec={"devices": {"requests": 5}},
    )
    await home.put(bad)
    async with Bus.session(NatsSettings(url=nats_server.url), name="controller") as bus:
        refused: list[Step] = []

        def refuse_twice(step: Step) -> Fate | None:
            if step.operation != "compare_and_set" or step.parts.get("name") != "bad" or len(refused) == 2:
                return None
            refused.append(step)
            return Refused("no answer to the write")

        deaf = FatedBus(bus, Fates(refuse_twice))
        runtime = runtime_on(deaf)
        task = asyncio.create_task(serve(SETTINGS, runtime))
        try:
            waiting = asyncio.create_task(home.until_reason("bad", "Malformed"))
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            assert not task.done(), task.exception()
            await home.put(claim("good"))
            assert len(await home.results("good")) == 1
        finally:
            waiting.cancel()
            task.cancel()
            await asyncio.wait({task, waiting})

    assert "requests" in waiting.result()
    assert len(refused) == 2
