"""The device plugin of a resource that claims serve: it withdraws kubelet's list, and stays as long
as pods have devices through it.

kubelet 1.36 does not call a plugin for a container whose pod has a claim for the resource. But a
plugin that merely ended would be in the way for five minutes, for three reasons: devices with NUMA
nodes in its list make the Topology Manager reject the pod, `pre_start_required` makes the
container's start fail (`no devices found allocated in local cache`), and a resource without any
plugin of which an older pod still has devices fails every start (`endpoint not found in cache`).
Source: k8s.io/kubernetes pkg/kubelet/cm/devicemanager manager.go, topology_hints.go, 1.36.2.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from topobus.gateway.node_state import NodeState, Offer
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.process.broadcast import Broadcast
from topobus.values.request import OwnerKind

__all__ = ["WithdrawnPlugin", "held_by_plugin"]


def held_by_plugin(state: NodeState, offer: Offer) -> frozenset[str]:
    """Return the devices that pods have by kubelet's allocation of a resource.

    Shares and devices that left the inventory are included.
    """
    whole = {
        name
        for name, owner in state.holders(offer.device_class).items()
        if (owner.kind, owner.name) == (OwnerKind.DEVICE_PLUGIN, offer.resource)
    }
    parts = {
        name
        for name, shares in state.sharers(offer.device_class).items()
        if any((owner.kind, owner.name) == (OwnerKind.DEVICE_PLUGIN, offer.resource) for owner, _ in shares)
    }
    return frozenset(whole | parts)


class WithdrawnPlugin(rpc.DevicePluginServicer):
    """Offers nothing. It lists only unhealthy devices that pods have through this resource."""

    def __init__(self, offer: Offer, state: NodeState, streams_changed: Broadcast) -> None:
        self._streams_changed = streams_changed
        self.open_streams = 0
        self.streams_seen = 0
        self.is_over = False
        """kubelet got the list, and no pod has a device through it. The stream has ended after
        the list, so that kubelet reads both in this order."""
        self._offer = offer
        self._state = state

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.DevicePluginOptions]
    ) -> pb.DevicePluginOptions:
        """Return options without PreStartContainer calls."""
        return pb.DevicePluginOptions()

    async def ListAndWatch(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.ListAndWatchResponse]
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the list at once and after every change."""
        self.open_streams, self.streams_seen = self.open_streams + 1, self.streams_seen + 1
        self._streams_changed.announce()
        try:
            sent: pb.ListAndWatchResponse | None = None
            while True:
                ticket = self._state.changed.ticket()
                message = self._message()
                if message != sent:
                    sent = message
                    yield message
                if not held_by_plugin(self._state, self._offer):
                    self.is_over = True
                    return
                await ticket.wait()
        finally:
            self.open_streams -= 1
            self._streams_changed.announce()

    async def Allocate(
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """Refuse, because kubelet chose from the list before its withdrawal."""
        text = (
            f"{self._offer.resource}: it is served by claims, which kube-scheduler makes: delete the pod, so that "
            "it is scheduled again"
        )
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        raise AssertionError  # abort() raises

    def _message(self) -> pb.ListAndWatchResponse:
        """Build the list of unhealthy devices that are held. kubelet takes a device that is not in
        the list for healthy, and one without NUMA nodes has no opinion.
        """
        held = held_by_plugin(self._state, self._offer)
        entries = [
            entry for entry in self._state.entries(self._offer.resource) if entry.id in held and not entry.is_healthy
        ]
        return pb.ListAndWatchResponse(devices=[pb.Device(ID=entry.wire_id, health="Unhealthy") for entry in entries])
