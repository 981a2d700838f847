"""What the gateway knows of a pod besides the runtime's word: its host ports, or why they are not
known, within half a second.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec import structs

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.objects import PODS, Kind
from topobus.gateway.cluster.pod_details import ClusterPodDetails
from topobus.gateway.cluster.rules.pod_ports import bandwidth_of, host_ports_of
from topobus.testing.clock import LoopClock
from topobus.values.errors import PeerUnavailable
from topobus.values.sandbox import HostPort, Sandbox

pytestmark = pytest.mark.virtual_time

RATE = "kubernetes.io/ingress-bandwidth"
SANDBOX = Sandbox(id="s", uid="u", namespace="default", name="p", network_namespace="/var/run/netns/x")


def pod(
    *containers: dict[str, Any], uid: str = "u", annotations: dict[str, str] | None = None, **spec: Any
) -> ApiObject:
    """A pod as the API server has it."""
    metadata = {"uid": uid, "annotations": annotations or {}}
    return ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec={"containers": list(containers), **spec})


class Pods:
    """An API server's one pod."""

    def __init__(self, answer: ApiObject | PeerUnavailable | None, *, takes_s: float = 0.0) -> None:
        self.answer = answer
        self.takes_s = takes_s
        self.reads = 0

    async def get(self, kind: Kind, name: str, namespace: str = "") -> ApiObject | None:
        """Read the pod."""
        assert (kind, name, namespace) == (PODS, "p", "default")
        self.reads += 1
        await asyncio.sleep(self.takes_s)
        if isinstance(self.answer, PeerUnavailable):
            raise self.answer
        return self.answer


WEB = pod({"ports": [{"hostPort": 8080, "containerPort": 80}]}, annotations={RATE: "10M", "other": "x"})


def details(pods: Pods) -> ClusterPodDetails:
    """What the gateway knows of them."""
    return ClusterPodDetails(cast(KubernetesCluster, pods), LoopClock())


@pytest.mark.parametrize(
    ("spec", "ports"),
    [
        pytest.param({"containers": [{"ports": [{"containerPort": 80}]}]}, [], id="no host port"),
        pytest.param(
            {
                "containers": [
                    {"ports": [{"hostPort": 53, "containerPort": 5353, "protocol": "UDP", "hostIP": "10.0.0.1"}]}
                ]
            },
            [HostPort(host_port=53, container_port=5353, protocol="udp", host_ip="10.0.0.1")],
            id="all fields",
        ),
        pytest.param(
            {
                "containers": [{"ports": [{"hostPort": 1, "containerPort": 1}]}],
                "initContainers": [
                    {"ports": [{"hostPort": 2, "containerPort": 2}]},
                    {"ports": [{"hostPort": 3, "containerPort": 3}], "restartPolicy": "Always"},
                ],
            },
            [HostPort(host_port=3, container_port=3), HostPort(host_port=1, container_port=1)],
            id="an init container that stays, none that ends",
        ),
        pytest.param(
            {"containers": [{"ports": [{"hostPort": 1, "containerPort": 1}]}], "hostNetwork": True},
            [],
            id="host network",
        ),
        pytest.param({"containers": [{"ports": None}, {}]}, [], id="nothing"),
    ],
)
def test_host_ports_are_those_that_the_scheduler_counts(spec: dict[str, Any], ports: list[HostPort]) -> None:
    """Of containers that run as long as the pod; a pod in the host's network opens none."""
    assert list(host_ports_of(ApiObject(api_version="v1", kind="Pod", metadata={}, spec=spec))) == ports


def test_annotations_are_the_two_that_are_read() -> None:
    """Whatever else a pod's author wrote stays where it is."""
    assert bandwidth_of(WEB) == {RATE: "10M"}
    assert bandwidth_of(ApiObject(api_version="v1", kind="Pod", metadata={"annotations": None})) == {}


async def test_sandbox_gets_the_pods_ports_and_rates() -> None:
    """What the runtime says of a rate counts: the sandbox was made with it."""
    plain = await details(Pods(WEB)).of(SANDBOX)
    changed = await details(Pods(WEB)).of(structs.replace(SANDBOX, annotations={RATE: "1M"}))

    assert (plain.host_ports, plain.annotations, plain.ports_unknown) == (
        (HostPort(host_port=8080, container_port=80),),
        {RATE: "10M"},
        "",
    )
    assert changed.annotations == {RATE: "1M"}


async def test_pod_in_the_hosts_network_is_not_read() -> None:
    """Its ports are there already: no call."""
    pods = Pods(WEB)

    sandbox = await details(pods).of(Sandbox(id="s", uid="u", namespace="default", name="p"))

    assert (sandbox.host_ports, sandbox.ports_unknown, pods.reads) == ((), "", 0)


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        pytest.param(Pods(None), "is not in the cluster", id="gone"),
        pytest.param(Pods(pod(uid="another")), "with uid u is not in the cluster", id="another"),
        pytest.param(Pods(PeerUnavailable("API server: away", retry_after_s=0.0)), "away", id="away"),
        pytest.param(Pods(WEB, takes_s=10.0), "did not answer within 0.5 s", id="hangs"),
        pytest.param(
            Pods(pod({"ports": [{"hostPort": 99999, "containerPort": 1}]})), "Expected `int` <= 65535", id="no port"
        ),
    ],
)
async def test_ports_are_unknown_when_the_pod_cannot_be_read(pods: Pods, why: str) -> None:
    """The sandbox says why, and half a second is all that it takes: only what needs the ports is
    refused.
    """
    begun = asyncio.get_running_loop().time()

    sandbox = await details(pods).of(SANDBOX)

    assert asyncio.get_running_loop().time() - begun <= 0.5
    assert sandbox.host_ports == ()
    assert why in sandbox.ports_unknown


async def test_pod_that_was_read_once_is_known_while_the_server_is_away() -> None:
    """Ports never change: a sandbox that is made anew needs nobody."""
    pods = Pods(WEB)
    gateway = details(pods)
    before = await gateway.of(SANDBOX)
    pods.answer = PeerUnavailable("away", retry_after_s=0.0)

    after = await gateway.of(SANDBOX)
    other = await gateway.of(Sandbox(id="s", uid="another", namespace="default", name="p", network_namespace="/x"))

    assert (after.host_ports, after.ports_unknown) == (before.host_ports, "")
    assert other.ports_unknown
