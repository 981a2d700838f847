"""A gateway in a cluster writes what became of its claims into their status, through the API
server's troubles and its own death at every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.cluster_slices import allocated
from support.gateway_rig import Rig, make_rig
from support.lives import GatewayLives
from support.looks import next_look
from support.mortal_gateway import STATUS
from support.node_plane import device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER, group_of_class

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """A gateway that knows the cluster, and two GPUs."""
    async with make_rig(nats_server.url) as made:
        made.join(server)
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        yield made


def devices_of(server: ApiServerSimulator, name: str) -> list[dict[str, Any]]:
    """What stands in a claim's status of all drivers."""
    (claim,) = (claim for claim in server.objects("ResourceClaim") if claim["metadata"]["name"] == name)
    return list(claim.get("status", {}).get("devices") or [])


def said(server: ApiServerSimulator, name: str) -> list[tuple[str, str, str]]:
    """What stands in a claim's status: device, whether it is ready, why."""
    (claim,) = (claim for claim in server.objects("ResourceClaim") if claim["metadata"]["name"] == name)
    entries: list[dict[str, Any]] = claim.get("status", {}).get("devices") or []
    return [(entry["device"], entry["conditions"][0]["status"], entry["conditions"][0]["reason"]) for entry in entries]


async def until_said(server: ApiServerSimulator, name: str, *devices: str) -> None:
    """Wait until exactly these devices are told as prepared."""
    await server.until(
        lambda: said(server, name) == [(device, "True", "Prepared") for device in devices], what=f"the status of {name}"
    )


async def test_status_comes_with_the_preparation_and_goes_with_it(rig: Rig, server: ApiServerSimulator) -> None:
    """Each device of the claim has an entry, written under its class's name, until it is undone.

    Kubelet's answer does not wait for it.
    """
    training = allocated(server, "training", "gpu-0", "gpu-1")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([training])
        await until_said(server, "training", "gpu-0", "gpu-1")
        await rig.kubelet.unprepare_claims([training])
        await until_said(server, "training")

    patches = [request for request in server.requests if request.path.endswith("/training/status")]
    assert {(request.method, request.query["fieldManager"], request.code) for request in patches} == {
        ("PATCH", group_of_class("gpu"), 200)
    }


