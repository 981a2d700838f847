"""The device plugin API of one resource (a class, or a pool of one), as kubelet calls it.

Lists come from memory, choices from topology, container edits from the device service. Nothing here
waits for the cluster part of NATS. Only Allocate and PreStartContainer wait for other processes,
within the gateway's own deadlines.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import asyncio
import hashlib
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from msgspec import structs

from topobus.formats.messages.messages import Adopted, AdoptRequest, Prepared, PrepareRequest
from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import DeadlineSettings
from topobus.gateway.containers.live_containers import why_lingering
from topobus.gateway.device_plugins.ahead import Ahead, PreparationAhead
from topobus.gateway.device_plugins.allocation_record import AllocationRecord
from topobus.gateway.device_plugins.pci_devices import PciDevices
from topobus.gateway.device_plugins.pod_resources import PodResourcesReader
from topobus.gateway.device_plugins.rules.edits import container_edits, differences
from topobus.gateway.device_plugins.rules.holdings import allocations_of
from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.gateway.device_plugins.rules.lists import first_that_fit
from topobus.gateway.device_plugins.rules.replicas import Chosen, chosen_of, fault_of_many, prefer_replicas
from topobus.gateway.device_plugins.sockets import (
    CallRefused,
    answer,
    refuse,
    within,
)
from topobus.gateway.metrics import CallMetrics
from topobus.gateway.node_state import NodeState, Offer
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.process.broadcast import Broadcast, first_of
from topobus.process.logging import get_logger
from topobus.values.device import Inventory
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.errors import PeerUnavailable, TopobusError
from topobus.values.ledger import Allocation
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.shares import number_of_replica

__all__ = ["LIST_LIMIT_BYTES", "BeforeStart", "DevicePlugin", "ResourceTraits", "plugin_owner"]

BeforeStart = Callable[[list[str]], Awaitable[Refusal | None]]
"""Called before each start of a container with these devices. None: it may start."""

LIST_LIMIT_BYTES = 4 * 1024 * 1024
"""kubelet receives with gRPC's default limit: a longer message ends the stream, and all devices
with it. The five bytes that gRPC writes before a message do not count (grpc-go rpc_util.go,
recvMsg; the C core counts alike)."""

# Seconds that Allocate waits for the containers of a pod that kubelet has forgotten, which it kills
# two seconds after a deletion by force. All admissions of the node wait meanwhile. Together with
# the steps after it, this fits into `deadlines.allocate_s`.
_ENDING_S = 4.0
# Seconds between two lists on one stream: a burst of changes (a driver that finds its cards one
# after the other) becomes one message. A single change is sent at once.
_QUIET_S = 0.02


def plugin_owner(resource: str, names: Sequence[str]) -> Owner:
    """Return an Allocate call's holder, made from the resource and a hash of the devices."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:32]
    return Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name=resource, uid=digest)


@dataclass(frozen=True)
class ResourceTraits:
    """What is special about the allocations of one resource."""

    is_from_end: bool = False
    """Claims also get devices of this resource, and take the first by name."""
    before_start: BeforeStart | None = None
    """The PreStartContainer of the plugin whose devices they are; None: ours."""
    pci_devices: PciDevices | None = None
    """Describes devices whose ids are PCI addresses, for Multus and programs of the SR-IOV device
    plugin. None: they are not described."""


