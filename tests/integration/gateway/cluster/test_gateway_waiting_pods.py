"""Pods of this node that wait for claims: what is withheld for them, who is told, and that kubelet
is made to look when what stood in the way is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from support.dra_claims import prepare
from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device, no
from topobus.gateway.cluster.pod_retries import ANNOTATION
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    Pod,
    Rejection,
)
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

GPU = "topobus.dev/gpu"
SPEC = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}
FORMER = {"kind": "ResourceClaim", "metadata": {"name": "former"}, "spec": SPEC}
PLUGIN = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=GPU, uid="hash")


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """Three GPUs on one NUMA node, a running kubelet, a gateway that knows the cluster."""
    async with make_rig(nats_server.url, wipe_slices=lambda driver: server.wipe_slices(NODE, driver)) as made:
        await made.plane.show("gpu", *(device(f"gpu-{number}", 0) for number in range(3)))
        made.join(server)
        async with made.kubelet:
            yield made


def make_waiting(server: ApiServerSimulator, gpu: str, *, is_controlled: bool = False, **result: Any) -> ClaimReference:
    """Bind a pod `p` to the node with a claim `c` that is allocated one GPU, as the scheduler does.

    The claim as kubelet names it.
    """
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}
    uid = server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": spec})["metadata"]["uid"]
    results = [{"request": "gpu", "driver": DRIVER, "pool": NODE, "device": gpu, **result}]
    server.put(
        {
            "kind": "ResourceClaim",
            "metadata": {"name": "c"},
            "spec": spec,
            "status": {"allocation": {"devices": {"results": results}}},
        }
    )
    owners = (
        [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u-r", "controller": True}]
        if is_controlled
        else []
    )
    server.put(
        {
            "kind": "Pod",
            "metadata": {"name": "p", "ownerReferences": owners},
            "spec": {
                "nodeName": NODE,
                "containers": [{"name": "main"}],
                "resourceClaims": [{"name": "own", "resourceClaimName": "c"}],
            },
        }
    )
    return ClaimReference(name="c", uid=uid, drivers=(DRIVER,))


def make_former(server: ApiServerSimulator) -> ClaimReference:
    """Store a claim that is allocated gpu-0, without a pod."""
    uid = server.put(FORMER)["metadata"]["uid"]
    allocation = {"devices": {"results": [{"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0"}]}}
    server.put({**FORMER, "status": {"allocation": allocation}})
    return ClaimReference(name="former", uid=uid, drivers=(DRIVER,))


def annotated(server: ApiServerSimulator) -> str:
    """When kubelet was made to look at the pod; empty: never."""
    return str((server.objects("Pod")[0]["metadata"].get("annotations") or {}).get(ANNOTATION, ""))


def event_messages(server: ApiServerSimulator) -> dict[str, str]:
    """Kind of an object to what its event says."""
    return {event["involvedObject"]["kind"]: event["message"] for event in server.objects("Event")}


async def tell_of_changes(rig: Rig, server: ApiServerSimulator, pod: Pod) -> None:
    """Tell kubelet of each annotation, as its watch does, for ever."""
    while True:
        seen = annotated(server)
        await server.until(lambda: annotated(server) != seen, what="another annotation")  # noqa: B023
        rig.kubelet.pod_changed(pod.uid)


async def test_devices_of_a_claim_are_withheld_when_its_pod_is_bound_and_not_prepared_yet(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The pod by resource is given another one, the lists stay as they are.

    Prepared, the device is the claim's and withheld no more.
    """
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(GPU, allocatable=3)
        reference = make_waiting(server, "gpu-2")
        await server.until(
            lambda: any("resourceclaims/c" in request.path for request in server.requests),
            what="the gateway to read the claim",
        )
        first = await rig.kubelet.admit(
            Pod(name="a", uid="u-a", containers=(Container(name="main", resources={GPU: 1}),))
        )
        healthy = rig.kubelet.capacity()[GPU].allocatable
        prepared = await prepare(rig, reference)
        await rig.kubelet.wait_for_resource(GPU, allocatable=2)
        second = await rig.kubelet.admit(
            Pod(name="b", uid="u-b", containers=(Container(name="main", resources={GPU: 1}),))
        )

    assert isinstance(first, Admission)
    assert (prepared.error, healthy) == ("", 3)
    # kubelet does not ask when it has no choice.
    assert [request.withheld for request in rig.plane.asks.requests("prefer")] == [("gpu-2",)]
    assert isinstance(second, Admission)


