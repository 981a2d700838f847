"""A device that a claim has fails and is well again: pod and claim are told, also where kubelet and
the cluster's taint eviction do not look (`status.extendedResourceClaimStatus`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

SICK, WELL = "DeviceUnhealthy", "DeviceHealthy"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server: ApiServerSimulator) -> AsyncIterator[Rig]:
    """Two GPUs, a running kubelet, a gateway that knows the cluster."""
    async with make_rig(nats_server.url, wipe_slices=lambda driver: server.wipe_slices(NODE, driver)) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
        made.join(server)
        async with made.kubelet:
            yield made


def make_running(
    server: ApiServerSimulator, *, by_resource: bool, is_controlled: bool = True, **result: Any
) -> ClaimReference:
    """Make a pod `p` that runs on the node with a claim `c` of gpu-0: one that it names, or one
    that the scheduler made of its resources.
    """
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}
    claim = {"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": spec}
    uid = server.put(claim)["metadata"]["uid"]
    results = [{"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0", **result}]
    server.put({**claim, "status": {"allocation": {"devices": {"results": results}}}})
    owners = (
        [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u-r", "controller": True}]
        if is_controlled
        else []
    )
    named = {} if by_resource else {"resourceClaims": [{"name": "own", "resourceClaimName": "c"}]}
    server.put(
        {
            "kind": "Pod",
            "metadata": {"name": "p", "ownerReferences": owners},
            "spec": {"nodeName": NODE, "containers": [{"name": "main"}], **named},
            "status": {"extendedResourceClaimStatus": {"resourceClaimName": "c", "requestMappings": []}}
            if by_resource
            else {},
        }
    )
    return ClaimReference(name="c", uid=uid, drivers=(DRIVER,))


async def prepare(rig: Rig, reference: ClaimReference) -> None:
    """Prepare a claim through kubelet."""
    await rig.kubelet.wait_for_driver(DRIVER)
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    assert prepared.error == ""


def messages(server: ApiServerSimulator, reason: str) -> dict[str, str]:
    """What events of a reason say, by the kind of object."""
    return {
        event["involvedObject"]["kind"]: event["message"]
        for event in server.objects("Event")
        if event["reason"] == reason
    }


def condition(server: ApiServerSimulator, kind: str = "Healthy") -> dict[str, Any]:
    """A condition of the claim's one device; empty: it has none."""
    entries = (server.objects("ResourceClaim")[0].get("status") or {}).get("devices") or [{}]
    return next((each for each in entries[0].get("conditions") or () if each["type"] == kind), {})


def evictions(server: ApiServerSimulator) -> list[str]:
    """Which evictions were asked for."""
    return [request.path for request in server.requests if request.path.endswith("/eviction")]


@pytest.mark.parametrize("by_resource", [True, False], ids=["by-resource", "by-claim"])
async def test_pod_and_claim_are_told_when_a_device_fails_and_when_it_is_well_again(
    rig: Rig, server: ApiServerSimulator, by_resource: bool
) -> None:
    """One event each on both, and the condition in the claim's status.

    Between sick and well nothing is said. A claim that was never hurt has no condition.
    """
    async with rig.gateway():
        await prepare(rig, make_running(server, by_resource=by_resource))
        await server.until(lambda: condition(server, "Ready"), what="the claim's status")
        before = condition(server)
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 0))
        await server.until(lambda: condition(server).get("status") == "False", what="the condition")
        await server.until(lambda: len(messages(server, SICK)) == 2, what="events on pod and claim")
        failed = condition(server)
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.RECOVERING), device("gpu-1", 0))
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
        await server.until(lambda: condition(server).get("status") == "True", what="the condition")
        await server.until(lambda: len(messages(server, WELL)) == 2, what="events on pod and claim")

    assert before == {}
    assert (failed["reason"], failed["message"]) == ("Ecc", "its service gives no reason (ecc)")
    assert condition(server)["reason"] == "Recovered"
    assert condition(server, "Ready")["reason"] == "Prepared"
    assert messages(server, SICK).keys() == {"Pod", "ResourceClaim"}
    assert (
        f"node {NODE}: claim default/c: gpu-0 is unhealthy: its service gives no reason (ecc)"
        in messages(server, SICK)["Pod"]
    )
    assert ["cluster.evict_after_s" in message for message in messages(server, SICK).values()] == [by_resource] * 2
    assert messages(server, WELL) == dict.fromkeys(
        ("Pod", "ResourceClaim"), f"node {NODE}: claim default/c: gpu-0 is well again"
    )
    assert len([event for event in server.objects("Event") if event["reason"] in (SICK, WELL)]) == 4
    assert evictions(server) == []


async def test_recovery_is_told_when_the_gateway_was_away_meanwhile(rig: Rig, server: ApiServerSimulator) -> None:
    """What stands in the claim is on disk: a gateway that starts says that the device is well, and
    says nothing twice.
    """
    async with rig.gateway():
        await prepare(rig, make_running(server, by_resource=True))
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 0))
        await server.until(lambda: condition(server).get("status") == "False", what="the condition")
        await server.until(lambda: len(messages(server, SICK)) == 2, what="events on pod and claim")
    await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
    async with rig.gateway():
        await server.until(lambda: condition(server).get("status") == "True", what="the condition")
        await server.until(lambda: len(messages(server, WELL)) == 2, what="events on pod and claim")

    assert len([event for event in server.objects("Event") if event["reason"] == SICK]) == 2


@pytest.mark.parametrize(
    ("by_resource", "is_controlled", "evict_after_s", "is_evicted"),
    [
        pytest.param(True, True, 0.05, True, id="by-resource"),
        pytest.param(True, True, 0.0, False, id="not-without-the-setting"),
        pytest.param(True, False, 0.05, False, id="not-a-bare-pod"),
        pytest.param(False, True, 0.05, False, id="not-by-claim-which-the-cluster-evicts"),
    ],
)
async def test_pod_by_resource_is_evicted_when_its_device_fails_and_a_setting_allows_it(
    rig: Rig, server: ApiServerSimulator, by_resource: bool, is_controlled: bool, evict_after_s: float, is_evicted: bool
) -> None:
    """The cluster evicts pods by `spec.resourceClaims` for the taint.

    For the claim of a pod's resources it is the gateway, as for a pod that loses a device.
    """
    async with rig.gateway(cluster=structs.replace(rig.settings.cluster, evict_after_s=evict_after_s)):
        await prepare(rig, make_running(server, by_resource=by_resource, is_controlled=is_controlled))
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 0))
        if is_evicted:
            await server.until(lambda: evictions(server), what="an eviction")
        else:
            await server.until(lambda: len(messages(server, SICK)) == 2, what="events on pod and claim")
            await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 0))
            await server.until(lambda: len(messages(server, WELL)) == 2, what="events on pod and claim")

    assert [path.rpartition("/pods/")[2] for path in evictions(server)] == ["p/eviction"] * is_evicted


async def test_nobody_is_told_when_a_claim_only_looks_at_the_device(rig: Rig, server: ApiServerSimulator) -> None:
    """A monitor with admin access has all devices: none of them is its own."""
    async with rig.gateway():
        await prepare(rig, make_running(server, by_resource=False, adminAccess=True))
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 0))
        await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Unhealthy")

    assert messages(server, SICK) == {}
