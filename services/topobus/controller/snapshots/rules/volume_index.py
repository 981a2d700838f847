"""The volumes of a cluster: claims, volumes, classes and the limits of nodes, and which pods use
which claim.

It serves the rules about volumes. Only the fields that these rules read are kept of each object,
and of pods only those that have claims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from topobus.controller.snapshots.rules.snapshot import has_ended, node_of
from topobus.controller.state.links import Links
from topobus.engine.scheduling.kube_rules.volume_rules import attachment_of
from topobus.engine.scheduling.kube_rules.volumes import (
    VOLUME_SHAPES,
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

__all__ = ["VOLUME_KINDS", "VolumeIndex"]

Key = tuple[str, str]

VOLUME_KINDS = frozenset(VOLUME_SHAPES)


class VolumeIndex:
    """A `VolumeView` of the stored objects."""

    def __init__(self) -> None:
        self.claims: dict[Key, VolumeClaim] = {}
        self.volumes: dict[str, Volume] = {}
        self.classes: dict[str, VolumeClass] = {}
        self._limits: dict[str, dict[str, int]] = {}
        self._of_class: dict[str, dict[str, Volume]] = {}
        self._volumes: dict[Key, tuple[PodVolume, ...]] = {}
        """Of the pods that have claims."""
        self._claims: Links[Key, Key] = Links()
        """Each pod on a node with the claims that it uses."""
        self._nodes: Links[Key, str] = Links()
        self._readers: dict[str, Callable[[Key, Mapping[str, Any]], None]] = {
            "PersistentVolumeClaim": lambda key, plain: self.claims.__setitem__(key, read_volume_claim(plain)),
            "PersistentVolume": lambda key, plain: self._put_volume(key[1], read_volume(plain)),
            "StorageClass": lambda key, plain: self.classes.__setitem__(key[1], read_volume_class(plain)),
            "CSINode": lambda key, plain: self._limits.__setitem__(key[1], read_attach_limits(plain)),
        }

    def put(self, kind: str, key: Key, plain: Mapping[str, Any]) -> None:
        """Store an object of one of `VOLUME_KINDS`.

        Errors: raises ContractError for an object that cannot be read.
        """
        self._readers[kind](key, plain)

    def drop(self, kind: str, key: Key) -> None:
        """Remove an object."""
        match kind:
            case "PersistentVolumeClaim":
                self.claims.pop(key, None)
            case "PersistentVolume":
                self._put_volume(key[1], None)
            case "StorageClass":
                self.classes.pop(key[1], None)
            case _:
                self._limits.pop(key[1], None)

    def put_pod(self, key: Key, plain: Mapping[str, Any] | None) -> None:
        """Store a pod, or remove it with None. One that has ended uses nothing."""
        volumes = volumes_of(key[1], plain.get("spec") or {}) if plain is not None and not has_ended(plain) else ()
        node = node_of(plain) if plain is not None and volumes else ""
        self._volumes.pop(key, None)
        if volumes:
            self._volumes[key] = volumes
        self._claims.put(key, [(key[0], volume.claim) for volume in volumes] if node else ())
        self._nodes.put(key, (node,) if node else ())

    def volumes_of(self, pod: Key) -> tuple[PodVolume, ...]:
        """List a pod's volumes that use claims."""
        return self._volumes.get(pod, ())

    def of_class(self, name: str) -> Iterable[Volume]:
        """List the volumes of a class."""
        return self._of_class.get(name, {}).values()

    def users_of(self, claim: Key) -> Collection[Key]:
        """Name the pods on nodes that use a claim."""
        return self._claims.keys_of(claim)

    def limits_of(self, node: str) -> Mapping[str, int]:
        """Map each CSI driver to how many of its volumes may be attached to a node."""
        return self._limits.get(node, {})

    def attached_to(self, node: str) -> Collection[Attachment]:
        """List the volumes of CSI drivers that are used by pods on a node."""
        keys = {claim for pod in self._nodes.keys_of(node) for claim in self._claims.targets_of(pod)}
        claims = (self.claims[key] for key in keys if key in self.claims)
        return {attachment for claim in claims if (attachment := attachment_of(claim, self)) is not None}

    def _put_volume(self, name: str, volume: Volume | None) -> None:
        before = self.volumes.pop(name, None)
        if before is not None:
            del self._of_class[before.class_name][name]
        if volume is not None:
            self.volumes[name] = volume
            self._of_class.setdefault(volume.class_name, {})[name] = volume
