"""What the gateway counts of claims: how many are prepared, how each try ended, and that files were
written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.formats.messages.messages import Prepared, PrepareReply, PrepareRequest
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.edits import ContainerEdits
from topobus.values.outcome import Reason, Refusal

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = ClaimReference(name="training", uid="u-training", drivers=(DRIVER,))


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """A node with a GPU, and a claim for it."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        await made.plane.store(claim("training", GPU.uid, "gpu-0"))
        yield made


async def test_claims_are_counted_when_they_are_refused_prepared_and_undone(rig: Rig) -> None:
    """Each end of a try has a line of its own, and the gauge says what is prepared now."""
    is_sick = True

    async def work(_: PrepareRequest) -> PrepareReply:
        if is_sick:
            return PrepareReply(
                result=Refusal(reasons=(Reason(code="driver-failed", message="the card is gone", facts={}),))
            )
        return PrepareReply(result=Prepared(edits={"gpu-0": ContainerEdits(env={"GPU": "0"})}))

    def sample(name: str, **labels: str) -> float:
        return rig.registry.get_sample_value(f"topobus_gateway_{name}", labels) or 0.0

    rig.plane.prepare_by = work
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([GPU])
        when_refused = sample("claim_prepares_total", outcome="refused"), sample("claims_prepared", **{"class": "gpu"})
        is_sick = False
        await rig.kubelet.prepare_claims([GPU])
        when_prepared = (
            sample("claim_prepares_total", outcome="prepared"),
            sample("claims_prepared", **{"class": "gpu"}),
        )
        written = sample("cdi_write_seconds_count", outcome="written")
        await rig.kubelet.unprepare_claims([GPU])
        when_undone = (
            sample("claim_unprepares_total", outcome="unprepared"),
            sample("claims_prepared", **{"class": "gpu"}),
        )
        tries = sample("claim_prepare_seconds_count")

    assert (when_refused, when_prepared, when_undone) == ((1, 0), (1, 1), (1, 0))
    assert (written, tries) == (1, 2)
