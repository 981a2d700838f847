"""The cluster suite's own steps, on the API server simulator: what it reads and makes is right there. Proves nothing about a real cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.cluster import Cluster, attribute_names, until
from support.gateway_rig import make_rig
from support.node_plane import NODE, device
from topobus.gateway.config import ClusterSettings
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.nats import NatsServer

pytestmark = pytest.mark.integration


async def test_suite_reads_slices_and_cleans_up_when_the_gateway_publishes(nats_server: NatsServer, tmp_path: Path) -> None:
    """It finds the node by itself, sees devices with attributes, makes a class, a claim and a pod, and leaves nothing of them."""
    async with ApiServerSimulator(token="secret", bookmark_s=0.5) as server, make_rig(nats_server.url) as rig:
        server.put({"kind": "Node", "metadata": {"name": NODE}, "status": {"allocatable": {"topobus.dev/gpu": "2"}}})
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        cluster_settings = ClusterSettings(mode="kubeconfig", kubeconfig=str(kubeconfig), publish_delay_s=0.01)
        rig.settings = msgspec.structs.replace(rig.settings, cluster=cluster_settings)
        async with rig.gateway(), Cluster.open(kubeconfig) as cluster:
            devices = await until("slices", lambda: cluster.devices("gpu.topobus.dev"), bool)
            offered = await cluster.allocatable("topobus.dev/gpu")
            claim = await cluster.make_claim("gpu.topobus.dev")
            pod = await cluster.pod(await cluster.make_pod(claim=claim))
            made = [len(server.objects(kind)) for kind in ("DeviceClass", "ResourceClaim", "Pod")]
        left = [len(server.objects(kind)) for kind in ("DeviceClass", "ResourceClaim", "Pod")]

    assert sorted(devices) == ["gpu-0", "gpu-1"]
    assert attribute_names(devices["gpu-0"]) >= {"numaNode"}
    assert offered == 2
    assert pod["spec"]["resourceClaims"] == [{"name": "devices", "resourceClaimName": claim}]
    assert (made, left) == ([1, 1, 1], [0, 0, 0])
