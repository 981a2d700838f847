"""Shared devices through both doors: replicas by kubelet's device plugins, shares by claims, on one
ledger that counts both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device, no
from support.plugin_pods import admitted
from support.shared_devices import GIB, RESOURCE, share_claim, shared_gpus
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, ClaimReference, Container, Pod, PreparedClaim, Rejection
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

QUARTER = {"memory": 20 * GIB, "shares": 1}


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One shared GPU of four quarters, and a running kubelet."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", *shared_gpus("gpu-0"))
        async with made.kubelet:
            yield made


def pod(uid: str, count: int = 1) -> Pod:
    """A pod with one container that asks for so many replicas."""
    return Pod(name=f"pod-{uid}", uid=uid, containers=(Container(name="main", resources={RESOURCE: count}),))


def replicas(admission: Admission) -> tuple[str, ...]:
    """The ids that kubelet gave."""
    return admission.container("main").devices[RESOURCE]


def held(rig: Rig) -> dict[tuple[int, ...], dict[str, int]]:
    """What kubelet's replicas have in the ledger: numbers to amounts."""
    check_holders(rig.plane.ledger)
    return {
        share.replicas: share.amounts
        for allocation in rig.plane.ledger.allocations.values()
        for holding in allocation.holdings
        for share in holding.shares.get("gpu", {}).values()
    }


async def prepare(rig: Rig, name: str, gpu: str = "gpu-0", **amounts: str) -> PreparedClaim:
    """Store a claim with a share of a GPU, and prepare it."""
    await rig.plane.store(share_claim(name, gpu, **amounts))
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,))])
    return prepared


async def undo(rig: Rig, name: str) -> None:
    """Delete a claim and undo it."""
    await rig.plane.drop(name)
    assert await rig.kubelet.unprepare_claims([ClaimReference(name=name, uid=f"u-{name}", drivers=(DRIVER,))]) == {}


async def test_four_pods_of_a_quarter_are_admitted_and_the_fifth_is_refused(rig: Rig) -> None:
    """Each pod has a replica of its own, the device service hears of each one's share, and a fifth
    finds none.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        given = [await admitted(rig, pod(uid)) for uid in "abcd"]
        refused = await rig.kubelet.admit(pod("e"))
        shown = await rig.pods()

    assert sorted(replicas(admission) for admission in given) == [(f"gpu-0::{number}",) for number in range(4)]
    assert [admission.container("main").edits.env["TOPOBUS_GPU_DEVICES"] for admission in given] == ["gpu-0"] * 4
    assert isinstance(refused, Rejection)
    assert held(rig) == {(number,): QUARTER for number in range(4)}
    assert {request.owner.uid for request in rig.plane.asks.requests("prepare")} == {
        allocation.owner.uid for allocation in rig.plane.ledger.allocations.values()
    }
    assert [request.shares for request in rig.plane.asks.requests("prepare")][:4] == [{"gpu-0": QUARTER}] * 4
    assert shown.disagreements == ()


async def test_a_shared_device_is_in_no_list_as_a_whole(rig: Rig) -> None:
    """Kubelet is offered the replicas under their own resource, and nothing under the class's."""
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)

        assert {name: str(device.nodes) for name, device in rig.kubelet.devices(RESOURCE).items()} == {
            f"gpu-0::{number}": "0" for number in range(4)
        }
        assert rig.kubelet.devices("topobus.dev/gpu") == {}


async def test_a_container_that_asks_for_two_replicas_is_refused_with_the_way_out(rig: Rig) -> None:
    """Two shares of one GPU are no second GPU, and nothing is taken."""
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        refused = await rig.kubelet.admit(pod("a", 2))

    assert isinstance(refused, Rejection)
    assert "a container asks for 2 shares (gpu-0::0, gpu-0::1), wanted 1" in refused.message
    assert "make a claim with the memory that is needed" in refused.message
    assert rig.plane.ledger.allocations == {}


