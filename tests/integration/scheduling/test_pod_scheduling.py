"""Stored pods on a real server: a node for each, claims allocated and reserved with them, and all
of it let go again.
"""

from __future__ import annotations

import msgspec
import pytest

from support.controllers import SETTINGS, controller, reasons
from support.reading import Reader
from support.scheduling_home import TEMPLATE, Place, claim, pod
from topobus.bus.bus import Start
from topobus.engine.claims.reservations import AllocationMode
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import PlaceRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.outcome import Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

DELAYED = msgspec.structs.replace(SETTINGS, claim_allocation=AllocationMode.DELAYED)


async def test_pod_gets_node_claims_and_own_devices_when_all_fit(served: Place) -> None:
    """A pod with a template, a named claim and GPUs of its own gets all of them on one node,
    reserved for it, and nothing twice.
    """
    await served.apply(TEMPLATE)
    await served.apply(claim("named", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("trainer", "named", gpus=3, template="two-gpus"))

    node = await served.scheduled("trainer")

    held = served.held(node)
    (made,) = [name for name in held if name.startswith("claim/default/trainer-made-")]
    assert {name: len(devices) for name, devices in held.items()} == {
        made: 2,
        "claim/default/named": 1,
        "pod/default/trainer": 3,
    }
    assert len({device for devices in held.values() for device in devices}) == 6
    for name in (made.rpartition("/")[2], "named"):
        users = (await served.claim(name)).status["reservedFor"]
        assert [(user["resource"], user["name"]) for user in users] == [("pods", "trainer")]


async def test_pod_lets_go_of_everything_when_it_is_deleted(served: Place) -> None:
    """Own devices, template claims and reservations go with the pod.

    A delayed claim gives its devices back, an immediate one keeps them.
    """
    await served.apply(TEMPLATE)
    await served.apply(claim("late", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(claim("early", 1, allocation_mode="Immediate"))
    await served.apply(pod("trainer", "late", "early", gpus=1, template="two-gpus"))
    node = await served.scheduled("trainer")
    (made,) = [owner.rpartition("/")[2] for owner in served.held(node) if "/trainer-made-" in owner]

    await served.delete("pod", "trainer")
    await served.gone("pod", "trainer")
    await served.gone("resourceclaim", made)
    await served.until_reason("late", "WaitsForPod")
    await served.until(
        "resourceclaim", "early", lambda value: value is not None and not value.status.get("reservedFor")
    )

    assert {name: len(devices) for name, devices in served.held(node).items()} == {"claim/default/early": 1}
    names = [entry.value.metadata["name"] for entry in await served.bus.list(catalogue.OBJECT, kind="resourceclaim")]
    assert sorted(names) == ["early", "late"]


async def test_pod_leaves_nothing_when_its_object_is_removed_by_force(served: Place) -> None:
    """A pod deleted past its finalizer leaves no devices held, no reservation and no claim of its
    own; nor when no controller saw it go.
    """
    await served.apply(TEMPLATE)
    await served.apply(claim("late", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("lost", "late", gpus=2, template="two-gpus"))
    node = await served.scheduled("lost")

    await served.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="lost")

    await served.until_reason("late", "WaitsForPod")
    await served.apply(pod("next", gpus=8, extra=f"  nodeName: {node}"))
    assert await served.scheduled("next") == node


async def test_controller_lets_go_of_a_pod_that_was_removed_while_it_was_away(
    home: Place, nats_server: NatsServer
) -> None:
    """The store's history is the evidence for a controller that was not there.

    A pod that was never stored keeps what it holds.
    """
    owner = Owner(kind=OwnerKind.POD, name="placed-by-hand", uid="somebody")
    asked = PodRequest(
        owner=owner, containers=(ContainerRequest(name="c", devices=(DeviceRequest(device_class="gpu", count=1),)),)
    )
    await home.bus.ask(catalogue.PLACE, PlaceRequest(op_id="by-hand", pod=asked), node="n1")
    await home.apply(pod("lost", gpus=2, extra="  nodeName: n1"))
    async with controller(nats_server.url):
        await home.scheduled("lost")
    await home.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="lost")

    async with controller(nats_server.url):
        await home.apply(pod("next", gpus=7, extra="  nodeName: n1"))
        await home.scheduled("next")

    assert {name: len(devices) for name, devices in home.held("n1").items()} == {
        "pod/default/next": 7,
        "pod/default/placed-by-hand": 1,
    }


async def test_delayed_claim_waits_when_no_pod_uses_it(home: Place, nats_server: NatsServer) -> None:
    """With delayed allocation as the setting a claim says that it waits for a pod.

    The pod's coming allocates it; Immediate in the claim itself wins.
    """
    async with controller(nats_server.url, DELAYED):
        await home.apply(claim("later", 1))
        await home.apply(claim("now", 1, allocation_mode="Immediate"))
        await home.until_reason("later", "WaitsForPod")
        await home.until(
            "resourceclaim", "now", lambda value: value is not None and bool(value.status.get("allocation"))
        )
        assert "allocation" not in (await home.claim("later")).status

        await home.apply(pod("user", "later"))
        await home.scheduled("user")

        assert (await home.claim("later")).status["allocation"]


async def test_claim_is_shared_when_two_pods_name_it(served: Place) -> None:
    """Two pods of one claim run on one node; the claim stays until the last of them is gone."""
    await served.apply(claim("shared", 2, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("one", "shared", gpus=1))
    first = await served.scheduled("one")
    await served.apply(pod("two", "shared", gpus=1))
    second = await served.scheduled("two")
    assert first == second
    assert [user["name"] for user in (await served.claim("shared")).status["reservedFor"]] == ["one", "two"]

    await served.delete("pod", "one")
    await served.until("pod", "one", lambda value: value is None)
    assert (await served.claim("shared")).status["allocation"]
    await served.delete("pod", "two")

    await served.until_reason("shared", "WaitsForPod")
    assert served.held(first) == {}


NETWORK = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: volume}
spec: {selectors: [{cel: {expression: 'device.driver == "volume.example.com"'}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: volumes}
spec:
  driver: volume.example.com
  pool: {name: volumes, generation: 1, resourceSliceCount: 1}
  allNodes: true
  devices: [{name: vol-0}, {name: vol-1}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: volume, annotations: {topobus.dev/allocation-mode: WaitForFirstConsumer}}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: volume}}]}}
