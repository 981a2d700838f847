"""Prepared claims that kubelet has forgotten: undone when the API server and kubelet both say so,
never because one of them is silent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

SPEC = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """A GPU, a running kubelet, a gateway that knows the cluster."""
    async with make_rig(nats_server.url, wipe_slices=lambda driver: server.wipe_slices(NODE, driver)) as made:
        await made.plane.show("gpu", device("gpu-0", 0))
        made.join(server)
        made.settings = structs.replace(
            made.settings, deadlines=structs.replace(made.settings.deadlines, forgotten_s=0.1)
        )
        async with made.kubelet:
            yield made


async def prepared_claim(rig: Rig, server: ApiServerSimulator) -> None:
    """Prepare a claim of which no pod is listed: kubelet has lost its checkpoint since."""
    uid = server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": SPEC})["metadata"]["uid"]
    results = [{"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0"}]
    server.put(
        {
            "kind": "ResourceClaim",
            "metadata": {"name": "c"},
            "spec": SPEC,
            "status": {"allocation": {"devices": {"results": results}}},
        }
    )
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([ClaimReference(name="c", uid=uid, drivers=(DRIVER,))])
    assert prepared.error == ""


def claims_on_disk(rig: Rig) -> int:
    """How many claims the checkpoint has."""
    return len(json.loads(Path(rig.settings.checkpoint_path).read_bytes())["entries"])


async def test_forgotten_claim_is_undone_when_the_api_server_has_deallocated_it_and_no_container_has_it(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Nobody will ever ask: after two looks at which both say so the
    device is undone and let go.
    """
    async with rig.gateway():
        await prepared_claim(rig, server)
        server.remove("ResourceClaim", "c")
        await rig.plane.asks.wait_for("unprepare")
        await rig.plane.asks.wait_for("released")


async def test_forgotten_claim_is_undone_when_it_is_deleted_and_reserved_for_no_pod(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """A node lost power, its kubelet's state is older than the claim, and the pod is gone."""
    async with rig.gateway():
        await prepared_claim(rig, server)
        (claim,) = server.objects("ResourceClaim")
        claim["metadata"]["finalizers"] = ["example.com/keep"]
        server.put(claim)
        server.remove("ResourceClaim", "c")
        await rig.plane.asks.wait_for("unprepare")


async def test_forgotten_claim_is_undone_when_its_preparation_was_only_begun(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Power was lost in the middle of it, and kubelet does not ask again."""
    rig.plane.asks.hung.add("prepare")
    rig.settings = structs.replace(
        rig.settings, deadlines=structs.replace(rig.settings.deadlines, prepare_s=0.1, claim_retry_s=0)
    )
    async with rig.gateway():
        with pytest.raises(AssertionError):
            await prepared_claim(rig, server)
        begun = claims_on_disk(rig)
        server.remove("ResourceClaim", "c")
        await rig.plane.asks.wait_for("released")

    assert begun == 1


async def test_forgotten_claim_stays_when_the_api_server_does_not_answer(rig: Rig, server: ApiServerSimulator) -> None:
    """Silence is no evidence: look after look the claim stays prepared."""
    async with rig.gateway():
        await prepared_claim(rig, server)
        server.refuse("GET", "resourceclaims", code=500, times=1000)
        server.remove("ResourceClaim", "c")
        asked = len(server.requests)
        await server.until(
            lambda: (
                sum("resourceclaims/c" in request.path and request.code == 500 for request in server.requests[asked:])
                >= 4
            ),
            what="four looks in vain",
        )

    assert rig.plane.asks.requests("unprepare") == []
    assert claims_on_disk(rig) == 1


async def test_claim_stays_when_it_is_allocated_and_no_container_is_listed(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """A pod whose containers are about to start is not listed with its claim yet."""
    async with rig.gateway():
        await prepared_claim(rig, server)
        asked = len(server.requests)
        await server.until(
            lambda: sum("resourceclaims/c" in request.path for request in server.requests[asked:]) >= 4,
            what="four looks at the claim",
        )

    assert rig.plane.asks.requests("unprepare") == []
    assert claims_on_disk(rig) == 1