@pytest.mark.parametrize(("policy", "gpus"), [("spread", ["gpu-0", "gpu-1"]), ("pack", ["gpu-1", "gpu-1"])])
async def test_replicas_are_of_the_device_that_the_policy_prefers(rig: Rig, policy: str, gpus: list[str]) -> None:
    """Spread goes to the emptier device, pack to the fuller one.

    Claims take the first, so kubelet begins at the end.
    """
    await rig.plane.show("gpu", *shared_gpus("gpu-0", "gpu-1", policy="spread" if policy == "spread" else "pack"))
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=8)
        given = [await admitted(rig, pod(uid)) for uid in "ab"]

    assert sorted(name.partition("::")[0] for admission in given for name in replicas(admission)) == gpus


async def test_every_replica_is_sick_when_the_device_is_and_well_when_it_is_again(rig: Rig) -> None:
    """The health of a device is the health of all its replicas, held ones, too."""
    (gpu,) = shared_gpus("gpu-0")
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        await admitted(rig, pod("a"))
        await rig.plane.show("gpu", structs.replace(gpu, health=device("gpu-0", state=HealthState.UNHEALTHY).health))
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=0)
        sick = {name: device.is_healthy for name, device in rig.kubelet.devices(RESOURCE).items()}
        await rig.plane.show("gpu", gpu)
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)

    assert sick == {f"gpu-0::{number}": False for number in range(4)}


async def test_a_fifth_claim_is_refused_with_the_numbers(rig: Rig) -> None:
    """Four claims of a quarter fit.

    The fifth is told which GPU, how much is wanted, how much is left, and who has the rest.
    """
    async with rig.gateway():
        fitting = [await prepare(rig, name) for name in "abcd"]
        fifth = await prepare(rig, "e")
        await undo(rig, "b")
        later = await prepare(rig, "e")

    assert [prepared.error for prepared in fitting] == [""] * 4
    assert (
        f"gpu-0: memory: {20 * GIB} wanted, 0 left of {80 * GIB}, {80 * GIB} in use by claim/default/a/u-a"
        in fifth.error
    )
    assert later.error == ""
    assert {request.owner.name: request.shares for request in rig.plane.asks.requests("prepare")}["a"] == {
        "gpu-0": QUARTER
    }


async def test_both_doors_have_one_device_at_once_and_together_no_more_than_there_is(rig: Rig) -> None:
    """A claim of a half takes two replicas' worth from kubelet, which is told so.

    What kubelet gave is not left for a claim.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        half = await prepare(rig, "half", memory="40Gi")
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=2)
        given = [await admitted(rig, pod(uid)) for uid in "ab"]
        no_more = await rig.kubelet.admit(pod("c"))
        refused = await prepare(rig, "late")
        await undo(rig, "half")
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        fits = await prepare(rig, "late", memory="40Gi")

    assert half.error == ""
    assert sorted(replicas(admission) for admission in given) == [("gpu-0::0",), ("gpu-0::1",)]
    assert isinstance(no_more, Rejection)
    assert f"gpu-0: memory: {20 * GIB} wanted, 0 left of {80 * GIB}" in refused.error
    assert fits.error == ""
    check_holders(rig.plane.ledger)


async def test_a_claim_of_the_whole_and_a_replica_never_live_together(rig: Rig) -> None:
    """While a pod has a replica nobody gets the whole device, and while somebody has the whole
    there is no replica.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        first = pod("a")
        await admitted(rig, first)
        await rig.plane.store(claim("whole", "u-whole", "gpu-0"))
        await rig.kubelet.wait_for_driver(DRIVER)
        (refused,) = await rig.kubelet.prepare_claims([ClaimReference(name="whole", uid="u-whole", drivers=(DRIVER,))])
        await rig.kubelet.remove(first)
        await rig.plane.asks.wait_for("released")
        (given,) = await rig.kubelet.prepare_claims([ClaimReference(name="whole", uid="u-whole", drivers=(DRIVER,))])
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=0)

    assert "holds gpu-0" in refused.error
    assert given.error == ""


