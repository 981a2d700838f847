"""The volumes of a cluster: claims, volumes, classes and the limits of nodes, and which pods use
which claim.

It serves the rules about volumes. Only the fields that these rules read are kept of each object,
and of pods only those that have claims.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

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

__all__ = ["VOLUME_KINDS", "VolumeIndex"]

Key = tuple[str, str]

VOLUME_KINDS = frozenset({"PersistentVolumeClaim", "PersistentVolume", "StorageClass", "CSINode"})


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
        self._changes = 0
        self.revision = 0
        """Grows with each change that may affect a pod's volumes."""
        self._readers: dict[str, Callable[[Key, Mapping[str, Any]], None]] = {
            "PersistentVolumeClaim": lambda key, plain: self._put(self.claims, key, read_volume_claim(plain)),
            "PersistentVolume": lambda key, plain: self._put_volume(key[1], read_volume(plain)),
            "StorageClass": lambda key, plain: self._put(self.classes, key[1], read_volume_class(plain)),
            "CSINode": lambda key, plain: self._put(self._limits, key[1], read_attach_limits(plain)),
        }

    def put(self, kind: str, key: Key, plain: Mapping[str, Any]) -> None:
        """Store an object of one of `VOLUME_KINDS`.

        Errors: raises ContractError for an object that cannot be read.
        """
        self._readers[kind](key, plain)

    def drop(self, kind: str, key: Key) -> None:
        """Remove an object."""
        if kind == "PersistentVolume":
            self._put_volume(key[1], None)
        else:
            kept, name = self._kept(kind), key if kind == "PersistentVolumeClaim" else key[1]
            was_there = kept.pop(name, None) is not None
            self.revision += was_there
            self._changes += was_there and kept is not self.claims

    def count(self, kind: str) -> int:
        """Count the objects of a kind."""
        return len(self._kept(kind))

    def put_pod(self, key: Key, plain: Mapping[str, Any] | None, *, is_ours: bool = False) -> None:
        """Store a pod, or remove it with None.

        A pod that has ended, or that waits for another scheduler (not `is_ours`), uses nothing.
        """
        self._forget(key)
        spec, status = ((plain or {}).get(part) for part in ("spec", "status"))
        phase = status.get("phase") if isinstance(status, Mapping) else None
        volumes = volumes_of(key[1], spec) if isinstance(spec, Mapping) and phase not in ("Succeeded", "Failed") else ()
        named = spec.get("nodeName") if isinstance(spec, Mapping) else None
        node = named if isinstance(named, str) else ""
        if not volumes or not (node or is_ours):
            return
        self._pods[key] = _User(node, volumes)
        for volume in volumes:
            self._users.setdefault((key[0], volume.claim), set()).add(key)
        if node:
            self._on.setdefault(node, set()).add(key)

    def volumes_of(self, pod: Key) -> tuple[PodVolume, ...]:
        """List a pod's volumes that use claims."""
        user = self._pods.get(pod)
        return user.volumes if user is not None else ()

    def version_for(self, pod: Key) -> Hashable:
        """Return a value that changes with everything that a pod's volumes depend on: its claims,
        and any volume, class or limit.
        """
        volumes = self.volumes_of(pod)
        return (self._changes, *(self.claims.get((pod[0], volume.claim)) for volume in volumes)) if volumes else ()

    def of_class(self, name: str) -> Iterable[Volume]:
        """List the volumes of a class."""
        return self._of_class.get(name, {}).values()

    def users_of(self, claim: Key, assumed: Collection[Key]) -> Collection[Key]:
        """Name the pods that use a claim: those on nodes, and those of `assumed`, for which a node
        is intended.
        """
        return [pod for pod in self._users.get(claim, ()) if self._pods[pod].node or pod in assumed]

    def limits_of(self, node: str) -> Mapping[str, int]:
        """Map each CSI driver to how many of its volumes may be attached to a node."""
        return self._limits.get(node, {})

    def attached_to(self, node: str, assumed: Collection[Key]) -> Collection[Attachment]:
        """List the volumes of CSI drivers that are used by pods on a node and by those of
        `assumed`.
        """
        pods = {*self._on.get(node, ()), *(pod for pod in assumed if pod in self._pods)}
        keys = {(pod[0], volume.claim) for pod in pods for volume in self._pods[pod].volumes}
        claims = (self.claims[key] for key in keys if key in self.claims)
        return {attachment for claim in claims if (attachment := attachment_of(claim, self)) is not None}

    def _forget(self, key: Key) -> None:
        before = self._pods.pop(key, None)
        if before is None:
            return
        for claim in {(key[0], volume.claim) for volume in before.volumes}:
            self._users[claim].discard(key)
            if not self._users[claim]:
                del self._users[claim]
        if before.node:
            self._on[before.node].discard(key)
            if not self._on[before.node]:
                del self._on[before.node]

    def _put(self, kept: dict[Any, Any], key: Hashable, value: object) -> None:
        # Only a claim's value concerns its pods.
        is_news = kept.get(key) != value
        self.revision += is_news
        self._changes += is_news and kept is not self.claims
        kept[key] = value

    def _put_volume(self, name: str, volume: Volume | None) -> None:
        before = self.volumes.pop(name, None)
        self.revision += before != volume
        self._changes += before != volume
        if before is not None:
            del self._of_class[before.class_name][name]
            if not self._of_class[before.class_name]:
                del self._of_class[before.class_name]
        if volume is not None:
            self.volumes[name] = volume
            self._of_class.setdefault(volume.class_name, {})[name] = volume

    def _kept(self, kind: str) -> dict[Any, Any]:
        match kind:
            case "PersistentVolumeClaim":
                return self.claims
            case "PersistentVolume":
                return self.volumes
            case "StorageClass":
                return self.classes
            case _:
                return self._limits
