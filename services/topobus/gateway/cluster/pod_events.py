"""Writes Kubernetes events on a pod and its claim when the claim could not be prepared, so that `kubectl describe` shows the reason and who holds the device.

Flows in: a pod, a claim, the error of its preparation. Flows out: one v1 Event on each, once for each text. An event that cannot be written is logged and
dropped, because nothing depends on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from topobus.domain.errors import TopobusError
from topobus.domain.names import ClaimUid, PodUid
from topobus.domain.request import Owner
from topobus.gateway.cluster.objects import Cluster
from topobus.gateway.core.waiting import NodePod
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["PodEvents"]

_REASON = "DevicesNotPrepared"
# An API server cuts nothing: longer messages are refused (core/v1 event validation).
_MAX_MESSAGE = 1024
_TAIL = "; tried again as soon as that is over"


class PodEvents:
    """Tells events of one node's pods."""

    def __init__(self, cluster: Cluster, clock: Clock, node: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._node = node
        self._published: dict[str, str] = {}
        """Uid of a pod or claim to what was told last."""

    def keep(self, uids: Collection[PodUid | ClaimUid]) -> None:
        """Forget what is gone."""
        self._published = {uid: event for uid, event in self._published.items() if uid in uids}

    async def publish(self, pod: NodePod, claim: Owner, error: str, users: Mapping[str, Owner]) -> None:
        """Tell both, unless they were told of the same error; `users` are the pods that have a device of the claim, as far as they are known."""
        who = "".join(f" ({user} uses {name})" for name, user in sorted(users.items()))
        message = f"node {self._node}: {error}{who}"[: _MAX_MESSAGE - len(_TAIL)] + _TAIL
        named = (("v1", "Pod", pod.name, pod.uid), ("resource.k8s.io/v1", "ResourceClaim", claim.name, claim.uid))
        for api_version, kind, name, uid in named:
            if self._published.get(uid) == error:
                continue
            self._published[uid] = error
            event = self._event({"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}, pod.namespace, message)
            try:
                rejected = await self._cluster.create_event(pod.namespace, event)
            except TopobusError as err:
                get_logger().warning("event.untold", kind=kind, name=name, error=str(err))
            else:
                # Conflict: it is there already, told by the process before this one.
                if rejected is not None and rejected.code != 409:
                    get_logger().warning("event.untold", kind=kind, name=name, error=rejected.message)

    def _event(self, involved: dict[str, str], namespace: str, message: str) -> dict[str, Any]:
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        # The name follows from what is told, so that a gateway that is started again makes no second one.
        digest = hashlib.sha256(f"{involved['uid']}/{message}".encode()).hexdigest()[:16]
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{involved['name'][:200]}.{digest}", "namespace": namespace},
            "involvedObject": {**involved, "namespace": namespace},
            "reason": _REASON,
            "message": message,
            "type": "Warning",
            "source": {"component": "topobus-gateway", "host": self._node},
            "reportingComponent": "topobus.dev/gateway",
            "reportingInstance": self._node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
