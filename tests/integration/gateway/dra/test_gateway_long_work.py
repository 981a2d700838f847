"""A device service that needs longer than kubelet waits: one operation from the first ask to the
last, however often kubelet calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest
from topobus.formats.messages.sandbox_messages import Accepted
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.edits import ContainerEdits

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

FPGA = ClaimReference(name="kernel", uid="u-kernel", drivers=(DRIVER,))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A card whose region takes long to be programmed, and a claim for it."""
    async with make_rig(nats_server.url, classes=("fpga",)) as made:
        await made.plane.show("fpga", device("fpga-0", 0))
        await made.plane.store(claim("kernel", FPGA.uid, "fpga-0"))
        yield made


async def prepare(rig: Rig) -> str:
    """Prepare the claim as kubelet does; gives its error."""
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([FPGA])
    return prepared.error


async def test_claim_is_prepared_by_one_operation_when_the_service_needs_long(rig: Rig) -> None:
    """Kubelet's call asks again for the claim's whole time and then says what takes so long.

    Its next call goes on with the same operation.
    """
    is_done = False

    async def work(_: PrepareRequest) -> PrepareReply:
        if is_done:
            return PrepareReply(result=Prepared(edits={"fpga-0": ContainerEdits(env={"KERNEL": "loaded"})}))
        return PrepareReply(result=Accepted(retry_after_s=0.05, limit_s=60.0, what="programming the region of fpga-0"))

    rig.plane.prepare_by = work
    deadlines = msgspec.structs.replace(rig.settings.deadlines, claim_s=1.5)
    async with rig.kubelet, rig.gateway(deadlines=deadlines):
        error = await prepare(rig)
        asked = len(rig.plane.asks.requests("prepare"))
        is_done = True
        again = await prepare(rig)

    assert "the fpga service is still at work (programming the region of fpga-0), for at most 60 s more" in error
    assert (again, asked >= 2) == ("", True)
    assert len({request.op_id for request in rig.plane.asks.requests("prepare")}) == 1
