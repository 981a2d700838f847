"""The device plugin API of one class, as kubelet calls it.

Flows in: kubelet's calls. Flows out: lists from memory, the topology service's choice, the ledger's word, the device service's edits. Nothing here
waits for the cluster plane, and only Allocate waits for anybody longer than a moment.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import grpc.aio

from topobus.domain.edits import ContainerEdits
from topobus.domain.errors import TopobusError
from topobus.domain.outcome import Refusal
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.asks import NodeAsks
from topobus.gateway.core.edits import container_edits, foreign_variables
from topobus.gateway.core.lists import ListEntry
from topobus.gateway.node_state import Broadcast, NodeState
from topobus.gateway.sockets import CallMetrics, CallRefused, answer, refuse
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.runtime.logging import get_logger

__all__ = ["BeforeStart", "DevicePlugin", "plugin_owner"]

BeforeStart = Callable[[list[str]], Awaitable[Refusal | None]]
"""What else must be done before each start of a container with these devices; None is done."""

# kubelet receives with gRPC's default limit of 4 MiB; a larger message ends the stream and all devices with it.
_LIST_LIMIT_BYTES = 4 * 1024 * 1024 - 4096


def plugin_owner(resource: str, names: Sequence[str]) -> Owner:
    """Name the holder of an Allocate call, which tells no pod: the resource and a hash of the devices."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:32]
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=resource, uid=digest)