async def test_each_replica_is_undone_by_itself_when_its_pod_has_gone(rig: Rig) -> None:
    """The device service hears of each leaving owner, also while others go on.

    The others keep what they have.
    """
    gone, stays = pod("gone"), pod("stays")
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        await admitted(rig, gone)
        left = replicas(await admitted(rig, stays))
        await prepare(rig, "beside")
        await rig.kubelet.remove(gone)
        await rig.plane.asks.wait_for("released")
        await undo(rig, "beside")

    undone = rig.plane.asks.requests("unprepare")
    assert [(request.owner.kind.value, request.devices) for request in undone] == [
        ("device-plugin", ("gpu-0",)),
        ("claim", ("gpu-0",)),
    ]
    assert held(rig) == {(int(left[0][-1]),): QUARTER}


async def test_replicas_and_shares_are_adopted_again_when_the_ledger_has_lost_them(rig: Rig) -> None:
    """PodResources and the checkpoint say who has what, with the amounts.

    Nothing is given twice afterwards.
    """
    reference = ClaimReference(name="half", uid="u-half", drivers=(DRIVER,))
    by_claim = Pod(name="by-claim", uid="p-claim", containers=(Container(name="main"),), claims=(reference,))
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.plane.store(share_claim("half", "gpu-0", memory="40Gi"))
        await admitted(rig, pod("a"))
        assert isinstance(await rig.kubelet.admit(by_claim), Admission)
        before = held(rig)
        await rig.plane.lose()
        await rig.plane.asks.wait_for("adopted", count=4)

    assert before == {(0,): QUARTER, (): {"memory": 40 * GIB, "shares": 1}}
    assert held(rig) == before


async def test_replicas_stay_with_their_pods_when_the_gateway_starts_again(rig: Rig) -> None:
    """A new gateway lists the same replicas, knows whose they are, and
    gives a new pod another one.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        first = replicas(await admitted(rig, pod("a")))
    # Kubelet has seen that its stream ended: what it lists next is the new gateway's.
    await rig.kubelet.wait_for_resource(RESOURCE, allocatable=0)
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        second = replicas(await admitted(rig, pod("b")))
        shown = await rig.pods()

    assert first != second
    assert {container.pod: [device.name for device in container.devices] for container in shown.containers} == {
        "pod-a": list(first),
        "pod-b": list(second),
    }
    assert shown.disagreements == ()


async def test_a_replica_is_given_back_when_its_device_cannot_be_prepared(rig: Rig) -> None:
    """What kubelet was refused nobody holds, in the ledger or in the device service's account."""
    rig.plane.prepare_refusal = no("broken", "the driver is broken")
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        refused = await rig.kubelet.admit(pod("a"))
        rig.plane.prepare_refusal = None
        given = await admitted(rig, pod("b"))

    assert isinstance(refused, Rejection)
    assert [request.devices for request in rig.plane.asks.requests("unprepare")] == [("gpu-0",)]
    assert len(rig.plane.ledger.allocations) == 1
    assert len(replicas(given)) == 1


async def test_pods_and_claims_that_race_for_the_last_quarter_have_one_winner(rig: Rig) -> None:
    """Whatever comes first, what is given is no more than there is."""
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=4)
        for name in "abc":
            await prepare(rig, name)
        pods = [rig.kubelet.admit(pod(uid)) for uid in "xy"]
        answers = await asyncio.gather(*pods, prepare(rig, "d"), prepare(rig, "e"))

    won = [
        answer
        for answer in answers
        if isinstance(answer, Admission) or (isinstance(answer, PreparedClaim) and not answer.error)
    ]
    assert len(won) == 1
    assert sum(share["memory"] for share in held_amounts(rig)) == 80 * GIB


def held_amounts(rig: Rig) -> list[dict[str, int]]:
    """What everybody has of the GPU."""
    check_holders(rig.plane.ledger)
    return [
        share.amounts
        for allocation in rig.plane.ledger.allocations.values()
        for holding in allocation.holdings
        for share in holding.shares.get("gpu", {}).values()
    ]
