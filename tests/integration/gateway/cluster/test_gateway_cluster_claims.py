"""The gateway's claims in a cluster: read from the API server through its troubles, and let go when
the cluster no longer knows them.
"""

from __future__ import annotations

import msgspec
import pytest

from support.cluster_slices import allocated
from support.gateway_rig import Rig
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.dra_names import DRIVER
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_claim_is_read_from_the_api_server_when_kubelet_prepares_it(rig: Rig, server: ApiServerSimulator) -> None:
    """The allocation is the cluster's.

    A claim of the same name with another uid is refused, and so is one that is not there.
    """
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([training])
        (replaced,) = await rig.kubelet.prepare_claims([msgspec.structs.replace(training, uid="another")])
        (missing,) = await rig.kubelet.prepare_claims([msgspec.structs.replace(training, name="none", uid="none")])

    assert ([claim_device.device for claim_device in prepared.devices], prepared.error) == (["gpu-0"], "")
    assert "has uid" in replaced.error
    assert "does not exist" in missing.error


async def test_claim_is_tried_again_when_the_api_server_is_troubled_for_a_moment(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Errors, too many requests: kubelet gets its answer in one call, for its own next try comes
    after a minute.

    What lasts longer is told.
    """
    training = allocated(server, "training", "gpu-0")
    patient = msgspec.structs.replace(rig.settings.deadlines, claim_retry_s=30.0)
    async with rig.gateway(deadlines=patient), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        server.refuse("GET", "resourceclaims", code=500, times=2)
        server.refuse("GET", "resourceclaims", code=429, retry_after_s=1)
        (prepared,) = await rig.kubelet.prepare_claims([training])
    async with rig.gateway(deadlines=msgspec.structs.replace(patient, claim_retry_s=0.0)), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        server.refuse("GET", "resourceclaims", code=500)
        (failed,) = await rig.kubelet.prepare_claims([allocated(server, "other", "gpu-1")])

    assert prepared.error == ""
    assert [request.code for request in server.requests if request.path.endswith("/resourceclaims/training")] == [
        500,
        500,
        429,
        200,
    ]
    assert "API server answered 500" in failed.error


async def test_device_is_free_for_the_next_claim_when_the_scheduler_took_the_first_one_back(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Unprepared and deallocated, a claim no longer stands in the ledger's way, without waiting for
    a period.
    """
    first = allocated(server, "first", "gpu-0")
    async with rig.gateway(deadlines=msgspec.structs.replace(rig.settings.deadlines, reconcile_s=600.0)), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([first])
        await rig.kubelet.unprepare_claims([first])
        second = allocated(server, "second", "gpu-0")

        (early,) = await rig.kubelet.prepare_claims([second])
        server.put({**server.objects("ResourceClaim")[0], "status": {}})
        (late,) = await rig.kubelet.prepare_claims([second])

    assert "first" in early.error
    assert late.error == ""


async def test_claim_is_released_when_it_was_deallocated_elsewhere(rig: Rig, server: ApiServerSimulator) -> None:
    """A claim of the ledger that the cluster no longer knows is let go by the periodic look."""
    gone = Owner(kind=OwnerKind.CLAIM, name="gone", uid="u-gone")
    kept = allocated(server, "kept", "gpu-1")
    await rig.plane.hold(gone, gpu=("gpu-0",))
    await rig.plane.hold(Owner(kind=OwnerKind.CLAIM, name="kept", uid=kept.uid), gpu=("gpu-1",))
    async with rig.gateway():
        released = await rig.plane.asks.wait_for("released")

    assert released.owner == gone
    assert [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()] == ["kept"]


async def test_unprepare_succeeds_when_the_api_server_is_away(rig: Rig, server: ApiServerSimulator) -> None:
    """A pod can end without the API server; its devices are let go when it is back and says so."""
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([training])
        await server.stop()

        errors = await rig.kubelet.unprepare_claims([training])
        held = len(rig.plane.ledger.allocations)
        server.remove("ResourceClaim", "training")
        await server.start()
        await rig.plane.asks.wait_for("released")

    assert (errors, held) == ({}, 1)
