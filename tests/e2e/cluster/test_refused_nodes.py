"""A gated pod whose node kube-scheduler refuses, here because of its volume, on a real API server
with kube-scheduler and kube-controller-manager.

The controller runs in this process, with a nats-server of its own; the devices are
published by nobody's driver, so that nothing has to run on the node, and no
container starts. One real node is enough; a second one is an object without a kubelet.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest_asyncio
from lightkube.resources.core_v1 import Node, PersistentVolumeClaim

from support.cluster import Cluster, until
from support.cluster_home import GATE, running_controller
from topobus.controller.config import ClusterSettings, ControllerSettings
from topobus.simulation.nats_server import NatsServer

_ELSEWHERE = "topobus-e2e-elsewhere"


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """The cluster that KUBECONFIG names; Topobus need not be on its node."""
    async with Cluster.open(Path(os.environ["KUBECONFIG"]), os.environ.get("TOPOBUS_CLUSTER_NODE", "")) as opened:
        yield opened


async def host_of(cluster: Cluster) -> str:
    """The node's label by which local volumes go."""
    labels: dict[str, str] = (await cluster.client.get(Node, cluster.node)).to_dict()["metadata"]["labels"]
    return labels["kubernetes.io/hostname"]


async def phase_of(cluster: Cluster, volume_claim: str) -> str:
    """The phase of a PersistentVolumeClaim."""
    claim: dict[str, Any] = (
        await cluster.client.get(PersistentVolumeClaim, volume_claim, namespace="default")
    ).to_dict()
    return str(claim.get("status", {}).get("phase", ""))


async def make_bound(cluster: Cluster, host: str) -> str:
    """Make a volume of one host, and a claim that the cluster binds to it; the claim's name."""
    volume_claim = await cluster.make_volume(host)
    await until(f"{volume_claim} is bound", partial(phase_of, cluster, volume_claim), lambda phase: phase == "Bound")
    return volume_claim


def message_of(pod: dict[str, Any], kind: str) -> str:
    """The message of a pod's condition that is False; empty while it is not."""
    conditions = pod.get("status", {}).get("conditions", ())
    return next(
        (str(each.get("message")) for each in conditions if each["type"] == kind and each["status"] == "False"), ""
    )


def settings() -> ControllerSettings:
    """The settings of a controller of this cluster."""
    return ControllerSettings(home="cluster", cluster=ClusterSettings(kubeconfig=os.environ["KUBECONFIG"]))


async def test_pod_goes_on_to_the_node_of_its_volume(cluster: Cluster) -> None:
    """The first node by name has a device and room, and the pod's volume is on the second: devices
    and pod end there.
    """
    driver = f"{cluster.run}.example.com"
    first = await cluster.make_node()
    await cluster.publish(driver, 1, node=first)
    await cluster.publish(driver, 1)
    claim = await cluster.make_claim(driver)
    volume = await make_bound(cluster, await host_of(cluster))
    pod = await cluster.make_pod(claim=claim, volume=volume, gate=GATE, also_on=first)
    async with NatsServer() as nats, running_controller(settings(), nats.url):
        bound = await until(
            f"pod {pod} has a node", partial(cluster.pod, pod), lambda seen: bool(seen["spec"].get("nodeName"))
        )
    allocation = (await cluster.claim(claim))["status"]["allocation"]

    assert bound["spec"]["nodeName"] == cluster.node
    assert [result["pool"] for result in allocation["devices"]["results"]] == [cluster.node]


async def test_pod_that_no_node_takes_leaves_the_device_to_another(cluster: Cluster) -> None:
    """The volume of the first pod is on a host that does not exist.

    It is told that kube-scheduler refuses it, and the second pod gets the only device.
    """
    driver = f"{cluster.run}.example.com"
    await cluster.publish(driver, 1)
    claims = [await cluster.make_claim(driver) for _ in range(2)]
    refused = await cluster.make_pod(claim=claims[0], volume=await make_bound(cluster, _ELSEWHERE), gate=GATE)
    async with NatsServer() as nats, running_controller(settings(), nats.url):
        await until(
            f"pod {refused} has no device",
            partial(cluster.pod, refused),
            lambda seen: "kube-scheduler could not place the pod there" in message_of(seen, "topobus.dev/Allocated"),
        )
        served = await cluster.make_pod(claim=claims[1], gate=GATE)
        bound = await until(
            f"pod {served} has a node", partial(cluster.pod, served), lambda seen: bool(seen["spec"].get("nodeName"))
        )
    allocated = [bool((await cluster.claim(claim)).get("status", {}).get("allocation")) for claim in claims]

    assert bound["spec"]["nodeName"] == cluster.node
    assert allocated == [False, True]