class DevicePlugin(rpc.DevicePluginServicer):
    """Serves one resource."""

    def __init__(
        self,
        offer: Offer,
        *,
        state: NodeState,
        asks: NodeAsks,
        record: AllocationRecord,
        pods: PodResourcesReader,
        metrics: CallMetrics,
        deadlines: DeadlineSettings,
        traits: ResourceTraits,
        streams_changed: Broadcast,
    ) -> None:
        self.device_class = offer.device_class
        self.resource = offer.resource
        self._streams_changed = streams_changed
        self.open_streams = 0
        self.streams_seen = 0
        """How many streams were ever opened on this server."""
        self._label = offer.name
        self._state = state
        self._asks = asks
        self._record = record
        self._pods = pods
        self._metrics = metrics
        self._deadlines = deadlines
        self._traits = traits
        self._ahead = PreparationAhead(asks, offer.device_class)
        self._list: tuple[tuple[ListEntry, ...], pb.ListAndWatchResponse] | None = None
        self._parts: dict[ListEntry, bytes] = {}

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.DevicePluginOptions]
    ) -> pb.DevicePluginOptions:
        """Return the options. kubelet calls this while our Register call is pending."""
        return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.ListAndWatchResponse]
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Send the complete list at once and after every change, on each stream independently.

        A stream with a slow reader delays no other. It then gets only the newest list, so that
        nothing accumulates.
        """
        self._count_streams(1)
        try:
            sent: pb.ListAndWatchResponse | None = None
            while True:
                ticket = self._state.changed.ticket()
                message = self._message()
                if message is not sent:
                    sent = message
                    yield message
                    await asyncio.sleep(_QUIET_S)
                await ticket.wait()
        finally:
            self._count_streams(-1)

    def _message(self) -> pb.ListAndWatchResponse:
        """Build the message with the present list, once for all streams."""
        entries = self._state.entries(self.resource)
        if self._list is not None and self._list[0] is entries:
            return self._list[1]
        # Usually one device of a thousand changes. Encoding the others again would take most of the
        # time.
        parts = [self._parts.get(list_entry) or _wire_list(list_entry) for list_entry in entries]
        self._parts = dict(zip(entries, parts, strict=True))
        size = sum(map(len, parts))
        left_out = 0
        if size > LIST_LIMIT_BYTES:
            kept = first_that_fit(entries, [len(part) for part in parts], LIST_LIMIT_BYTES)
            left_out = len(entries) - len(kept)
            get_logger().error(
                "list.too-large",
                resource=self.resource,
                size_bytes=size,
                limit_bytes=LIST_LIMIT_BYTES,
                devices=len(entries),
                left_out=left_out,
                next_step="split the class into pools: each resource has a list of its own",
            )
            parts = [parts[place] for place in kept]
        message = pb.ListAndWatchResponse.FromString(b"".join(parts))
        self._metrics.left_out.labels(self.resource).set(left_out)
        if self._list is not None and self._list[1] == message:
            # The change does not affect what kubelet gets.
            message = self._list[1]
        self._list = (entries, message)
        return message

    async def GetPreferredAllocation(
        self,
        request: pb.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[pb.PreferredAllocationRequest, pb.PreferredAllocationResponse],
    ) -> pb.PreferredAllocationResponse:
        """Choose devices. It never fails, because an error would fail the pod."""
        return await answer(context, self._metrics, "GetPreferredAllocation", self._label, self._prefer(request))

    async def Allocate(
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """Record kubelet's choice in the ledger, have it prepared, and return the edits."""
        work = within(self._allocate(request), self._deadlines.allocate_s, f"{self.resource}: Allocate")
        with self._pods.unlisted():
            return await answer(context, self._metrics, "Allocate", self._label, work)

    async def PreStartContainer(
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        """Check the devices again, because their allocation may be weeks old."""
        work = within(self._pre_start(request), self._deadlines.pre_start_s, f"{self.resource}: PreStartContainer")
        return await answer(context, self._metrics, "PreStartContainer", self._label, work)

    async def _prefer(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        chosen = [
            await self._choose(
                self._names(wanted.available_deviceIDs),
                self._names(wanted.must_include_deviceIDs),
                wanted.allocation_size,
            )
            for wanted in request.container_requests
        ]
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(deviceIDs=sorted(map(self._wire_id, names))) for names in chosen
            ]
        )

    async def _choose(self, available: list[str], must_include: list[str], size: int) -> tuple[str, ...]:
        """Choose devices by topology, and replicas by their devices' policy."""
        if any(number_of_replica(name) is not None for name in available):
            return prefer_replicas(available, must_include, size, self._inventory, is_from_end=self._traits.is_from_end)
        withheld = self._state.withheld(self.device_class)
        return await self._asks.prefer(
            self.device_class,
            available,
            must_include,
            size,
            withheld=withheld.keys(),
            is_from_end=self._traits.is_from_end,
        )

    @property
    def _inventory(self) -> Inventory | None:
        return self._state.inventories().get(self.device_class)

    async def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        # kubelet sends exactly one container in a call. If there are more, all of them are checked
        # before the first one takes anything.
        containers = [
            sorted(self._names(container_request.devices_ids)) for container_request in request.container_requests
        ]
        for name, count in Counter(itertools.chain.from_iterable(containers)).items():
            if count > 1:
                raise CallRefused(
                    grpc.StatusCode.INVALID_ARGUMENT, f"{self.resource}: the call names device {name} {count} times"
                )
        for names in containers:
            self._check(names)
            fault = fault_of_many(self.resource, names, self._inventory)
            if fault:
                raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, fault)
        for names in containers:
            await self._refuse_given_twice(names, await self._wait_for_former(names))
        async with self._state.hand_overs.of(self.device_class):
            return pb.AllocateResponse(
                container_responses=[_allocate_response(await self._allocate_container(names)) for names in containers]
            )

    async def _refuse_given_twice(self, names: list[str], former: Sequence[Allocation]) -> None:
        """Refuse devices that another pod has according to kubelet. kubelet frees those of ended
        pods before it allocates, so a device that it may give has no user.

        There is one exception: when a client lists pods while kubelet allocates and another pod has
        just ended, UpdateAllocatedDevices (pkg/kubelet/cm/devicemanager/manager.go, 1.36.2) forgets
        what is being allocated. The refusal makes kubelet count again.
        Errors: raises CallRefused.
        """
        for pod, devices in (await self._pods.users(self.resource, [allocation.user for allocation in former])).items():
            if taken := sorted(devices & {*names}):
                get_logger().warning("devices.given-twice", resource=self.resource, devices=taken, pod=pod)
                text = (
                    f"{self.resource}: pod {pod} has {', '.join(taken)}, and kubelet gives them to another pod; "
                    "the pod's controller creates it again"
                )
                raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, text)

    async def _wait_for_former(self, names: list[str]) -> Sequence[Allocation]:
        """Wait for the end of containers that have these devices of a pod that kubelet has
        forgotten: one that ignores TERM is killed after two seconds.

        Gives kubelet's allocations that have some of the devices by the ledger.

        Errors: raises CallRefused when they have not ended after a while.
        """
        chosen = chosen_of(names, self._inventory)
        loop = asyncio.get_running_loop()
        until = loop.time() + _ENDING_S
        while True:
            ticket = self._state.containers.changed.ticket()
            former = self._former(names, chosen)
            lingering = self._lingering(former)
            if not lingering:
                return former
            left_s = until - loop.time()
            if left_s <= 0:
                break
            await first_of([ticket], left_s)
        self._state.linger({**self._state.lingering, **lingering})
        nodes = {node.host_path or node.path for key in lingering for node in self._nodes_given(key)}
        why = "; ".join(dict.fromkeys(lingering.values()))
        text = (
            f"{self.resource}: {', '.join(names)} cannot be given to another container yet: "
            f"{why}{await self._state.containers.openers_of(nodes)}"
        )
        raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, text)

    def _lingering(self, former: Sequence[Allocation]) -> dict[str, str]:
        """Find allocations in the way whose pod has containers.

        Kubelet has forgotten such a pod, or it would not give its devices to another one.
        """
        return {
            allocation.owner.key: why
            for allocation in former
            if (why := why_lingering(allocation, self._state.containers))
        }

    def _former(self, names: list[str], chosen: Chosen) -> tuple[Allocation, ...]:
        """Find kubelet's allocations that have some of these devices in the ledger."""
        ledger = self._state.ledger
        return allocations_of(ledger, self.device_class, frozenset(names), chosen) if ledger is not None else ()

    def _nodes_given(self, owner_key: str) -> tuple[DeviceNode, ...]:
        given = self._record.of(owner_key)
        return given.device_nodes if given is not None else ()

    def _names(self, wire_ids: Iterable[str]) -> list[str]:
        """Return our names of the devices that kubelet names."""
        return [self._state.name_of(self.resource, wire_id) for wire_id in wire_ids]

    def _wire_id(self, name: str) -> str:
        """Return kubelet's id of a device."""
        entry = self._state.entry(self.resource, name)
        return entry.wire_id if entry is not None else name

    async def _allocate_container(self, names: list[str]) -> ContainerEdits:
        self._check_is_heard()
        owner = plugin_owner(self.resource, names)
        # kubelet's calls carry no identity. Each one is an operation of its own, because the same
        # ids may come again after a pod is gone.
        op_id = f"allocate-{uuid.uuid4().hex}"
        chosen = chosen_of(names, self._inventory)
        shares = {self.device_class: chosen.shares} if chosen.shares else {}
        shared = {self.device_class: tuple(chosen.shares)} if chosen.shares else {}
        async with self._ahead.begun(f"{op_id}-ahead", owner, chosen, self._inventory) as ahead:
            devices = {self.device_class: chosen.devices}
            adopted = await self._asks.adopt(
                AdoptRequest(op_id=op_id, owner=owner, devices=devices, shared=shared, shares=shares)
            )
            if isinstance(adopted, Refusal):
                refuse(adopted, f"{self.resource}: cannot take {', '.join(names)}")
            self._state.hand_out(self.device_class, chosen.devices, owner, adopted.ledger_sequence, chosen.shares)
            return await self._complete(op_id, owner, names, chosen, adopted, ahead)

    async def _complete(
        self, op_id: str, owner: Owner, names: list[str], chosen: Chosen, adopted: Adopted, ahead: Ahead
    ) -> ContainerEdits:
        """Have the owner's devices prepared, and return what the container gets.

        On a failure the owner's adoption is undone.
        """
        try:
            prepared = await self._prepare(f"{op_id}-prepare", owner, names, ahead=ahead)
            edits = self._joined(prepared, names)
        except (TopobusError, CallRefused, asyncio.CancelledError):
            # Cancelled by the deadline, or because kubelet went away. In both cases no container
            # gets the devices.
            await self._give_back(op_id, owner, adopted.decision_id, chosen)
            raise
        await self._forget(op_id, adopted.displaced, chosen)
        self._record.note(owner.key, edits, self.device_class)
        get_logger().info(
            "devices.allocated",
            resource=self.resource,
            devices=names,
            owner=owner.key,
            decision_id=adopted.decision_id,
            displaced=[each_owner.key for each_owner in adopted.displaced],
        )
        if self._traits.pci_devices is None:
            return edits
        # Not recorded: it follows from the devices' ids, which kubelet sends at each start.
        return structs.replace(edits, env=edits.env | await self._traits.pci_devices.tell(chosen.devices, prepared))

    async def _prepare(
        self, op_id: str, owner: Owner, names: list[str], *, is_again: bool = False, ahead: Ahead = None
    ) -> Prepared:
        """Have the devices made ready."""
        chosen = chosen_of(names, self._inventory)
        prepared: Prepared | Refusal | None = await ahead if ahead is not None else None
        if prepared is None:
            devices = tuple(sorted(chosen.devices))
            request = PrepareRequest(
                op_id=op_id, owner=owner, devices=devices, shares=chosen.amounts, is_again=is_again
            )
            prepared = await self._asks.prepare(self.device_class, request)
        if isinstance(prepared, Refusal):
            refuse(prepared, f"{self.resource}: cannot prepare {', '.join(names)}")
        return prepared

    def _joined(self, prepared: Prepared, names: list[str]) -> ContainerEdits:
        """Join the edits of all devices.

        Errors: raises CallRefused when two devices contradict each other, or for an edit that
        kubelet would drop.
        """
        edits = container_edits(prepared, chosen_of(names, self._inventory).devices)
        if isinstance(edits, Refusal):
            refuse(edits, f"{self.resource}: cannot prepare {', '.join(names)}")
        if edits.needs_runtime:
            # kubelet would drop it without an error.
            text = (
                f"{self.resource}: {', '.join(names)} bring hooks, groups, network devices or nodes that "
                "kubelet's device plugin API has no words for"
            )
            raise CallRefused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{text}: claim them (DRA): the container runtime reads their CDI files",
            )
        return edits

    async def _pre_start(self, request: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
        names = sorted(set(self._names(request.devices_ids)))
        self._check(names)
        if self._traits.before_start is None:
            await self._check_record(names)
        else:
            refusal = await self._traits.before_start(names)
            if refusal is not None:
                refuse(refusal, f"{self.resource}: cannot start a container with {', '.join(names)}")
        return pb.PreStartContainerResponse()

    async def _check_record(self, names: list[str]) -> None:
        """Make the devices ready again, and refuse the start when what kubelet replays is no longer
        right.

        A service that does not answer is no evidence against its devices. But after a reboot, when
        drivers number devices again, the start waits for it.
        Errors: raises CallRefused.
        """
        owner = plugin_owner(self.resource, names)
        given = self._record.of(owner.key)
        try:
            self._check_is_heard()
            edits = self._joined(await self._prepare(f"start-{uuid.uuid4().hex}", owner, names, is_again=True), names)
        except PeerUnavailable as err:
            if given is not None and not self._record.is_of_this_boot(owner.key):
                raise
            get_logger().warning("start.unchecked", resource=self.resource, devices=names, error=str(err))
            return
        wrong = differences(given, edits) if given is not None else ()
        if wrong:
            text = (
                f"{self.resource}: {', '.join(names)} changed since they were allocated to the container: "
                f"{'; '.join(wrong)}"
            )
            raise CallRefused(
                grpc.StatusCode.FAILED_PRECONDITION, f"{text}. Delete the pod, so that a new one is given what is right"
            )
        try:
            await self._record.confirm(owner.key, edits if given is None else given)
        except OSError as err:
            get_logger().error("given.unwritten", resource=self.resource, error=f"{err.filename}: {err.strerror}")

    def _check_is_heard(self) -> None:
        """Refuse at once a call that would only run into a deadline, because kubelet admits one pod
        after the other and waits.

        Errors: raises PeerUnavailable.
        """
        since = self._state.silent_since(self.device_class)
        if since:
            raise PeerUnavailable(
                f"{self.resource}: the {self.device_class} service has not answered since {since}",
                next_step=f"see whether topobus-{self.device_class} runs on this node",
            )

    def _check(self, names: list[str]) -> None:
        """Refuse ids that are unknown, unhealthy or held by another owner: kubelet's list may be
        older than ours.

        Errors: raises CallRefused.
        """
        if not names:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, f"{self.resource}: the call names no device")
        for name in names:
            entry = self._state.entry(self.resource, name)
            if entry is None:
                raise CallRefused(grpc.StatusCode.NOT_FOUND, f"{self.resource}: there is no device {name} on this node")
            if not entry.is_healthy:
                raise CallRefused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"{self.resource}: device {name} cannot be used: {entry.reason}",
                )

    async def _give_back(self, op_id: str, owner: Owner, decision_id: str, chosen: Chosen) -> None:
        """Undo the adoption after a failed preparation.

        If this fails as well, the reconciliation does it later.
        """
        try:
            if chosen.shares:
                # The device service tracks which owners have a share.
                await self._asks.unprepare(f"{op_id}-unprepare", owner, self.device_class, tuple(chosen.shares))
            await self._asks.release(f"{op_id}-release", owner, only=decision_id)
        except TopobusError as err:
            get_logger().warning("release.failed", owner=owner.key, error=str(err))

    async def _forget(self, op_id: str, displaced: Sequence[Owner], chosen: Chosen) -> None:
        """Report to the device service that displaced owners no longer have their replicas, because
        it tracks which owners have a share.
        """
        for number, owner in enumerate(displaced if chosen.shares else ()):
            if self._state.is_holder(owner.key):
                # The ledger copy may be slightly old. The reconciliation releases what the owner
                # still holds.
                continue
            try:
                await self._asks.unprepare(
                    f"{op_id}-displaced-{number}", owner, self.device_class, tuple(chosen.shares)
                )
            except TopobusError as err:
                get_logger().warning("unprepare.failed", owner=owner.key, error=str(err))

    def _count_streams(self, step: int) -> None:
        self.open_streams += step
        self.streams_seen += max(step, 0)
        self._streams_changed.announce()


def _wire_list(entry: ListEntry) -> bytes:
    """Encode a list of this one entry. Concatenated, such lists form the list of all entries."""
    # No topology message at all when the node is unknown, because an empty one or -1 would be an
    # opinion.
    topology = None if entry.nodes is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in entry.nodes])
    device = pb.Device(ID=entry.wire_id, health="Healthy" if entry.is_healthy else "Unhealthy", topology=topology)
    return pb.ListAndWatchResponse(devices=[device]).SerializeToString()


def _allocate_response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
    """Convert what a container gets."""
    return pb.ContainerAllocateResponse(
        envs=edits.env,
        annotations=edits.annotations,
        mounts=[
            pb.Mount(container_path=mount.container_path, host_path=mount.host_path, read_only="ro" in mount.options)
            for mount in edits.mounts
        ],
        devices=[
            pb.DeviceSpec(
                container_path=device_node.path,
                host_path=device_node.host_path or device_node.path,
                permissions=device_node.permissions,
            )
            for device_node in edits.device_nodes
        ],
    )
