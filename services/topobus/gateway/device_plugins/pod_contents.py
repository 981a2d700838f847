"""Reads what kubelet's PodResources lists for each pod, and of each list only the pods that have
changed.

Parsing a hundred pods takes milliseconds, and kubelet is asked after each allocation. Detecting
that a pod is unchanged takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from topobus.gateway.containers.rules.exclusive import ExclusiveUse
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.values.dra_names import class_of_device
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import MemoryBlock

__all__ = ["PodContent", "PodContents"]


class PodContent(Struct, frozen=True, kw_only=True):
    """What one pod has, according to kubelet."""

    devices: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Container, resource, kubelet's ids."""
    claimed: tuple[tuple[str, str, str, str, str, str], ...]
    """Container, the claim's namespace and name, pool, class, device. Only of our drivers."""
    exclusive: tuple[ExclusiveUse, ...]
    """CPUs and memory of the pod as a whole, then of its containers."""


class PodContents:
    """Remembers one answer, that of the last call."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[pb.PodResources, PodContent]] = {}
        """By namespace and name."""

    def read(self, answer: pb.ListPodResourcesResponse) -> list[tuple[pb.PodResources, PodContent]]:
        """Read the next answer.

        Shapes: result — a pair for each pod that is listed, in kubelet's order; a name may be
        listed twice, with different content.
        """
        contents: list[tuple[pb.PodResources, PodContent]] = []
        for pod in answer.pod_resources:
            earlier = self._known.get((pod.namespace, pod.name))
            contents.append((pod, earlier[1] if earlier is not None and earlier[0] == pod else _read_pod(pod)))
        # Keep this answer's messages instead of equal ones of the previous answer, because each
        # message keeps its whole answer in memory.
        self._known = {(pod.namespace, pod.name): (pod, content) for pod, content in contents}
        return contents


def _read_pod(pod: pb.PodResources) -> PodContent:
    exclusive_uses = [_exclusive(pod, container.name, container) for container in pod.containers]
    return PodContent(
        # One entry for each device and NUMA node: a device with two nodes is listed twice.
        devices=tuple(
            (container.name, entry.resource_name, tuple(entry.device_ids))
            for container in pod.containers
            for entry in container.devices
        ),
        claimed=tuple(
            (container.name, claim.claim_namespace, claim.claim_name, each.pool_name, device_class, each.device_name)
            for container in pod.containers
            for claim in container.dynamic_resources
            for each in claim.claim_resources
            if (device_class := class_of_device(each.driver_name, each.device_name))
        ),
        exclusive=tuple(use for use in (_whole(pod, exclusive_uses), *exclusive_uses) if use.cpus or use.memory),
    )


def _exclusive(
    pod: pb.PodResources, container: str, resources: pb.PodResources | pb.ContainerResources
) -> ExclusiveUse:
    memory = sorted(
        (_block(container_memory) for container_memory in resources.memory if container_memory.size),
        key=lambda memory_block: (memory_block.kind, memory_block.nodes.ids),
    )
    return ExclusiveUse(
        namespace=pod.namespace,
        pod=pod.name,
        container=container,
        cpus=CpuSet.of(resources.cpu_ids),
        memory=tuple(memory),
    )


def _whole(pod: pb.PodResources, containers: Sequence[ExclusiveUse]) -> ExclusiveUse:
    """Return what the pod has as a whole, without what is listed for its containers."""
    whole = _exclusive(pod, "", pod)
    left = whole.cpus
    for container in containers:
        left -= container.cpus
    has_memory = any(container.memory for container in containers)
    return structs.replace(whole, cpus=left, memory=() if has_memory else whole.memory)


def _block(container_memory: pb.ContainerMemory) -> MemoryBlock:
    """Read one entry.

    For a group of nodes kubelet lists only the sum. It is divided evenly, with the rest on the
    lowest node.
    """
    nodes = sorted({node.ID for node in container_memory.topology.nodes})
    share, rest = divmod(container_memory.size, len(nodes)) if nodes else (0, 0)
    shares = tuple((node, share + (rest if index == 0 else 0)) for index, node in enumerate(nodes))
    return MemoryBlock(kind=container_memory.memory_type, nodes=NodeSet.of(nodes), shares=shares)
