"""A device service that does not answer: its devices are allocated to nobody, what is held stays
held, and its first answer ends that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.controller_home import NODE, Home, claim
from support.controllers import SETTINGS, controller
from topobus.engine.health.silence import SilenceSettings
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import HintsReply, HintsRequest
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

# A length that nothing else waits for, so that the clock follows the looks alone.
LOOKS = SilenceSettings(every_s=0.97)


@pytest_asyncio.fixture
async def watched(home: Home, nats_server: NatsServer) -> AsyncIterator[Home]:
    """The demo node with a controller, and no device service: time passes from look to look."""
    clock = ManualClock()
    settings = msgspec.structs.replace(SETTINGS, silence=LOOKS)
    async with controller(nats_server.url, settings, clock=clock), clock.ticking(LOOKS.every_s):
        yield home


async def _hints(request: HintsRequest) -> HintsReply:
    raise AssertionError("nobody asks for hints here")


async def test_claim_waits_for_a_silent_service_and_is_served_when_it_speaks(watched: Home) -> None:
    """The reason says that the service does not answer.

    As soon as it does, the claim gets its devices.
    """
    # More than there are: it is told again whenever the reasons
    # change, until silence is among them.
    await watched.put(claim("probe", count=9))
    await watched.until_claim(
        "probe",
        lambda api_object: (
            api_object is not None
            and "service does not answer" in str(api_object.status.get("conditions", [{}])[0].get("message"))
        ),
    )
    await watched.put(claim("job"))
    message = await watched.until_reason("job", "DoesNotFit")

    await watched.bus.answer(catalogue.HINT, _hints, node=NODE, device_class="gpu")

    assert "8 devices: their service does not answer since" in message
    assert len(await watched.results("job")) == 1
