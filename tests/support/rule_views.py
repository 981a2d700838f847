"""Pods and volumes as kube-scheduler's rules see them, of objects as a server shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from topobus.engine.scheduling.kube_rules.host_ports import HostPort, host_ports_of
from topobus.engine.scheduling.kube_rules.placement_rules import read_placement
from topobus.engine.scheduling.kube_rules.volume_rules import attachment_of
from topobus.engine.scheduling.kube_rules.volumes import (
    Attachment,
    PodVolume,
    Volume,
    VolumeClaim,
    VolumeClass,
    read_attach_limits,
    read_volume,
    read_volume_claim,
    read_volume_class,
    volumes_of,
)
from topobus.engine.scheduling.pod_groups import PodGroup
from topobus.formats.messages.messages import ApiObject

Key = tuple[str, str]
Object = Mapping[str, Any]


def key_of(plain: Object) -> Key:
    """Name an object."""
    return plain["metadata"].get("namespace", ""), plain["metadata"]["name"]


class PodView:
    """Pods where they are, or where they are intended."""

    def __init__(self, pods: Iterable[Object], assumed: Mapping[Key, str]) -> None:
        nodes = [(plain, plain["spec"].get("nodeName") or assumed.get(key_of(plain), "")) for plain in pods]
        self._placed = [(plain, node) for plain, node in nodes if node]

    def groups(self) -> list[tuple[PodGroup, Mapping[str, int]]]:
        """Make a group of each pod."""
        return [(_group(plain), {node: 1}) for plain, node in self._placed]

    def ports_on(self, node: str) -> Collection[HostPort]:
        """List the host ports in use on a node."""
        return {port for plain, on in self._placed if on == node for port in host_ports_of(plain["spec"])}


def _group(plain: Object) -> PodGroup:
    metadata, labels = plain["metadata"], plain["metadata"].get("labels") or {}
    anti = (plain["spec"].get("affinity") or {}).get("podAntiAffinity")
    stored = ApiObject(api_version="v1", kind="Pod", metadata=metadata, spec={"affinity": {"podAntiAffinity": anti}})
    return PodGroup(
        metadata["namespace"],
        labels,
        read_placement(stored).group.anti_affinity,
        is_deleting=bool(metadata.get("deletionTimestamp")),
    )


class VolumeTable:
    """A `VolumeView` of some objects, pods among them."""

    def __init__(self, *objects: Object) -> None:
        self.claims: dict[Key, VolumeClaim] = {}
        self.volumes: dict[str, Volume] = {}
        self.classes: dict[str, VolumeClass] = {}
        self._limits: dict[str, dict[str, int]] = {}
        self._pods: dict[Key, tuple[str, tuple[PodVolume, ...]]] = {}
        for plain in objects:
            key = key_of(plain)
            match plain["kind"]:
                case "Pod":
                    self._pods[key] = plain["spec"]["nodeName"], volumes_of(key[1], plain["spec"])
                case "PersistentVolumeClaim":
                    self.claims[key] = read_volume_claim(plain)
                case "PersistentVolume":
                    self.volumes[key[1]] = read_volume(plain)
                case "StorageClass":
                    self.classes[key[1]] = read_volume_class(plain)
                case _:
                    self._limits[key[1]] = read_attach_limits(plain)

    def volumes_of(self, pod: Key) -> tuple[PodVolume, ...]:
        """List a pod's volumes that use claims."""
        return self._pods[pod][1]

    def of_class(self, name: str) -> list[Volume]:
        """List the volumes of a class."""
        return [volume for volume in self.volumes.values() if volume.class_name == name]

    def users_of(self, claim: Key, assumed: Collection[Key]) -> list[Key]:
        """Name the pods that use a claim and have a node, or are among `assumed`."""
        return [
            pod
            for pod, (node, volumes) in self._pods.items()
            if (node or pod in assumed) and claim in {(pod[0], volume.claim) for volume in volumes}
        ]

    def limits_of(self, node: str) -> Mapping[str, int]:
        """Return how many volumes each CSI driver may attach to a node."""
        return self._limits.get(node, {})

    def attached_to(self, node: str, assumed: Collection[Key]) -> set[Attachment]:
        """List the volumes of CSI drivers of pods that are on a node, or among `assumed`."""
        keys = [
            (pod[0], volume.claim)
            for pod, (on, volumes) in self._pods.items()
            if on == node or pod in assumed
            for volume in volumes
        ]
        attachments = [attachment_of(self.claims[key], self) for key in keys if key in self.claims]
        return {attachment for attachment in attachments if attachment is not None}
