"""The rights in deploy/kubernetes against what the gateway really asks of an API server: each is
granted, and none is granted for nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from support.gateway_rig import Rig, make_rig
from support.kustomize import built
from support.node_plane import NODE, device
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.pod_details import ClusterPodDetails
from topobus.gateway.config import ClusterSettings
from topobus.process.clock import SystemClock
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER
from topobus.values.request import Owner, OwnerKind
from topobus.values.sandbox import Sandbox

pytestmark = pytest.mark.integration

USER = "system:serviceaccount:topobus:topobus-gateway"
_ROLES = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


def roles(overlay: str) -> list[dict[str, Any]]:
    """The role objects of the gateway as an overlay deploys them."""
    return [
        manifest
        for manifest in built(overlay)
        if manifest["kind"] in _ROLES and manifest["metadata"]["name"] == "topobus-gateway"
    ]


@pytest.fixture
def server_with_roles() -> ApiServerSimulator:
    """A server that knows our roles, a node, and a claim."""
    server = ApiServerSimulator(token="admin", bookmark_s=0.5)
    for role in roles("kubernetes"):
        server.put(role)
    server.put({"kind": "Node", "metadata": {"name": NODE}})
    return server


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer, server_with_roles: ApiServerSimulator, tmp_path: Path) -> AsyncIterator[Rig]:
    """A gateway with its deployed account's token."""
    server = server_with_roles
    async with server, make_rig(nats_server.url, wipe_slices=lambda driver: server.wipe_slices(NODE, driver)) as made:
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig", user=USER, node=NODE)
        cluster = ClusterSettings(mode="kubeconfig", kubeconfig=str(kubeconfig), publish_delay_s=0.01)
        made.settings = structs.replace(made.settings, cluster=cluster)
        yield made


async def read_pod(settings: ClusterSettings, sandbox: Sandbox) -> Sandbox:
    """What the gateway reads of a pod when its sandbox is made."""
    cluster = KubernetesCluster.open(settings)
    try:
        return await ClusterPodDetails(cluster, SystemClock()).of(sandbox)
    finally:
        await cluster.close()


async def test_gateway_needs_every_right_that_it_has_and_no_other(
    rig: Rig, server_with_roles: ApiServerSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life in a cluster: publish, change, split and shrink, publish again after kubelet's wipe,
    prepare a claim at the third try, undo it, start again.
    """
    server = server_with_roles
    # Else the second try is counted after a minute.
    monkeypatch.setattr("topobus.gateway.cluster.event_recorder._COUNT_S", 0.0)
    many = [device(f"gpu-{index}", 0) for index in range(140)]

    def slices(count: int) -> bool:
        return len(server.objects("ResourceSlice", fields=f"spec.driver={DRIVER}")) == count

    async with rig.kubelet:
        await rig.plane.show("gpu", device("gpu-0", 0))
        async with rig.gateway():
            await server.until(lambda: slices(1), what="one slice")
            await rig.plane.show("gpu", *many)
            await server.until(lambda: slices(2), what="a second slice")
            await rig.plane.show("gpu", device("gpu-0", 0))
            await server.until(lambda: slices(1), what="one slice again")
            await rig.plane.show("gpu", device("gpu-0", 1))
            await server.until(
                lambda: [request for request in server.requests if request.method == "PUT"], what="an update"
            )
            await rig.kubelet.restart()
            await server.until(lambda: slices(1), what="a slice after the wipe")
            results = [{"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0"}]
            requests = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}
            claim = server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": requests})
            term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
            status = {"allocation": {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}}
            server.put({"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": requests, "status": status})
            reference = ClaimReference(name="c", uid=claim["metadata"]["uid"], drivers=(DRIVER,))
            await rig.kubelet.wait_for_driver(DRIVER)
            # A pod by resource has the device: the pod of the claim is told,
            # and tried again when it is free.
            holder = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="hash")
            await rig.plane.hold(holder, gpu=("gpu-0",))
            uses = {
                "nodeName": NODE,
                "containers": [{"name": "main", "ports": [{"hostPort": 8080, "containerPort": 80}]}],
                "resourceClaims": [{"name": "own", "resourceClaimName": "c"}],
            }
            server.put({"kind": "Pod", "metadata": {"name": "p"}, "spec": uses})
            (refused,) = await rig.kubelet.prepare_claims([reference])
            await server.until(lambda: len(server.objects("Event")) == 2, what="events on pod and claim")
            await rig.kubelet.prepare_claims([reference])
            await server.until(
                lambda: any(event["count"] > 1 for event in server.objects("Event")), what="an event counted up"
            )
            sandbox = Sandbox(
                id="s",
                uid=server.objects("Pod")[0]["metadata"]["uid"],
                namespace="default",
                name="p",
                network_namespace="/n",
            )
            details = await read_pod(rig.settings.cluster, sandbox)
            await rig.plane.let_go(holder)
            await server.until(lambda: server.objects("Pod")[0]["metadata"].get("annotations"), what="the annotation")
            (prepared,) = await rig.kubelet.prepare_claims([reference])
            await server.until(
                lambda: server.objects("ResourceClaim")[0]["status"].get("devices"), what="the device's state"
            )
            errors = await rig.kubelet.unprepare_claims([reference])
            await server.until(
                lambda: not server.objects("ResourceClaim")[0]["status"].get("devices"), what="no device's state"
            )
        async with rig.gateway():
            await rig.kubelet.wait_for_driver(DRIVER)
            await server.until(lambda: slices(1), what="the slice")

    assert "holds gpu-0" in refused.error
    assert prepared.error == ""
    assert errors == {}
    assert [port.host_port for port in details.host_ports] == [8080]
    assert [(request.method, request.path) for request in server.requests if request.code in (401, 403)] == []
    # What a real server alone can make necessary: it compares opaque parameters byte for byte
    # (`claim_wire`); tests/e2e/cluster/test_hands_reports.py uses them.
    byte_for_byte = {
        "update resourceclaims/status.resource.k8s.io",
        "associated-node:update resourceclaims/driver.resource.k8s.io",
    }
    assert {str(right) for right in server.rights_unused(USER)} == byte_for_byte
    assert {request.user for request in server.requests} == {USER}


async def test_start_up_taint_needs_one_right_more(rig: Rig, server_with_roles: ApiServerSimulator) -> None:
    """The plain role may not patch nodes, and that of the overlay may: the taint goes then."""
    server = server_with_roles
    server.put({"kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}})
    cluster = structs.replace(rig.settings.cluster, startup_taint="a:NoSchedule", expected_devices={"gpu": 1})
    await rig.plane.show("gpu", device("gpu-0", 0))
    async with rig.kubelet, rig.gateway(cluster=cluster):
        await rig.readiness.until(lambda report: "a:NoSchedule stays" in report.get("node-conditions", ""))
        for role in roles("kubernetes-startup-taint"):
            server.put(role)
        await server.until(lambda: not server.objects("Node")[0]["spec"]["taints"], what="no taint")
