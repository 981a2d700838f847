"""Stand-alone claims where the node has a server of its own: the gateway prepares what its relay keeps there, and releases nothing because it is not told of it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from support.dra_claims import HOLDER, TRAINING, UID, prepare
from support.gateway_rig import Rig
from support.node_plane import NODE, claim
from topobus.contracts.catalogue import NODE_CLAIM
from topobus.contracts.messages import ApiObject
from topobus.contracts.node_claim_messages import NodeClaim
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

_PLACE = {"node": NODE, "namespace": "default", "name": "training"}


def _on_own_server(rig: Rig) -> None:
    rig.nats = NatsSettings(url=rig.url, provisioner="topology")
    rig.settings = msgspec.structs.replace(rig.settings, nats=rig.nats)


async def _keep(rig: Rig, value: ApiObject) -> None:
    """Write a claim into the node's bucket as its relay does."""
    uid = value.metadata["uid"]
    async with Bus.session(NatsSettings(url=rig.url), name="relay") as relay:
        await relay.put(
            NODE_CLAIM, NodeClaim(node=NODE, namespace="default", name="training", uid=uid, version="1-x", claim=value), **_PLACE
        )


async def test_gateway_prepares_what_the_nodes_server_has_when_it_is_the_nodes_own(rig: Rig) -> None:
    """Not what stands in the objects' bucket of the same server: there nobody but the hub's controller is a writer to be believed."""
    _on_own_server(rig)
    async with rig.kubelet, rig.gateway():
        absent = await prepare(rig)
        await _keep(rig, claim("training", UID, "gpu-1"))
        prepared = await prepare(rig)

    assert "does not exist at this node's own server yet" in absent.error
    assert prepared.error == ""
    assert [claim_device.device for claim_device in prepared.devices] == ["gpu-1"]


@pytest.mark.parametrize("older", [claim("training", UID), claim("training", "of-before", "gpu-0")], ids=["unallocated", "replaced"])
async def test_gateway_waits_for_the_claim_when_the_nodes_server_is_behind(rig: Rig, older: ApiObject) -> None:
    """Kubelet itself would come back only after a minute: what comes within the claim's patience is prepared by the same call."""
    _on_own_server(rig)
    patient = msgspec.structs.replace(rig.settings.deadlines, claim_retry_s=30.0)
    await _keep(rig, older)
    async with rig.kubelet, rig.gateway(deadlines=patient):
        waiting = asyncio.create_task(prepare(rig))
        await rig.kubelet.wait_for_event("NodePrepareResources")
        await _keep(rig, claim("training", UID, "gpu-0"))
        prepared = await waiting

    assert prepared.error == ""
    assert [claim_device.device for claim_device in prepared.devices] == ["gpu-0"]


async def test_claim_keeps_its_devices_when_it_is_undone_and_the_nodes_server_has_lost_it(rig: Rig) -> None:
    """It is allocated still, as far as this node can know: whoever deallocates it releases them."""
    _on_own_server(rig)
    await _keep(rig, claim("training", UID, "gpu-0"))
    async with rig.kubelet, rig.gateway():
        prepared = await prepare(rig)
        async with Bus.session(NatsSettings(url=rig.url), name="relay") as relay:
            await relay.delete(NODE_CLAIM, **_PLACE)
        again = await prepare(rig)
        errors = await rig.kubelet.unprepare_claims([TRAINING])

    held = rig.plane.ledger.allocations[HOLDER.key]
    assert (prepared.error, again, errors) == ("", prepared, {})
    assert [holding.devices for holding in held.holdings] == [{"gpu": ("gpu-0",)}]
    assert not held.is_prepared
