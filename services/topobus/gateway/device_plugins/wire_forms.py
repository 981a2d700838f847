"""Converts list entries and container edits to kubelet's `deviceplugin/v1beta1`. Pure."""

from __future__ import annotations

from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.values.edits import ContainerEdits

__all__ = ["allocate_response", "wire_list"]


def wire_list(entry: ListEntry) -> bytes:
    """Encode a list of this one entry. Concatenated, such lists form the list of all entries."""
    # No topology message at all when the node is unknown, because an empty one or -1 would be an
    # opinion.
    topology = None if entry.nodes is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in entry.nodes])
    device = pb.Device(ID=entry.wire_id, health="Healthy" if entry.is_healthy else "Unhealthy", topology=topology)
    return pb.ListAndWatchResponse(devices=[device]).SerializeToString()


def allocate_response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
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
