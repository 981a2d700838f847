"""Reads a pod's host ports and rates, which the container runtime does not give, from the API
server while the runtime waits for the sandbox.

When they cannot be read, the sandbox carries the reason, and only devices that need them are
refused. A pod that was read once is remembered, because its ports never change. So its sandbox can
be created again while the API server is away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import ValidationError, structs

from topobus.gateway.cluster.objects import PODS
from topobus.gateway.cluster.rules.pod_ports import bandwidth_of, host_ports_of
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.sandbox import HostPort, Sandbox

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["ClusterPodDetails"]

# The runtime starts nothing else on the node meanwhile, and disconnects its plugin after two
# seconds.
_LIMIT_S = 0.5
# More pods than a node runs. The oldest is forgotten.
_REMEMBERED = 500


class ClusterPodDetails:
    """Pods of this node, as the API server has them."""

    def __init__(self, cluster: KubernetesCluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._remembered: dict[str, tuple[tuple[HostPort, ...], dict[str, str]]] = {}

    async def of(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox with the pod's ports and rates, within half a second.

        A rate that the runtime gives has precedence, because the sandbox was created with it.
        Errors: raises nothing.
        """
        if not sandbox.network_namespace:
            # In the host's own network its ports are already open.
            return sandbox
        details = await self._read(sandbox)
        if isinstance(details, str):
            remembered = self._remembered.get(sandbox.uid)
            if remembered is None:
                get_logger().warning("pod.unread", pod=str(sandbox), pod_uid=sandbox.uid, error=details)
                return structs.replace(sandbox, ports_unknown=details)
            details = remembered
        ports, rates = details
        return structs.replace(
            sandbox, host_ports=ports, ports_unknown="", annotations={**rates, **sandbox.annotations}
        )

    async def _read(self, sandbox: Sandbox) -> tuple[tuple[HostPort, ...], dict[str, str]] | str:
        """Read the pod. A text is the reason why it could not be read."""
        try:
            async with self._clock.timeout(_LIMIT_S):
                pod = await self._cluster.get(PODS, sandbox.name, sandbox.namespace)
            if pod is None or pod.metadata.get("uid") != sandbox.uid:
                return f"pod {sandbox} with uid {sandbox.uid} is not in the cluster"
            details = host_ports_of(pod), bandwidth_of(pod)
        except TimeoutError:
            return f"pod {sandbox}: the API server did not answer within {_LIMIT_S} s"
        except (TopobusError, ValidationError) as err:
            return f"pod {sandbox}: {err}"
        while len(self._remembered) >= _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[sandbox.uid] = details
        return details
