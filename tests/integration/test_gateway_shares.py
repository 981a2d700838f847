"""Devices that more than one claim is prepared with: admin access, shares of consumable capacity, and what each of them is configured with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.gateway_rig import IMPATIENT, Rig, make_rig
from support.node_plane import NODE, device
from topobus.contracts.messages import ApiObject
from topobus.devicekit.cdi import parse
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference, PreparedClaim

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

DRIVER = "gpu.topobus.dev"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        async with made.kubelet:
            yield made


def result(name: str, request: str = "r", **more: Any) -> dict[str, Any]:
    """One device of an allocation."""
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": name, **more}


async def given(rig: Rig, name: str, *results: dict[str, Any], config: list[dict[str, Any]] | None = None) -> ClaimReference:
    """Store an allocated claim."""
    status = {"allocation": {"devices": {"results": list(results), "config": config or []}}}
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    await rig.plane.store(ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status))
    return ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,))


async def prepare(rig: Rig, reference: ClaimReference) -> PreparedClaim:
    """Prepare one claim."""
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    return prepared


async def undo(rig: Rig, reference: ClaimReference) -> None:
    """Delete a claim and undo it."""
    await rig.plane.drop(reference.name)
    assert await rig.kubelet.unprepare_claims([reference]) == {}


def undone(rig: Rig) -> list[tuple[str, tuple[str, ...]]]:
    """What the device service was told to undo, and for whom."""
    return [(request.owner.name, request.devices) for request in rig.plane.requests("unprepare")]


async def test_admin_access_is_prepared_beside_the_holder_when_it_looks_at_a_device(rig: Rig) -> None:
    """It holds nothing, has a CDI file of its own, and its end takes nothing from the holder; nor does the holder's end wait for it."""
    training = await given(rig, "training", result("gpu-0"))
    watch = await given(rig, "watch", result("gpu-0", adminAccess=True), result("gpu-1", adminAccess=True))
    async with rig.gateway():
        before = await prepare(rig, training)
        looking = await prepare(rig, watch)
        held = {allocation.owner.name: allocation.holdings[0].devices for allocation in rig.plane.ledger.allocations.values()}
        files = {path.name: [cdi_device.name for cdi_device in parse(path.read_bytes()).devices] for path in rig.cdi_dir.iterdir()}
        await undo(rig, watch)
        left = [path.name for path in rig.cdi_dir.iterdir()]
        again = await prepare(rig, training)
        rewatched = await prepare(rig, await given(rig, "watch", result("gpu-0", adminAccess=True)))
        await undo(rig, training)

    assert (before.error, looking.error, rewatched.error) == ("", "", "")
    assert held == {"training": {"gpu": ("gpu-0",)}}
    assert files == {
        "topobus.dev-gpu_u-training.json": ["claim-u-training-gpu-0"],
        "topobus.dev-gpu_u-watch.json": ["claim-u-watch-gpu-0", "claim-u-watch-gpu-1"],
    }
    assert left == ["topobus.dev-gpu_u-training.json"]
    assert again == before
    assert undone(rig) == [("watch", ("gpu-1",)), ("training", ("gpu-0",))]
    assert [request.looked_at for request in rig.plane.requests("prepare")] == [(), ("gpu-0", "gpu-1"), ("gpu-0",)]


async def test_shares_of_one_device_are_prepared_apart_when_several_claims_have_one(rig: Rig) -> None:
    """Each claim is answered with its own share; the device service undoes the device with the last of them."""
    claim_reference = await given(rig, "one", result("gpu-0", shareID="share-1"))
    two = await given(rig, "two", result("gpu-0", "a", shareID="share-2"), result("gpu-0", "b", shareID="share-3"))
    async with rig.gateway():
        first, second = await prepare(rig, claim_reference), await prepare(rig, two)
        held = sorted(allocation.owner.name for allocation in rig.plane.ledger.allocations.values())
        await undo(rig, claim_reference)
        between = undone(rig)
        await undo(rig, two)

    assert [(it.device, it.share_id, it.requests) for it in first.devices] == [("gpu-0", "share-1", ("r",))]
    assert [(it.device, it.share_id, it.requests) for it in second.devices] == [("gpu-0", "share-2", ("a",)), ("gpu-0", "share-3", ("b",))]
    assert [it.cdi_devices for it in (*first.devices, *second.devices)] == [
        ("topobus.dev/gpu=claim-u-one-gpu-0",),
        ("topobus.dev/gpu=claim-u-two-gpu-0", "topobus.dev/gpu=claim-u-two_request-a"),
        ("topobus.dev/gpu=claim-u-two-gpu-0", "topobus.dev/gpu=claim-u-two_request-b"),
    ]
    assert held == ["one", "two"]
    assert between == []
    assert undone(rig) == [("two", ("gpu-0",))]
    assert rig.plane.ledger.allocations == {}


