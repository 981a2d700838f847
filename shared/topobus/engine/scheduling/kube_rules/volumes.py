"""Volumes of pods as the rules about nodes see them: PersistentVolumeClaims, PersistentVolumes,
StorageClasses and CSINodes, reduced to the fields that decide where a pod can go.

Pure. Source: k8s.io/api core/v1 and storage/v1, k8s.io/component-helpers/storage/volume, 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector
from topobus.formats.kubernetes.objects import Metadata
from topobus.formats.kubernetes.resource import NodeSelector
from topobus.formats.kubernetes.shape import read_as
from topobus.values.quantity import Quantity

__all__ = [
    "READ_ANNOTATIONS",
    "VOLUME_SHAPES",
    "Attachment",
    "PodVolume",
    "Volume",
    "VolumeClaim",
    "VolumeClass",
    "read_attach_limits",
    "read_volume",
    "read_volume_claim",
    "read_volume_class",
    "volumes_of",
]

Key = tuple[str, str]
Attachment = tuple[str, str]
"""A CSI driver and its name for a volume."""

# Written by the volume controller when both sides of a binding are there, and by kube-scheduler for
# the node on which a volume is to be made; the class as it was named before 1.6.
_BOUND = "pv.kubernetes.io/bind-completed"
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_OLD_CLASS = "volume.beta.kubernetes.io/storage-class"
READ_ANNOTATIONS = (_BOUND, _SELECTED_NODE, _OLD_CLASS)
"""The annotations of volumes and their claims that are read."""
_DELAYED = "WaitForFirstConsumer"
_NOTHING = Quantity(0)


class PodVolume(NamedTuple):
    """A volume of a pod that it gets by a claim."""

    name: str
    claim: str
    """The name of the PersistentVolumeClaim, in the pod's namespace."""
    is_ephemeral: bool
    """Whether the claim is made for the pod, and has to be the pod's."""


@dataclass(frozen=True)
class VolumeClaim:
    """A PersistentVolumeClaim."""

    key: Key
    uid: str = ""
    class_name: str = ""
    volume: str = ""
    is_bound: bool = False
    """Whether the binding to `volume` is complete."""
    is_lost: bool = False
    is_deleting: bool = False
    selected_node: str = ""
    """The node on which a volume is being made for it."""
    access: frozenset[str] = frozenset()
    size: Quantity = _NOTHING
    mode: str = "Filesystem"
    attributes_class: str = ""
    selector: LabelSelector | None = None
    """None: any volume will do."""
    controllers: frozenset[str] = frozenset()
    """Uids of what it was made for."""

    def __str__(self) -> str:
        return f"PersistentVolumeClaim {self.key[0]}/{self.key[1]}"


@dataclass(frozen=True)
class Volume:
    """A PersistentVolume."""

    name: str
    class_name: str = ""
    claim: Key | None = None
    """The claim that it is bound to, or will be; None without one."""
    claim_uid: str = ""
    is_available: bool = False
    is_deleting: bool = False
    access: frozenset[str] = frozenset()
    size: Quantity = _NOTHING
    mode: str = "Filesystem"
    attributes_class: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    nodes: NodeSelector | None = None
    """Where it can be used, by labels of nodes; None: anywhere."""
    attachment: Attachment | None = None

    def is_for(self, claim: VolumeClaim) -> bool:
        """Say whether it is this claim's, or reserved for it."""
        return self.claim == claim.key and self.claim_uid in ("", claim.uid)


@dataclass(frozen=True)
class VolumeClass:
    """A StorageClass."""

    name: str
    provisioner: str = ""
    is_delayed: bool = False
    """Whether claims of it wait for a pod to be placed (WaitForFirstConsumer)."""
    topologies: tuple[tuple[tuple[str, frozenset[str]], ...], ...] = ()
    """Where volumes can be made: terms of which one must hold, each with labels and their values,
    all of which must; none: anywhere."""


class _Resources(Struct, frozen=True, kw_only=True, rename="camel"):
    requests: dict[str, str | int | float] = {}


class _ClaimSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    storage_class_name: str = ""
    volume_name: str = ""
    access_modes: tuple[str, ...] = ()
    volume_mode: str = "Filesystem"
    volume_attributes_class_name: str = ""
    selector: LabelSelector | None = None
    resources: _Resources = _Resources()


class _Phase(Struct, frozen=True, kw_only=True, rename="camel"):
    phase: str = ""


class _Claim(Struct, frozen=True, kw_only=True, rename="camel"):
    metadata: Metadata = Metadata()
    spec: _ClaimSpec = _ClaimSpec()
    status: _Phase = _Phase()


class _NodeAffinity(Struct, frozen=True, kw_only=True, rename="camel"):
    required: NodeSelector | None = None


class _ClaimRef(Struct, frozen=True, kw_only=True, rename="camel"):
    namespace: str = ""
    name: str = ""
    uid: str = ""


class _Csi(Struct, frozen=True, kw_only=True, rename="camel"):
    driver: str = ""
    volume_handle: str = ""


class _VolumeSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    storage_class_name: str = ""
    capacity: dict[str, str | int | float] = {}
    access_modes: tuple[str, ...] = ()
    volume_mode: str = "Filesystem"
    volume_attributes_class_name: str = ""
    claim_ref: _ClaimRef | None = None
    node_affinity: _NodeAffinity = _NodeAffinity()
    csi: _Csi | None = None


class _Volume(Struct, frozen=True, kw_only=True, rename="camel"):
    metadata: Metadata = Metadata()
    spec: _VolumeSpec = _VolumeSpec()
    status: _Phase = _Phase()