async def test_kubelet_is_made_to_look_again_when_the_device_is_let_go(rig: Rig, server: ApiServerSimulator) -> None:
    """The loser is told who has the device, on the pod and on the claim.

    Nothing is changed while it is held; then the pod is annotated, and goes on.
    """
    await rig.plane.hold(PLUGIN, gpu=("gpu-0",))
    async with rig.gateway(deadlines=structs.replace(rig.settings.deadlines, reconcile_s=60.0)):
        reference = make_waiting(server, "gpu-0")
        refused = await prepare(rig, reference)
        await server.until(lambda: len(event_messages(server)) == 2, what="events on pod and claim")
        before = annotated(server)
        await rig.plane.let_go(PLUGIN)
        await server.until(lambda: annotated(server), what="the annotation")
        prepared = await prepare(rig, reference)

    assert "device-plugin kubelet/topobus.dev/gpu holds gpu-0" in refused.error
    assert event_messages(server).keys() == {"Pod", "ResourceClaim"}
    assert all("holds gpu-0" in message for message in event_messages(server).values())
    assert (before, prepared.error) == ("", "")


async def test_kubelet_is_made_to_look_again_when_the_device_is_well_again(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """A device that was sick when it was to be prepared: as soon as it is well the pod is
    annotated.
    """
    async with rig.gateway():
        reference = make_waiting(server, "gpu-0")
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY))
        await rig.kubelet.wait_for_resource(GPU, allocatable=0)
        rig.plane.prepare_refusal = no("driver-failed", "the card is gone")
        refused = await prepare(rig, reference)
        await server.until(lambda: event_messages(server), what="an event")
        before = annotated(server)
        rig.plane.prepare_refusal = None
        await rig.plane.show("gpu", device("gpu-0", 0))
        await server.until(lambda: annotated(server), what="the annotation")
        prepared = await prepare(rig, reference)

    assert "the card is gone" in refused.error
    assert (before, prepared.error) == ("", "")