"""


async def test_claim_of_the_network_is_shared_by_pods_on_two_nodes(served: Place) -> None:
    """A device that every node reaches binds no pod to a node: two pods share it, each where its
    own devices are, and it is given back after the second.
    """
    await served.apply(NETWORK)
    await served.apply(pod("one", "volume", gpus=8))
    await served.apply(pod("two", "volume", gpus=8))

    assert {await served.scheduled("one"), await served.scheduled("two")} == {"n1", "n2"}
    shared = await served.claim("volume")
    assert "nodeSelector" not in shared.status["allocation"]
    assert [user["name"] for user in shared.status["reservedFor"]] == ["one", "two"]
    for name in ("one", "two"):
        await served.delete("pod", name)
    await served.until_reason("volume", "WaitsForPod")
    assert {**served.held("n1"), **served.held("n2")} == {}


async def test_allocation_is_taken_back_when_the_pod_fits_only_elsewhere(served: Place) -> None:
    """A claim allocated at once on a node that the pod cannot use is allocated again where the pod
    fits.
    """
    await served.apply(claim("card", 1, allocation_mode="Immediate"))
    await served.until(
        "resourceclaim", "card", lambda value: value is not None and bool(value.status.get("allocation"))
    )
    assert served.held("n1") == {"claim/default/card": ["gpu-0000-18-00-0"]}
    await served.apply(pod("big", "card", gpus=1, extra="  nodeSelector: {kubernetes.io/hostname: n2}"))

    assert await served.scheduled("big") == "n2"

    assert served.held("n1") == {}
    assert {name: len(devices) for name, devices in served.held("n2").items()} == {
        "claim/default/card": 1,
        "pod/default/big": 1,
    }


async def test_allocation_stays_when_another_pod_has_reserved_it(served: Place) -> None:
    """A claim in use is never taken away.

    The pod is told where it is and waits, and goes on when the other is gone.
    """
    await served.apply(claim("card", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("first", "card", extra="  nodeName: n1"))
    await served.scheduled("first")
    await served.apply(pod("second", "card", extra="  nodeName: n2"))

    message = await served.until_reason("second", "Unschedulable", "pod")
    assert "node n2: ResourceClaim default/card is allocated for node n1" in message
    assert len(served.held("n1")) == 1
    await served.delete("pod", "first")

    assert await served.scheduled("second") == "n2"


async def test_pod_tries_another_node_when_one_refuses(served: Place) -> None:
    """A node that said yes and then refuses is left alone for a while; the claim moves along."""
    await served.apply(claim("card", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("trainer", gpus=1, extra="  schedulingGates: [{name: hold}]"))
    await served.until_reason("trainer", "SchedulingGated", "pod")
    served.nodes["n1"].refuse_next = 1000
    await served.apply(pod("mover", "card", gpus=1))

    assert await served.scheduled("mover") == "n2"

    assert served.held("n1") == {}
    assert {name: len(devices) for name, devices in served.held("n2").items()} == {
        "claim/default/card": 1,
        "pod/default/mover": 1,
    }


async def test_pod_waits_quietly_when_its_claims_take_what_it_needs_itself(served: Place) -> None:
    """Eight GPUs of its own and one by claim fit on no node of eight: it is told so and its claim
    is not moved around for ever.
    """
    await served.apply(claim("one-more", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("glutton", "one-more", gpus=8))

    message = await served.until_reason("glutton", "Unschedulable", "pod")

    assert "node n1" in message
    assert "node n2" in message
    writes = [change for change in served.objects.items if change.parts.get("name") == "one-more"]
    assert "allocation" not in (await served.claim("one-more")).status
    assert len(writes) <= 3


async def test_pod_is_told_per_node_when_it_fits_nowhere(served: Place) -> None:
    """The pod's condition and its claim's name what each node lacks.

    When something is freed the pod goes on.
    """
    await served.apply(claim("full", 6, allocation_mode="Immediate"))
    await served.until(
        "resourceclaim", "full", lambda value: value is not None and bool(value.status.get("allocation"))
    )
    await served.apply(claim("all", 8))
    await served.apply(pod("greedy", "all", extra="  nodeName: n1"))

    # Before that the pod is told that its claim is being allocated.
    greedy = await served.until("pod", "greedy", lambda value: "node n1" in reasons(value).get("Unschedulable", ""))
    claim_message = await served.until_reason("all", "DoesNotFit")
    assert (
        "node n1: request r wants 8 devices of class gpu.topobus.dev, found 2 of 8 (6 devices: held by claim "
        "default/full)" in reasons(greedy)["Unschedulable"]
    )
    assert "6 devices: held by claim default/full" in claim_message
    await served.delete("resourceclaim", "full")

    assert await served.scheduled("greedy") == "n1"


async def test_claim_is_advised_when_it_does_not_fit(served: Place) -> None:
    """Beside the reasons stands the nearest miss and what would fit, in a condition of its own and
    in the event.

    It goes when the claim is allocated.
    """
    await served.apply(claim("taker", 6, allocation_mode="Immediate"))
    await served.until(
        "resourceclaim", "taker", lambda value: value is not None and bool(value.status.get("allocation"))
    )
    async with Reader(served.bus.follow(catalogue.DECISION, start=Start.ALL)) as decisions:
        await served.apply(claim("greedy", 9))
        await served.until_reason("greedy", "DoesNotFit")
        events = await decisions.until(
            lambda items: any(isinstance(received_event.value.outcome, Refusal) for received_event in items)
        )

    advice = (await served.claim("greedy")).status["conditions"][1]
    assert (advice["type"], advice["reason"]) == ("Advice", "NearestMiss")
    assert advice["message"] == (
        "nearest miss: node n2 has 8 of 9 devices for request r; would fit on node n2 with 8 devices instead "
        "of 9 for request r"
    )
    refusal = next(
        received_event.value.outcome for received_event in events if isinstance(received_event.value.outcome, Refusal)
    )
    assert [reason.code for reason in refusal.reasons] == [
        "too-few-devices",
        "too-few-devices",
        "nearest-miss",
        "would-fit",
    ]