class _LabelValues(Struct, frozen=True, kw_only=True, rename="camel"):
    key: str = ""
    values: tuple[str, ...] = ()


class _TopologyTerm(Struct, frozen=True, kw_only=True, rename="camel"):
    match_label_expressions: tuple[_LabelValues, ...] = ()


class _Class(Struct, frozen=True, kw_only=True, rename="camel"):
    metadata: Metadata = Metadata()
    provisioner: str = ""
    volume_binding_mode: str = "Immediate"
    allowed_topologies: tuple[_TopologyTerm, ...] = ()


class _Allocatable(Struct, frozen=True, kw_only=True, rename="camel"):
    count: int | None = None


class _Driver(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    allocatable: _Allocatable = _Allocatable()


class _CsiNodeSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    drivers: tuple[_Driver, ...] = ()


class _CsiNode(Struct, frozen=True, kw_only=True, rename="camel"):
    spec: _CsiNodeSpec = _CsiNodeSpec()


VOLUME_SHAPES: Mapping[str, type[Struct]] = {
    "PersistentVolumeClaim": _Claim,
    "PersistentVolume": _Volume,
    "StorageClass": _Class,
    "CSINode": _CsiNode,
}
"""What is read of an object of each kind."""


def volumes_of(pod: str, spec: Mapping[str, Any]) -> tuple[PodVolume, ...]:
    """List the volumes of a pod that it gets by claims.

    A malformed part is ignored, because the API server has checked it.

    >>> volumes_of("p", {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "b", "ephemeral": {}}, {"name": "c", "emptyDir": {}}]})
    (PodVolume(name='a', claim='data', is_ephemeral=False), PodVolume(name='b', claim='p-b', is_ephemeral=True))
    """  # noqa: E501
    listed = spec.get("volumes")
    volumes = []
    for volume in listed if isinstance(listed, list) else ():
        if not isinstance(volume, Mapping):
            continue
        name, source = str(volume.get("name") or ""), volume.get("persistentVolumeClaim")
        if isinstance(source, Mapping):
            volumes.append(PodVolume(name, str(source.get("claimName") or ""), is_ephemeral=False))
        elif volume.get("ephemeral") is not None:
            volumes.append(PodVolume(name, f"{pod}-{name}", is_ephemeral=True))
    return tuple(volumes)


def read_volume_claim(plain: Mapping[str, Any]) -> VolumeClaim:
    """Read a PersistentVolumeClaim.

    Errors: raises ContractError.
    """
    read = read_as(plain, _Claim, where="PersistentVolumeClaim")
    metadata, spec = read.metadata, read.spec
    return VolumeClaim(
        key=(metadata.namespace, metadata.name),
        uid=metadata.uid,
        class_name=metadata.annotations.get(_OLD_CLASS, spec.storage_class_name),
        volume=spec.volume_name,
        is_bound=bool(spec.volume_name) and _BOUND in metadata.annotations,
        is_lost=read.status.phase == "Lost",
        is_deleting=bool(metadata.deletion_timestamp),
        selected_node=metadata.annotations.get(_SELECTED_NODE, ""),
        access=frozenset(spec.access_modes),
        size=_storage(spec.resources.requests),
        mode=spec.volume_mode,
        attributes_class=spec.volume_attributes_class_name,
        selector=spec.selector,
        controllers=frozenset(
            str(owner.get("uid")) for owner in metadata.owner_references if owner.get("controller") is True
        ),
    )


def read_volume(plain: Mapping[str, Any]) -> Volume:
    """Read a PersistentVolume.

    Errors: raises ContractError.
    """
    read = read_as(plain, _Volume, where="PersistentVolume")
    metadata, spec = read.metadata, read.spec
    return Volume(
        name=metadata.name,
        class_name=metadata.annotations.get(_OLD_CLASS, spec.storage_class_name),
        claim=(spec.claim_ref.namespace, spec.claim_ref.name) if spec.claim_ref is not None else None,
        claim_uid=spec.claim_ref.uid if spec.claim_ref is not None else "",
        is_available=read.status.phase == "Available",
        is_deleting=bool(metadata.deletion_timestamp),
        access=frozenset(spec.access_modes),
        size=_storage(spec.capacity),
        mode=spec.volume_mode,
        attributes_class=spec.volume_attributes_class_name,
        labels=metadata.labels,
        nodes=spec.node_affinity.required,
        attachment=(spec.csi.driver, spec.csi.volume_handle)
        if spec.csi is not None and spec.csi.driver and spec.csi.volume_handle
        else None,
    )


def read_volume_class(plain: Mapping[str, Any]) -> VolumeClass:
    """Read a StorageClass.

    Errors: raises ContractError.
    """
    read = read_as(plain, _Class, where="StorageClass")
    return VolumeClass(
        name=read.metadata.name,
        provisioner=read.provisioner,
        is_delayed=read.volume_binding_mode == _DELAYED,
        topologies=tuple(
            tuple((label.key, frozenset(label.values)) for label in term.match_label_expressions)
            for term in read.allowed_topologies
        ),
    )


def read_attach_limits(plain: Mapping[str, Any]) -> dict[str, int]:
    """Read from a CSINode how many volumes each driver may attach there.

    A driver without a limit is left out.

    Errors: raises ContractError.
    """
    drivers = read_as(plain, _CsiNode, where="CSINode").spec.drivers
    return {driver.name: driver.allocatable.count for driver in drivers if driver.allocatable.count is not None}


def _storage(amounts: Mapping[str, str | int | float]) -> Quantity:
    """Read an amount of storage.

    The API server has checked it, so a malformed amount counts as nothing.
    """
    try:
        return Quantity.parse(amounts.get("storage", 0))
    except ValueError:
        return _NOTHING
