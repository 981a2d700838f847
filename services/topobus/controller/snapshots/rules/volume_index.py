"""The volumes of a cluster: claims, volumes, classes and the limits of nodes, and which pods use
which claim.

It serves the rules about volumes. Only the fields that these rules read are kept of each object,
and of pods only those that have claims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from topobus.controller.snapshots.rules.snapshot import has_ended, node_of
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


class _User(NamedTuple):
    """A pod with claims."""

    node: str
    """Empty while it waits."""
    volumes: tuple[PodVolume, ...]


class VolumeIndex:
    """A `VolumeView` of the stored objects."""

    def __init__(self) -> None:
        self.claims: dict[Key, VolumeClaim] = {}
        self.volumes: dict[str, Volume] = {}
        self.classes: dict[str, VolumeClass] = {}
        self._limits: dict[str, dict[str, int]] = {}
        self._of_class: dict[str, dict[str, Volume]] = {}
        self._pods: dict[Key, _User] = {}
        self._users: dict[Key, set[Key]] = {}
        self._on: dict[str, set[Key]] = {}
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
        self._forget(key)
        volumes = volumes_of(key[1], plain.get("spec") or {}) if plain is not None and not has_ended(plain) else ()
        if plain is None or not volumes:
            return
        self._pods[key] = user = _User(node_of(plain), volumes)
        for volume in volumes if user.node else ():
            self._users.setdefault((key[0], volume.claim), set()).add(key)
            self._on.setdefault(user.node, set()).add(key)

    def volumes_of(self, pod: Key) -> tuple[PodVolume, ...]:
        """List a pod's volumes that use claims."""
        user = self._pods.get(pod)
        return user.volumes if user is not None else ()

    def of_class(self, name: str) -> Iterable[Volume]:
        """List the volumes of a class."""
        return self._of_class.get(name, {}).values()

    def users_of(self, claim: Key) -> Collection[Key]:
        """Name the pods on nodes that use a claim."""
        return self._users.get(claim, ())

    def limits_of(self, node: str) -> Mapping[str, int]:
        """Map each CSI driver to how many of its volumes may be attached to a node."""
        return self._limits.get(node, {})

    def attached_to(self, node: str) -> Collection[Attachment]:
        """List the volumes of CSI drivers that are used by pods on a node."""
        keys = {(pod[0], volume.claim) for pod in self._on.get(node, ()) for volume in self._pods[pod].volumes}
        claims = (self.claims[key] for key in keys if key in self.claims)
        return {attachment for claim in claims if (attachment := attachment_of(claim, self)) is not None}

    def _forget(self, key: Key) -> None:
        before = self._pods.pop(key, None)
        if before is not None and before.node:
            self._on[before.node].discard(key)
            for volume in before.volumes:
                self._users[key[0], volume.claim].discard(key)

    def _put_volume(self, name: str, volume: Volume | None) -> None:
        before = self.volumes.pop(name, None)
        if before is not None:
            del self._of_class[before.class_name][name]
        if volume is not None:
            self.volumes[name] = volume
            self._of_class.setdefault(volume.class_name, {})[name] = volume
