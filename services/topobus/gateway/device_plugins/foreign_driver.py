"""Runs another vendor's device plugin as a Topobus driver: its list becomes `discover`, its
Allocate becomes `prepare`.

The device host calls it in worker threads. CDI names in the plugin's answer are resolved to edits
here, so that device plugin requests, claims and every container runtime can use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from msgspec import Struct

from topobus.devicekit.containers.oci_host import look_up, read_cdi_files
from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.formats.containers.oci import as_on_host, resolve_cdi
from topobus.gateway.device_plugins.malformed_calls import Malformed, reading
from topobus.gateway.device_plugins.rules.foreign import ForeignDevice, foreign_devices, foreign_names, observations_of
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.process.logging import get_logger
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, DeviceNode, Mount, join_edits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import OwnerKind

__all__ = ["ForeignDriver", "ForeignEndpoint"]

R = TypeVar("R", bound=Message)


class ForeignEndpoint(Struct, frozen=True, kw_only=True):
    """Where a plugin serves now, and its last list."""

    socket: Path
    needs_pre_start: bool
    has_preference: bool = False
    listed: tuple[ForeignDevice, ...] | None = None
    """None: no list yet."""


class ForeignDriver(DeviceDriver):
    """One resource of one plugin. The endpoint is replaced as a whole, so threads need no lock."""

    def __init__(self, device_class: str, resource: str, cdi_folders: Sequence[Path], *, allocate_s: float) -> None:
        self.name = device_class
        self.device_class = device_class
        self.resource = resource
        self.endpoint: ForeignEndpoint | None = None
        self.lost = ""
        """Why the last stream ended."""
        self._cdi_folders = tuple(cdi_folders)
        self._allocate_s = allocate_s

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Return the plugin's list.

        While the plugin is away there is no list. Its devices become Unknown and stay in the
        inventory.
        """
        return Discovery(devices=foreign_devices(self.device_class, self.resource, self._listed()))

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Return the plugin's health."""
        return observations_of(self.device_class, self._listed())

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Call the plugin's Allocate, as kubelet would for one container.

        For a claim also call PreStartContainer, because kubelet does not call it for claims.
        """
        wanted = self._ids([device.name for device in devices])
        if isinstance(wanted, Refusal):
            return wanted
        socket, ids = wanted
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        try:
            answer = _called(socket, "Allocate", request, pb.AllocateResponse, self._allocate_s)
        except (grpc.RpcError, _UnreadableError) as err:
            return self._refused(ids, err)
        if not answer.container_responses:
            return refuse("plugin-refused", f"the device plugin of {self.resource} gave no answer for a container")
        if context.owner.kind is not OwnerKind.DEVICE_PLUGIN:
            refusal = self.pre_start([device.name for device in devices])
            if refusal is not None:
                return refusal
        if answer.container_responses[0].annotations and context.owner.kind is OwnerKind.CLAIM:
            # Neither DRA nor CDI can set a container's annotations. Only kubelet passes them on,
            # from Allocate.
            dropped = sorted(answer.container_responses[0].annotations)
            get_logger().warning(
                "foreign.annotations-dropped", resource=self.resource, claim=context.owner.key, annotations=dropped
            )
        edits = self._edits(answer.container_responses[0])
        return (
            edits
            if isinstance(edits, Refusal)
            else {"": edits, **{device.name: ContainerEdits() for device in devices}}
        )

    def pre_start(self, names: Sequence[str]) -> Refusal | None:
        """Call the plugin's PreStartContainer if it requires this. Blocks. None: it succeeded."""
        wanted = self._ids(names)
        endpoint = self.endpoint
        if isinstance(wanted, Refusal) or endpoint is None or not endpoint.needs_pre_start:
            return wanted if isinstance(wanted, Refusal) else None
        socket, ids = wanted
        request = pb.PreStartContainerRequest(devices_ids=ids)
        try:
            _called(socket, "PreStartContainer", request, pb.PreStartContainerResponse, self._allocate_s)
        except (grpc.RpcError, _UnreadableError) as err:
            return self._refused(ids, err)
        return None

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int, timeout_s: float
    ) -> tuple[str, ...] | None:
        """Call the plugin's GetPreferredAllocation. None when the plugin has none, or does not
        answer now.

        Blocks.
        """
        endpoint = self.endpoint
        if endpoint is None or not endpoint.has_preference or endpoint.listed is None:
            return None
        ids = foreign_names(self.device_class, (each.id for each in endpoint.listed))
        names = {id_: name for name, id_ in ids.items()}
        wanted = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(ids[name] for name in {*available, *must_include} if name in ids),
            must_include_deviceIDs=sorted(ids[name] for name in must_include if name in ids),
            allocation_size=size,
        )
        try:
            asked = pb.PreferredAllocationRequest(container_requests=[wanted])
            answer = _called(
                endpoint.socket, "GetPreferredAllocation", asked, pb.PreferredAllocationResponse, timeout_s
            )
        except (grpc.RpcError, _UnreadableError) as err:
            get_logger().warning("foreign.preference-failed", resource=self.resource, error=_details_of(err))
            return None
        if not answer.container_responses:
            return None
        return tuple(names[deviceid] for deviceid in answer.container_responses[0].deviceIDs if deviceid in names)

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Do nothing, because the device plugin API has no call to give devices back."""

    def _ids(self, names: Sequence[str]) -> tuple[Path, list[str]] | Refusal:
        """Find the plugin's socket and its own ids of these devices."""
        endpoint = self.endpoint
        if endpoint is None or endpoint.listed is None:
            return refuse("plugin-gone", f"the device plugin of {self.resource} is not connected")
        ids = foreign_names(self.device_class, (each.id for each in endpoint.listed))
        unknown = sorted(set(names) - ids.keys())
        if unknown:
            return refuse(
                "plugin-unknown-device", f"the device plugin of {self.resource} does not list {', '.join(unknown)}"
            )
        return endpoint.socket, sorted(ids[name] for name in names)

    def _refused(self, ids: Sequence[str], err: Exception) -> Refusal:
        return refuse(
            "plugin-refused", f"the device plugin of {self.resource} refused {', '.join(ids)}: {_details_of(err)}"
        )

    def _listed(self) -> tuple[ForeignDevice, ...]:
        endpoint = self.endpoint
        if endpoint is None or endpoint.listed is None:
            why = f" ({self.lost})" if self.lost else ""
            raise HardwareError(
                f"the device plugin of {self.resource} is not connected{why}",
                next_step="is it running, and in our folder?",
            )
        return endpoint.listed

    def _edits(self, answer: pb.ContainerAllocateResponse) -> ContainerEdits | Refusal:
        own = ContainerEdits(
            env=dict(answer.envs),
            annotations=dict(answer.annotations),
            mounts=tuple(
                Mount(
                    host_path=mount.host_path,
                    container_path=mount.container_path,
                    options=("rbind", "rprivate", "ro" if mount.read_only else "rw"),
                )
                for mount in answer.mounts
            ),
            device_nodes=tuple(
                DeviceNode(
                    path=device.container_path, host_path=device.host_path, permissions=device.permissions or "rw"
                )
                for device in answer.devices
            ),
        )
        names = [cdi_device.name for cdi_device in answer.cdi_devices]
        if not names:
            return own
        files, problems = read_cdi_files(self._cdi_folders)
        resolved = resolve_cdi(names, files)
        if isinstance(resolved, Refusal):
            text = "; ".join([resolved.why, *problems])
            return refuse("plugin-cdi-unresolved", f"the device plugin of {self.resource} names CDI devices: {text}")
        parts = [edits for _, edits in resolved]
        host_nodes = look_up(node.host_path or node.path for edits in parts for node in edits.device_nodes)
        return join_edits((own, *(as_on_host(edits, host_nodes) for edits in parts)))


class _UnreadableError(Exception):
    """Raised when an answer's bytes are not a valid message."""


def _called(socket: Path, method: str, request: Message, reply: type[R], timeout_s: float) -> R:
    """Call a plugin. Blocks.

    Errors: raises grpc.RpcError, and _UnreadableError for bytes that are no answer.
    """
    # A restarted plugin listens on another socket, so no channel stays open between two calls.
    with grpc.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        # By name, because the generated stubs are typed only for asynchronous calls.
        call = channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reading(reply.FromString),
        )
        answer: R | Malformed = call(request, timeout=timeout_s)
    if isinstance(answer, Malformed):
        raise _UnreadableError(f"its answer of {answer}")
    return answer


def _details_of(err: Exception) -> str:
    details = getattr(err, "details", None)
    return str(details()) if callable(details) else str(err)
