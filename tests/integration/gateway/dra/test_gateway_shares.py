"""Devices that more than one claim is prepared with: admin access, shares of consumable capacity,
and what each of them is configured with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from support.dra_claims import prepare
from support.gateway_rig import IMPATIENT, Rig, make_rig
from support.node_plane import NODE, device
from support.partitioned_cards import card, counters_of
from topobus.formats.containers.cdi import parse
from topobus.formats.messages.messages import ApiObject
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs, of which several claims may have the first, and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", structs.replace(device("gpu-0", 0), allows_multiple=True), device("gpu-1", 1))
        async with made.kubelet:
            yield made


def result(name: str, request: str = "r", **more: Any) -> dict[str, Any]:
    """One device of an allocation."""
    return {"request": request, "driver": DRIVER, "pool": NODE, "device": name, **more}


async def given(
    rig: Rig, name: str, *results: dict[str, Any], config: list[dict[str, Any]] | None = None
) -> ClaimReference:
    """Store an allocated claim."""
    status = {"allocation": {"devices": {"results": list(results), "config": config or []}}}
    metadata = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    await rig.plane.store(
        ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)
    )
    return ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,))


async def undo(rig: Rig, reference: ClaimReference) -> None:
    """Delete a claim and undo it."""
    await rig.plane.drop(reference.name)
    assert await rig.kubelet.unprepare_claims([reference]) == {}


def undone(rig: Rig) -> list[tuple[str, tuple[str, ...]]]:
    """What the device service was told to undo, and for whom."""
    return [(request.owner.name, request.devices) for request in rig.plane.asks.requests("unprepare")]


async def test_admin_access_is_prepared_beside_the_holder_when_it_looks_at_a_device(rig: Rig) -> None:
    """It holds nothing, has a CDI file of its own, and its end takes nothing from the holder; nor
    does the holder's end wait for it.
    """
    training = await given(rig, "training", result("gpu-0"))
    watch = await given(rig, "watch", result("gpu-0", adminAccess=True), result("gpu-1", adminAccess=True))
    async with rig.gateway():
        before = await prepare(rig, training)
        looking = await prepare(rig, watch)
        held = {
            allocation.owner.name: allocation.holdings[0].devices
            for allocation in rig.plane.ledger.allocations.values()
        }
        files = {
            path.name: [cdi_device.name for cdi_device in parse(path.read_bytes()).devices]
            for path in rig.cdi_dir.iterdir()
        }
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
    assert [request.looked_at for request in rig.plane.asks.requests("prepare")] == [(), ("gpu-0", "gpu-1"), ("gpu-0",)]


async def test_shares_of_one_device_are_prepared_apart_when_several_claims_have_one(rig: Rig) -> None:
    """Each claim is answered with its own share.

    The device service undoes the device with the last of them.
    """
    claim_reference = await given(rig, "one", result("gpu-0", shareID="share-1"))
    second_reference = await given(
        rig, "two", result("gpu-0", "a", shareID="share-2"), result("gpu-0", "b", shareID="share-3")
    )
    async with rig.gateway():
        first, second = await prepare(rig, claim_reference), await prepare(rig, second_reference)
        held = sorted(allocation.owner.name for allocation in rig.plane.ledger.allocations.values())
        await undo(rig, claim_reference)
        between = undone(rig)
        await undo(rig, second_reference)

    assert [(it.device, it.share_id, it.requests) for it in first.devices] == [("gpu-0", "share-1", ("r",))]
    assert [(it.device, it.share_id, it.requests) for it in second.devices] == [
        ("gpu-0", "share-2", ("a",)),
        ("gpu-0", "share-3", ("b",)),
    ]
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
async def test_whole_and_share_never_live_together_when_two_claims_want_one_device(
    rig: Rig, *, is_share_first: bool
) -> None:
    """An exclusive device is never given twice, even by a ledger that
    has forgotten who holds it.
    """
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
    """The class's words come before the claim's, and what is said of one request does not reach the
    device of another.
    """
    said = [
        {"source": "FromClaim", "requests": ["a/big"], "opaque": {"driver": DRIVER, "parameters": {"only": "a"}}},
        {"source": "FromClass", "requests": [], "opaque": {"driver": DRIVER, "parameters": {"class": "all"}}},
        {"source": "FromClaim", "requests": [], "opaque": {"driver": "gpu.example.com", "parameters": {"not": "ours"}}},
    ]
    differing = await given(rig, "differing", result("gpu-0", "a/big"), result("gpu-1", "b"), config=said)
    async with rig.gateway():
        answer = await prepare(rig, differing)
        whole, of_a, of_b = rig.plane.asks.requests("prepare")

    assert answer.error == ""
    assert (whole.config, whole.device_config) == (
        (),
        {"gpu-0": ({"class": "all"}, {"only": "a"}), "gpu-1": ({"class": "all"},)},
    )
    assert (of_a.devices, of_a.config, of_a.device_config) == (("gpu-0",), ({"class": "all"}, {"only": "a"}), {})
    assert (of_b.devices, of_b.config, of_b.device_config) == (("gpu-1",), ({"class": "all"},), {})


async def test_claim_is_prepared_anew_when_it_comes_back_after_a_half_done_undo(rig: Rig) -> None:
    """An undo that failed on its way is finished first: nobody is told that a device is ready which
    is not.

    Kubelet is told that it is done, for its containers have ended; the
    devices stay held until it is.
    """
    training = await given(rig, "training", result("gpu-0"))
    async with rig.gateway(deadlines=IMPATIENT):
        await prepare(rig, training)
        rig.plane.asks.hung.add("release")
        failed = await rig.kubelet.unprepare_claims([training])
        held = [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()]
        rig.plane.asks.hung.clear()
        again = await prepare(rig, training)

    assert failed == {}
    assert held == ["training"]
    assert again.error == ""
    assert [request.devices for request in rig.plane.asks.requests("prepare")] == [("gpu-0",)] * 2
    assert len({request.op_id for request in rig.plane.asks.requests("prepare")}) == 2
    assert [allocation.owner.name for allocation in rig.plane.ledger.allocations.values()] == ["training"]
    assert (rig.cdi_dir / "topobus.dev-gpu_u-training.json").is_file()


async def test_share_is_held_whole_when_the_driver_does_not_share_the_device(rig: Rig) -> None:
    """Whatever a claim's status says: a device that nobody declared as shared is one claim's."""
    first = await given(rig, "one", result("gpu-1", shareID="share-1"))
    second = await given(rig, "two", result("gpu-1", shareID="share-2"))
    async with rig.gateway():
        prepared, refused = await prepare(rig, first), await prepare(rig, second)

    assert prepared.error == ""
    assert "claim default/one holds gpu-1" in refused.error


async def test_partition_is_refused_at_prepare_when_its_card_is_held(rig: Rig) -> None:
    """A scheduler that does not count gave a card and a part of it: the second is refused with the
    counter, and prepared once the first is undone.
    """
    await rig.plane.show("gpu", *card(), counter_sets=counters_of("gpu-0"))
    whole, part = await given(rig, "whole", result("gpu-0")), await given(rig, "part", result("gpu-0-part-a"))
    async with rig.gateway():
        first, second = await prepare(rig, whole), await prepare(rig, part)
        await undo(rig, whole)
        third = await prepare(rig, part)

    assert (first.error, third.error) == ("", "")
    assert (
        "gpu-0-part-a: 4 of gpu-0/slices wanted, 7 there, 7 in use by gpu-0 of claim/default/whole/u-whole"
        in second.error
    )


async def test_kubelet_is_offered_neither_shares_nor_devices_that_exclude_each_other(rig: Rig) -> None:
    """Its plugin list has what can be counted: partitions that all fit together, and no card beside
    them.
    """
    await rig.plane.show(
        "gpu",
        structs.replace(device("gpu-9"), allows_multiple=True),
        *card(),
        *card("gpu-1", (3, 4))[1:],
        counter_sets=counters_of("gpu-0", "gpu-1"),
    )
    async with rig.gateway():
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=2)
        listed = sorted(rig.kubelet.devices("topobus.dev/gpu"))

    assert listed == ["gpu-1-part-a", "gpu-1-part-b"]


async def test_shares_stay_shares_when_the_ledger_was_lost(rig: Rig) -> None:
    """Two pods run with shares of one device, and the node's ledger is gone: both shares are
    written down again, and neither pod is told to be wrong.
    """
    claims = [await given(rig, name, result("gpu-0", shareID=f"s-{name}")) for name in ("one", "two")]
    async with rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        for claim in claims:
            pod = Pod(
                name=f"pod-{claim.name}", uid=f"p-{claim.name}", containers=(Container(name="c"),), claims=(claim,)
            )
            assert isinstance(await rig.kubelet.admit(pod), Admission)
        await rig.plane.lose()
        await rig.plane.asks.wait_for("adopted", 4)
        pods = await rig.pods()

    held = {
        allocation.owner.name: allocation.holdings[0].shared for allocation in rig.plane.ledger.allocations.values()
    }
    assert held == {"one": {"gpu": ("gpu-0",)}, "two": {"gpu": ("gpu-0",)}}
    assert pods.disagreements == ()