async def test_status_comes_when_a_client_wrote_opaque_parameters_in_an_order_of_its_own(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The server takes its own sorting of the keys for a change of the allocation.

    A JSON patch gets past it, keeps what others say, and takes away what is no more.
    """
    training = allocated(server, "training", "gpu-0")
    (stored,) = server.objects("ResourceClaim")
    opaque = {"driver": DRIVER, "parameters": {"kind": "GpuConfig", "apiVersion": "v1"}}
    stored["status"]["allocation"]["devices"]["config"] = [{"source": "FromClaim", "requests": ["r"], "opaque": opaque}]
    of_others = {"driver": "fabric.example.com", "pool": "p", "device": "d"}
    stored["status"]["allocation"]["devices"]["results"].append({"request": "r", **of_others})
    stored["status"]["devices"] = [of_others]
    server.put(stored)
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([training])
        await server.until(lambda: len(devices_of(server, "training")) == 2, what="two devices")
        prepared = devices_of(server, "training")
        await rig.kubelet.unprepare_claims([training])
        await server.until(lambda: len(devices_of(server, "training")) == 1, what="one device")

    assert [device["driver"] for device in prepared] == ["fabric.example.com", DRIVER]
    assert devices_of(server, "training") == [of_others]


async def test_preparation_waits_for_no_status_when_the_server_is_troubled(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """Kubelet has its answer.

    The status follows when the API server takes it, and readiness says why it is missing meanwhile.
    """
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        server.refuse("PATCH", "resourceclaims", code=500, times=3)
        (prepared,) = await rig.kubelet.prepare_claims([training])
        report = await rig.readiness.until(lambda report: "not written" in report.get("claim-status", ""))
        await until_said(server, "training", "gpu-0")
        healed = await rig.readiness.until(lambda report: report.get("claim-status") == "ready")

    assert (prepared.error, report["claim-status"].startswith("ready: ")) == ("", True)
    assert healed["claim-status"] == "ready"


async def test_server_that_keeps_no_status_is_named(rig: Rig, server: ApiServerSimulator) -> None:
    """An older server takes the write and drops the field: readiness says which feature is off."""
    server.set_drops({"ResourceClaim": ["status.devices"]})
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.prepare_claims([training])
        report = await rig.readiness.until(lambda report: "not written" in report.get("claim-status", ""))

    assert "DRAResourceClaimDeviceStatus is off" in report["claim-status"]


async def test_claim_that_is_deleted_meanwhile_is_no_trouble(rig: Rig, server: ApiServerSimulator) -> None:
    """Force-deleted between preparation and write: nothing is left to be said."""
    training = allocated(server, "training", "gpu-0")
    async with rig.gateway(), rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        server.refuse("PATCH", "resourceclaims", code=500)
        await rig.kubelet.prepare_claims([training])
        server.remove("ResourceClaim", "training")
        await server.until(
            lambda: [request for request in server.requests if request.method == "PATCH" and request.code == 404],
            what="a look",
        )
        report = await rig.readiness.until(lambda report: report.get("claim-status") == "ready")

    assert report["claim-status"] == "ready"


async def prepare_it(rig: Rig, reference: ClaimReference, lives: GatewayLives | None = None) -> None:
    """Prepare as kubelet does: again while it fails, until the gateway has died of it."""
    async with asyncio.timeout(60):
        while any(claim.error for claim in await rig.kubelet.prepare_claims([reference])):
            if lives and lives.is_dead:
                return
            await next_look()


async def undo_it(rig: Rig, reference: ClaimReference, lives: GatewayLives) -> None:
    """Unprepare as kubelet does: again while it fails, until the gateway has died of it."""
    async with asyncio.timeout(60):
        while await rig.kubelet.unprepare_claims([reference]) and not lives.is_dead:
            await next_look()


WRITES = ["before save", "after save", "before apply_device_status", "after apply_device_status"]
LAST = ["before save", "after save"]


@pytest.mark.parametrize("step", range(1, len(WRITES) + 1), ids=WRITES)
async def test_status_comes_when_the_gateway_is_killed_while_it_writes(
    rig: Rig, server: ApiServerSimulator, lives: GatewayLives, step: int
) -> None:
    """SIGKILL before and after the write to disk and to the API server: the next process says what
    is.
    """
    reference = allocated(server, "training", "gpu-0")
    await lives.start()
    async with rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        lives.doom(STATUS, step)
        await prepare_it(rig, reference, lives)
        death = await lives.death()
        await lives.start()
        await until_said(server, "training", "gpu-0")

    assert death == f"{step} {WRITES[step - 1]}"


@pytest.mark.parametrize("step", range(1, len(WRITES + LAST) + 1))
async def test_status_goes_when_the_gateway_is_killed_while_it_takes_it_away(
    rig: Rig, server: ApiServerSimulator, lives: GatewayLives, step: int
) -> None:
    """SIGKILL at each write, to that which forgets the claim: the next process takes away what is
    no more.
    """
    reference = allocated(server, "training", "gpu-0")
    await lives.start()
    async with rig.kubelet:
        await rig.kubelet.wait_for_driver(DRIVER)
        lives.doom(STATUS, 0)
        await prepare_it(rig, reference)
        await lives.until_step(f"{len(WRITES)} {WRITES[-1]}")
        lives.doom(STATUS, step)
        await undo_it(rig, reference, lives)
        death = await lives.death()
        await lives.start()
        await until_said(server, "training")

    assert death == f"{step} {(WRITES + LAST)[step - 1]}"
