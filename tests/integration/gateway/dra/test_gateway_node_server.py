"""Claims where the node has a server of its own and no API server is named: none is prepared, and
whoever asks is told why.
"""

from __future__ import annotations

import msgspec
import pytest
from structlog.testing import capture_logs

from support.dra_claims import HOLDER, TRAINING, UID, prepare
from support.gateway_rig import Rig
from support.node_plane import claim
from topobus.process.config import NatsSettings
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


def _move_to_own_server(rig: Rig) -> None:
    rig.nats = NatsSettings(url=rig.url, provisioner="topology")
    rig.settings = msgspec.structs.replace(rig.settings, nats=rig.nats)


async def test_gateway_says_where_claims_are_served_when_kubelet_wants_one_that_it_cannot_read(rig: Rig) -> None:
    """At once, for trying again would help nobody; and not what stands in the objects' bucket of
    the same server, which no controller decides on.
    """
    _move_to_own_server(rig)
    patient = msgspec.structs.replace(rig.settings.deadlines, claim_retry_s=30.0)
    with capture_logs() as lines:
        async with rig.kubelet, rig.gateway(deadlines=patient):
            prepared = await prepare(rig)

    (warning,) = [line for line in lines if line["event"] == "claims.unreadable"]
    for said in (prepared.error, f"{warning['error']} ({warning['next_step']})"):
        assert "nats.provisioner is topology" in said
        assert "cluster.mode is off" in said
        assert "TOPOBUS_GATEWAY__CLUSTER__MODE" in said
        assert "use the hub's server" in said
    assert "claim.waits" not in [line["event"] for line in lines]
    assert HOLDER.key not in rig.plane.ledger.allocations


async def test_gateway_warns_of_no_claims_when_no_class_is_offered_by_them(rig: Rig) -> None:
    """Device plugins need none."""
    _move_to_own_server(rig)
    with capture_logs() as lines:
        async with rig.kubelet, rig.gateway(default_exposure="device-plugin"):
            await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=2)

    assert "claims.unreadable" not in [line["event"] for line in lines]


async def test_claim_keeps_its_devices_when_it_is_undone_after_the_node_got_its_own_server(rig: Rig) -> None:
    """It is allocated still, as far as this node can know: whoever deallocates it, at the hub,
    releases them.
    """
    await rig.plane.store(claim("training", UID, "gpu-0"))
    async with rig.kubelet:
        async with rig.gateway():
            prepared = await prepare(rig)
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        _move_to_own_server(rig)
        async with rig.gateway():
            await rig.kubelet.wait_for_driver(DRIVER)
            errors = await rig.kubelet.unprepare_claims([TRAINING])

    held = rig.plane.ledger.allocations[HOLDER.key]
    assert (prepared.error, errors) == ("", {})
    assert [holding.devices for holding in held.holdings] == [{"gpu": ("gpu-0",)}]
    assert not held.is_prepared