async def test_kubelet_is_made_to_look_again_when_a_gateway_starts_after_one_was_killed(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The pod was bound, its prepare was cut off, and kubelet would ask again after a minute: the
    next gateway has it look.
    """
    reference = make_waiting(server, "gpu-0")
    async with rig.gateway():
        await server.until(lambda: annotated(server), what="the annotation")
        prepared = await prepare(rig, reference)

    assert prepared.error == ""


async def test_kubelet_is_made_to_look_again_when_the_machine_was_booted(
    rig: Rig, server: ApiServerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet comes first and is told that there is no driver.

    What the boot before had prepared does not count, so the pod runs
    as soon as the gateway is there.
    """
    reference = make_waiting(server, "gpu-0")
    pod = Pod(
        name="p",
        uid=server.objects("Pod")[0]["metadata"]["uid"],
        containers=(Container(name="main"),),
        claims=(reference,),
    )
    monkeypatch.setattr("topobus.gateway.service.boot_id", lambda: "first")
    async with rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        before = await rig.kubelet.admit(pod)
    said = annotated(server)
    await rig.kubelet.reboot()
    early = await rig.kubelet.admit(pod)
    monkeypatch.setattr("topobus.gateway.service.boot_id", lambda: "second")
    watch = asyncio.create_task(tell_of_changes(rig, server, pod))
    async with rig.gateway():
        after = await rig.kubelet.admit_with_retries(pod)
    watch.cancel()

    assert isinstance(before, Admission)
    assert isinstance(early, Rejection)
    assert early.message.endswith(f"DRA driver {DRIVER} is not registered")
    assert isinstance(after, Admission), after
    assert annotated(server) != said


async def test_device_is_let_go_at_once_when_its_claim_is_undone_and_another_one_waits(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """The claim was deallocated before it could be undone: nothing is left to wait for, and nobody
    waits for the next look at all claims.
    """
    seldom = structs.replace(rig.settings.deadlines, reconcile_s=600.0)
    reference = make_former(server)
    async with rig.gateway(deadlines=seldom):
        await prepare(rig, reference)
        make_waiting(server, "gpu-0")
        server.put({**FORMER, "status": {}})
        await rig.kubelet.unprepare_claims([reference])
        await rig.plane.asks.wait_for("released", 2)
        await server.until(lambda: annotated(server), what="the annotation")

    assert rig.plane.asks.requests("released")[1].owner.uid == reference.uid


async def test_device_is_let_go_at_once_when_the_gateway_was_killed_before_it_could_and_a_claim_waits(
    rig: Rig, server: ApiServerSimulator
) -> None:
    """What was undone here stands in the checkpoint: the next gateway need not find out in two
    looks, and looks at once at what another claim waits for.
    """
    seldom = structs.replace(rig.settings.deadlines, reconcile_s=600.0)
    reference = make_former(server)
    async with rig.gateway(deadlines=seldom):
        prepared = await prepare(rig, reference)
        undone = await rig.kubelet.unprepare_claims([reference])
    held = list(rig.plane.ledger.allocations)
    async with rig.gateway(deadlines=seldom):
        make_waiting(server, "gpu-0")
        server.put({**FORMER, "status": {}})
        await rig.plane.asks.wait_for("released", 2)
        await server.until(lambda: annotated(server), what="the annotation")

    assert (prepared.error, undone, len(held)) == ("", {}, 1)
    assert rig.plane.asks.requests("released")[1].owner.uid == reference.uid


async def test_pods_are_left_alone_when_retries_are_switched_off(rig: Rig, server: ApiServerSimulator) -> None:
    """Without `retries_pods` no pod is ever changed; who has the device is told all the same."""
    await rig.plane.hold(PLUGIN, gpu=("gpu-0",))
    cluster = structs.replace(rig.settings.cluster, retries_pods=False)
    async with rig.gateway(cluster=cluster, deadlines=structs.replace(rig.settings.deadlines, reconcile_s=60.0)):
        reference = make_waiting(server, "gpu-0")
        await prepare(rig, reference)
        await server.until(lambda: len(event_messages(server)) == 2, what="events")
        await rig.plane.let_go(PLUGIN)
        prepared = await prepare(rig, reference)

    assert prepared.error == ""
    assert [request.path for request in server.requests if request.method == "PATCH" and "/pods/" in request.path] == []


@pytest.mark.parametrize("is_controlled", [True, False], ids=["controlled", "bare"])
async def test_loser_is_evicted_when_a_setting_allows_it_and_something_makes_it_anew(
    rig: Rig, server: ApiServerSimulator, is_controlled: bool
) -> None:
    """A pod of a controller goes after its time, so that a new one is given another device.

    A bare one would be gone for good, and stays.
    """
    await rig.plane.hold(PLUGIN, gpu=("gpu-0",))
    cluster = structs.replace(rig.settings.cluster, evict_after_s=0.05)
    async with rig.gateway(cluster=cluster, deadlines=structs.replace(rig.settings.deadlines, reconcile_s=60.0)):
        reference = make_waiting(server, "gpu-0", is_controlled=is_controlled)
        await prepare(rig, reference)
        await server.until(lambda: len(event_messages(server)) == 2, what="events")
        if is_controlled:
            await server.until(
                lambda: any(request.path.endswith("/pods/p/eviction") for request in server.requests),
                what="an eviction",
            )
        else:
            await rig.plane.let_go(PLUGIN)
            await server.until(lambda: annotated(server), what="the annotation")

    evictions = [request.body["deleteOptions"] for request in server.requests if request.path.endswith("/eviction")]
    uid = next((pod["metadata"]["uid"] for pod in server.objects("Pod")), "")
    assert bool(evictions) is is_controlled
    assert all(options["preconditions"]["uid"] for options in evictions)
    assert bool(uid) is not is_controlled or server.objects("Pod")[0]["metadata"].get("deletionTimestamp")


async def test_claims_are_prepared_when_the_pods_may_not_be_read(rig: Rig, server: ApiServerSimulator) -> None:
    """A right that is missing costs the comfort alone: nothing is withheld or tried again early,
    everything else goes on.
    """
    server.refuse("GET", "pods", code=403, reason="Forbidden", times=100)
    async with rig.gateway():
        prepared = await prepare(rig, make_waiting(server, "gpu-0"))

    assert prepared.error == ""
    assert annotated(server) == ""