class DevicePlugin(rpc.DevicePluginServicer):
    """Serves one resource."""

    def __init__(
        self,
        device_class: str,
        resource: str,
        state: NodeState,
        asks: NodeAsks,
        metrics: CallMetrics,
        variables: dict[str, str],
        before_start: BeforeStart | None = None,
    ) -> None:
        self.device_class = device_class
        self.resource = resource
        self.streams_changed = Broadcast()
        self.open_streams = 0
        self.streams_seen = 0
        """How many streams were ever opened on this server."""
        self._state = state
        self._asks = asks
        self._metrics = metrics
        self._variables = variables
        self._before_start = before_start

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.DevicePluginOptions]
    ) -> pb.DevicePluginOptions:
        """Tell the options; kubelet asks while our Register call is pending."""
        return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.ListAndWatchResponse]
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the complete list at once and after every change, to each stream on its own."""
        self._count_streams(1)
        try:
            sent: pb.ListAndWatchResponse | None = None
            while True:
                ticket = self._state.changed.ticket()
                message = pb.ListAndWatchResponse(devices=[_to_wire(one) for one in self._state.entries(self.device_class)])
                if message.ByteSize() > _LIST_LIMIT_BYTES:
                    get_logger().error(
                        "list.too-large", device_class=self.device_class, size_bytes=message.ByteSize(), limit_bytes=_LIST_LIMIT_BYTES
                    )
                elif message != sent:
                    sent = message
                    yield message
                await ticket.wait()
        finally:
            self._count_streams(-1)

    async def GetPreferredAllocation(
        self,
        request: pb.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[pb.PreferredAllocationRequest, pb.PreferredAllocationResponse],
    ) -> pb.PreferredAllocationResponse:
        """Choose devices; never an error, for an error would fail the pod."""
        return await answer(context, self._metrics, "GetPreferredAllocation", self.device_class, self._prefer(request))

    async def Allocate(
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """Write kubelet's choice into the ledger, have the devices prepared, and say what the container gets."""
        return await answer(context, self._metrics, "Allocate", self.device_class, self._allocate(request))

    async def PreStartContainer(
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        """Look at the devices once more: kubelet starts containers again with what was allocated weeks ago."""
        return await answer(context, self._metrics, "PreStartContainer", self.device_class, self._pre_start(request))

    async def _prefer(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        chosen = [
            await self._asks.prefer(self.device_class, one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size)
            for one in request.container_requests
        ]
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=names) for names in chosen]
        )

    async def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        # kubelet sends exactly one container a call.
        return pb.AllocateResponse(
            container_responses=[_response(await self._allocate_container(sorted(one.devices_ids))) for one in request.container_requests]
        )

    async def _allocate_container(self, names: list[str]) -> ContainerEdits:
        self._check(names)
        owner = plugin_owner(self.resource, names)
        # kubelet's calls carry no identity: each one is an operation of its own, for the same ids may come again after a pod is gone.
        op_id = f"allocate-{uuid.uuid4().hex}"
        adopted = await self._asks.adopt(op_id, owner, {self.device_class: tuple(names)})
        if isinstance(adopted, Refusal):
            refuse(adopted, f"{self.resource}: cannot take {', '.join(names)}")
        self._state.hand_out(self.device_class, names, owner, adopted.ledger_sequence)
        try:
            prepared = await self._asks.prepare(f"{op_id}-prepare", owner, self.device_class, names)
            edits = prepared if isinstance(prepared, Refusal) else container_edits(prepared, names)
        except TopobusError:
            await self._give_back(op_id, owner, adopted.decision_id)
            raise
        if isinstance(edits, Refusal):
            await self._give_back(op_id, owner, adopted.decision_id)
            refuse(edits, f"{self.resource}: cannot prepare {', '.join(names)}")
        self._watch_variables(edits)
        get_logger().info(
            "devices.allocated",
            resource=self.resource,
            devices=names,
            owner=owner.key,
            decision_id=adopted.decision_id,
            displaced=[one.key for one in adopted.displaced],
        )
        return edits

    async def _pre_start(self, request: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        names = sorted(request.devices_ids)
        self._check(names)
        refusal = await self._before_start(names) if self._before_start is not None else None
        if refusal is not None:
            refuse(refusal, f"{self.resource}: cannot start a container with {', '.join(names)}")
        return pb.PreStartContainerResponse()

    def _check(self, names: list[str]) -> None:
        """Refuse ids that are unknown, sick or held elsewhere: kubelet's view may be older than ours."""
        if not names:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, f"{self.resource}: the call names no device")
        for name in names:
            entry = self._state.entry(self.device_class, name)
            if entry is None:
                raise CallRefused(grpc.StatusCode.NOT_FOUND, f"{self.resource}: there is no device {name} on this node")
            if not entry.is_healthy:
                raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, f"{self.resource}: device {name} cannot be used: {entry.reason}")

    async def _give_back(self, op_id: str, owner: Owner, decision_id: str) -> None:
        """Undo the adoption after a failed preparation; the reconciliation finds it later when this fails too."""
        try:
            await self._asks.release(f"{op_id}-release", owner, only=decision_id)
        except TopobusError as err:
            get_logger().warning("release.failed", owner=owner.key, error=str(err))

    def _watch_variables(self, edits: ContainerEdits) -> None:
        for key in foreign_variables(edits, self.device_class, self._variables):
            # kubelet keeps the first of two classes' values and says nothing.
            get_logger().warning("variable.shared", variable=key, device_class=self.device_class, other_class=self._variables[key])
        for key in edits.env:
            self._variables.setdefault(key, self.device_class)

    def _count_streams(self, step: int) -> None:
        self.open_streams += step
        self.streams_seen += max(step, 0)
        self.streams_changed.announce()


def _to_wire(entry: ListEntry) -> pb.Device:
    # No topology message at all when the node is unknown: an empty one or -1 would be an opinion.
    topology = None if entry.nodes is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=one) for one in entry.nodes])
    return pb.Device(ID=entry.id, health="Healthy" if entry.is_healthy else "Unhealthy", topology=topology)


def _response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        envs=edits.env,
        annotations=edits.annotations,
        mounts=[
            pb.Mount(container_path=one.container_path, host_path=one.host_path, read_only="ro" in one.options) for one in edits.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=one.path, host_path=one.host_path or one.path, permissions=one.permissions)
            for one in edits.device_nodes
        ],
    )
