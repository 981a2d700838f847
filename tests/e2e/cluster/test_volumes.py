"""Where the volumes of a pod let it go, on a real API server with kube-scheduler and
kube-controller-manager: the controller and the scheduler say the same.

The controller runs in this process, with a nats-server of its own; the devices are
published by nobody's driver, so that nothing has to run on the node, and no
container starts. One node is enough.
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
from topobus.engine.scheduling.kube_rules.scheduler_reasons import uncovered_reasons
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


async def test_devices_are_bound_only_where_the_pods_volume_is(cluster: Cluster) -> None:
    """A pod whose volume is on another host keeps its gate, gets no device and is told why.

    One whose volume is here gets both and is bound by kube-scheduler.
    """
    driver = f"{cluster.run}.example.com"
    await cluster.publish(driver, 2)
    far, near = await make_bound(cluster, _ELSEWHERE), await make_bound(cluster, await host_of(cluster))
    claims = [await cluster.make_claim(driver) for _ in range(2)]
    kept, served = [
        await cluster.make_pod(claim=claim, volume=volume, gate=GATE)
        for claim, volume in zip(claims, (far, near), strict=True)
    ]
    settings = ControllerSettings(home="cluster", cluster=ClusterSettings(kubeconfig=os.environ["KUBECONFIG"]))
    async with NatsServer() as nats, running_controller(settings, nats.url):
        bound = await until(
            f"pod {served} has a node", partial(cluster.pod, served), lambda pod: bool(pod["spec"].get("nodeName"))
        )
        waiting = await until(
            f"pod {kept} is told why it waits",
            partial(cluster.pod, kept),
            lambda pod: bool(message_of(pod, "topobus.dev/Allocated")),
        )
    allocated = [bool((await cluster.claim(claim)).get("status", {}).get("allocation")) for claim in claims]

    assert bound["spec"]["nodeName"] == cluster.node
    assert f"PersistentVolumeClaim default/{far} can be used on other nodes only" in message_of(
        waiting, "topobus.dev/Allocated"
    )
    assert allocated == [False, True]


async def test_scheduler_keeps_the_pod_off_in_words_that_are_known(cluster: Cluster) -> None:
    """Without a gate kube-scheduler itself says that the volume is elsewhere, and its words are
    those of a rule that is looked at before.
    """
    pod = await cluster.make_pod(volume=await make_bound(cluster, _ELSEWHERE))

    refused = await until(
        f"pod {pod} is refused", partial(cluster.pod, pod), lambda seen: bool(message_of(seen, "PodScheduled"))
    )

    message = message_of(refused, "PodScheduled")
    assert "volume" in message.lower()
    assert uncovered_reasons(message) == ()
