"""Tracks which resources claims serve on this node: follows the DeviceClasses of the API server and
applies the pure rule.

A change of a resource's answer wakes the device plugins. Until the API server has answered, and
where it never does, the device plugins serve as they would without a cluster.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from topobus.engine.cel.selector import CelCompiler
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.objects import DEVICE_CLASSES, NODES, ClusterChangeKind
from topobus.gateway.cluster.rules.served_resources import class_of_resource, is_too_old, obstacle
from topobus.gateway.config import GatewaySettings
from topobus.gateway.node_state import NodeState, Offer
from topobus.process.clock import is_set_within
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable

if TYPE_CHECKING:
    from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster

__all__ = ["ServedByClaims"]

# In seconds. An API server answers within some hundredths of a second. One that does not must not
# delay kubelet (a node is registered within three seconds).
_FIRST_ANSWER_S = 2.0


class ServedByClaims:
    """Decides for each resource whether claims serve it."""

    def __init__(self, cluster: KubernetesCluster, state: NodeState, settings: GatewaySettings) -> None:
        self._cluster = cluster
        self._state = state
        self._settings = settings
        self._compiler = CelCompiler()
        self._classes: dict[str, ApiObject] | None = None
        """By name. None: the API server has not sent them yet."""
        self._is_known = asyncio.Event()
        self._too_old = ""
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Follow the classes until cancelled."""
        if self._settings.resources_by != "auto":
            return
        async for change in self._cluster.watch(DEVICE_CLASSES, fields=""):
            classes = {} if change.kind is ClusterChangeKind.SNAPSHOT or self._classes is None else dict(self._classes)
            for api_object in change.objects:
                name = str(api_object.metadata.get("name", ""))
                if change.kind is ClusterChangeKind.DELETE:
                    classes.pop(name, None)
                else:
                    classes[name] = api_object
            if change.kind is ClusterChangeKind.SNAPSHOT:
                await self._read_version()
            self._classes = classes
            self._is_known.set()
            self._state.changed.announce()

    async def wait(self) -> None:
        """Wait a short time for the first answer of the API server."""
        if self._settings.resources_by != "auto":
            return
        if not await is_set_within(self._is_known, asyncio.timeout(_FIRST_ANSWER_S)):
            get_logger().warning(
                "device-classes.unknown",
                waited_s=_FIRST_ANSWER_S,
                next_step="let the gateway list and watch deviceclasses",
            )

    def serves(self, offer: Offer) -> bool:
        """Return whether claims serve a resource. The node state's `changed` announces changes."""
        why = self._obstacle(offer)
        if self._said.get(offer.resource) != why:
            self._said[offer.resource] = why
            is_named = class_of_resource(offer.resource, (self._classes or {}).values()) is not None
            facts = {"resource": offer.resource, "by": "device-plugin" if why else "claims", "why": why}
            if why and is_named and self._settings.resources_by == "auto":
                # kube-scheduler makes claims by the class even where kubelet lists too few devices,
                # and kubelet then starts no such pod.
                get_logger().warning(
                    "resource.served",
                    **facts,
                    next_step="let the class select the resource's devices alone, or name no resource",
                )
            else:
                get_logger().info("resource.served", **facts)
        return not why

    async def is_known_to_kubelet(self, resource: str) -> bool:
        """Return whether kubelet still counts devices of a resource from an earlier gateway
        process, according to its Node.

        True when the Node cannot be read.
        """
        try:
            status = await self._node_status()
        except PeerUnavailable:
            return True
        capacity = status.get("capacity")
        return isinstance(capacity, dict) and str(capacity.get(resource, "0")) != "0"

    def _obstacle(self, offer: Offer) -> str:
        settings = self._settings
        if settings.resources_by == "device-plugin" or not settings.offers_dra(offer.device_class, offer.pool):
            return "the settings exclude claims for it"
        if settings.resources_by == "claims":
            return ""
        if self._classes is None:
            return "the DeviceClasses are not read from the API server yet"
        if self._too_old:
            return self._too_old
        if settings.ids_of(offer.device_class, offer.resource) != "topobus":
            return "its devices have ids of another kind, which only kubelet's device plugins report"
        inventory = self._state.inventories().get(offer.device_class)
        listed = {entry.id for entry in self._state.entries(offer.resource)}
        devices = [device for device in (inventory.devices if inventory is not None else ()) if not device.is_excluded]
        # A shared device is listed by its replicas.
        offered = {
            device.name: settings.shown(device)
            for device in devices
            if device.name in listed or (device.sharing is not None and device.pool == offer.pool)
        }
        if not offered:
            # There is nothing to compare. The previous answer stays, because only devices that are
            # away have changed.
            return self._said.get(offer.resource, "it has no device")
        others = [
            shown for device in devices if device.name not in offered and (shown := settings.shown(device)) is not None
        ]
        return obstacle(offer.resource, offered, others, self._classes.values(), self._compiler)

    async def _read_version(self) -> None:
        try:
            status = await self._node_status()
        except PeerUnavailable:
            return
        info = status.get("nodeInfo")
        version = str(info.get("kubeletVersion", "")) if isinstance(info, dict) else ""
        self._too_old = f"kubelet {version} does not prepare such claims" if is_too_old(version) else ""

    async def _node_status(self) -> dict[str, Any]:
        node = await self._cluster.get(NODES, self._state.node)
        return dict(node.status) if node is not None else {}
