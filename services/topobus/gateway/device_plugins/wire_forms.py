"""Values as kubelet's device plugin API has them. Pure.

Flows in: list entries and container edits. Flows out: the messages of
`deviceplugin/v1beta1`, a list's entries as bytes.
"""

from __future__ import annotations

from topobus.gateway.device_plugins.rules.list_entry import ListEntry
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.values.edits import ContainerEdits

__all__ = ["allocate_response", "wire_list"]


def wire_list(entry: ListEntry) -> bytes:
    """Write a list of this one entry: such lists, one after the other,
    are the list of all of them.
    """
    # No topology message at all when the node is unknown: an empty one or -1 would be an opinion.
    topology = None if entry.nodes is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in entry.nodes])
    device = pb.Device(ID=entry.wire_id, health="Healthy" if entry.is_healthy else "Unhealthy", topology=topology)
    return pb.ListAndWatchResponse(devices=[device]).SerializeToString()


def allocate_response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
    """Write what a container gets."""
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