async def test_device_is_undone_once_when_all_of_its_shares_end_at_the_same_time(rig: Rig) -> None:
    """Nobody leaves it to the other: whoever is last tells the device service, exactly once."""
    claims = [await given(rig, f"c{index}", result("gpu-0", shareID=f"s-{index}")) for index in range(6)]
    async with rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        prepared = await rig.kubelet.prepare_claims(claims)
        for claim in claims:
            await rig.plane.drop(claim.name)
        errors = await asyncio.gather(*(rig.kubelet.unprepare_claims([claim]) for claim in claims))

    assert [prepared_claim.error for prepared_claim in prepared] == [""] * 6
    assert errors == [{}] * 6
    assert [devices for _, devices in undone(rig)] == [("gpu-0",)]


@pytest.mark.parametrize("is_share_first", [True, False])
async def test_whole_and_share_never_live_together_when_two_claims_want_one_device(rig: Rig, *, is_share_first: bool) -> None:
    """An exclusive device is never given twice, even by a ledger that has forgotten who holds it."""
    whole = await given(rig, "whole", result("gpu-0"))
    share = await given(rig, "share", result("gpu-0", shareID="s"))
    first, second = (share, whole) if is_share_first else (whole, share)
    async with rig.gateway():
        good = await prepare(rig, first)
        refused = await prepare(rig, second)
        await rig.plane.lose()
        still_refused = await prepare(rig, second)

    assert good.error == ""
    assert f"claim default/{first.name} holds gpu-0" in refused.error
    assert f"claim default/{first.name} holds gpu-0" in still_refused.error


async def test_device_gets_the_configuration_of_its_own_request_when_requests_differ(rig: Rig) -> None:
    """The class's words come before the claim's, and what is said of one request does not reach the device of another."""
    said = [
        {"source": "FromClaim", "requests": ["a/big"], "opaque": {"driver": DRIVER, "parameters": {"only": "a"}}},
        {"source": "FromClass", "requests": [], "opaque": {"driver": DRIVER, "parameters": {"class": "all"}}},
        {"source": "FromClaim", "requests": [], "opaque": {"driver": "gpu.example.com", "parameters": {"not": "ours"}}},
    ]
    differing = await given(rig, "differing", result("gpu-0", "a/big"), result("gpu-1", "b"), config=said)
    async with rig.gateway():
        answer = await prepare(rig, differing)
        whole, of_a, of_b = rig.plane.requests("prepare")

    assert answer.error == ""
    assert (whole.config, whole.device_config) == ((), {"gpu-0": ({"class": "all"}, {"only": "a"}), "gpu-1": ({"class": "all"},)})
    assert (of_a.devices, of_a.config, of_a.device_config) == (("gpu-0",), ({"class": "all"}, {"only": "a"}), {})
    assert (of_b.devices, of_b.config, of_b.device_config) == (("gpu-1",), ({"class": "all"},), {})


async def test_claim_is_prepared_anew_when_it_comes_back_after_a_half_done_undo(rig: Rig) -> None:
    """An undo that failed on its way is finished first: nobody is told that a device is ready which is not.

    Kubelet is told that it is done, for its containers have ended; the devices stay held until it is.
    """
    training = await given(rig, "training", result("gpu-0"))
    async with rig.gateway(deadlines=IMPATIENT):
        await prepare(rig, training)
        rig.plane.hung.add("release")
        failed = await rig.kubelet.unprepare_claims([training])
        held = [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()]
        rig.plane.hung.clear()
        again = await prepare(rig, training)

    assert failed == {}
    assert held == ["training"]
    assert again.error == ""
    assert [request.devices for request in rig.plane.requests("prepare")] == [("gpu-0",)] * 2
    assert len({request.op_id for request in rig.plane.requests("prepare")}) == 2
    assert [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()] == ["training"]
    assert (rig.cdi_dir / "topobus.dev-gpu_u-training.json").is_file()
