"""The pods on the nodes of a cluster as the rules about other pods see them: their host ports by
node, and groups of like pods with how many are on each node.

Only a reference to the group, the ports and the node are kept of each pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from topobus.controller.snapshots.rules.snapshot import has_ended, node_of
from topobus.engine.scheduling.kube_rules.host_ports import HostPort, host_ports_of
from topobus.engine.scheduling.kube_rules.pod_affinity import PodAffinity, terms_of
from topobus.engine.scheduling.pod_groups import PodGroup
from topobus.formats.kubernetes.shape import read_as

__all__ = ["PlacedPods"]

Key = tuple[str, str]
_GroupKey = tuple[str, tuple[tuple[str, str], ...], bytes, bool]


@dataclass(frozen=True)
class _Entry:
    node: str
    group: _GroupKey
    ports: tuple[HostPort, ...]


class PlacedPods:
    """Pods by group and node."""

    def __init__(self) -> None:
        self._pods: dict[Key, _Entry] = {}
        self._groups: dict[_GroupKey, PodGroup] = {}
        self._nodes: dict[_GroupKey, Counter[str]] = {}
        self._ports: dict[str, Counter[HostPort]] = {}
        self._unbearing = 0

    @property
    def has_anti_affinity(self) -> bool:
        """Say whether any pod has a required anti-affinity: then the rules must check every pod."""
        return self._unbearing > 0

    def put_pod(self, key: Key, plain: Mapping[str, Any] | None) -> None:
        """Store a pod, or remove it with None. One that has ended, or has no node, does not count."""
        self._forget(key)
        node = node_of(plain) if plain is not None and not has_ended(plain) else ""
        if plain is None or not node:
            return
        group_key, group = _group(key[0], plain["metadata"], plain["spec"])
        entry = self._pods[key] = _Entry(node, group_key, host_ports_of(plain["spec"]))
        self._groups.setdefault(group_key, group)
        self._nodes.setdefault(group_key, Counter())[node] += 1
        self._unbearing += bool(group.anti_affinity)
        if entry.ports:
            self._ports.setdefault(node, Counter()).update(entry.ports)

    def groups(self) -> Iterator[tuple[PodGroup, Mapping[str, int]]]:
        """List the groups with how many of their pods are on each node."""
        return ((self._groups[group_key], counts) for group_key, counts in self._nodes.items())

    def ports_on(self, node: str) -> Collection[HostPort]:
        """List the host ports in use on a node."""
        return set(self._ports.get(node, ()))

    def _forget(self, key: Key) -> None:
        entry = self._pods.pop(key, None)
        if entry is None:
            return
        counts = self._nodes[entry.group]
        counts[entry.node] -= 1
        self._nodes[entry.group] = +counts
        self._unbearing -= bool(self._groups[entry.group].anti_affinity)
        if entry.ports:
            self._ports[entry.node].subtract(entry.ports)
            self._ports[entry.node] = +self._ports[entry.node]
        if not self._nodes[entry.group]:
            del self._nodes[entry.group], self._groups[entry.group]


def _group(namespace: str, metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> tuple[_GroupKey, PodGroup]:
    labels: Mapping[str, str] = metadata.get("labels") or {}
    written = (spec.get("affinity") or {}).get("podAntiAffinity")
    terms = terms_of(read_as(written, PodAffinity, where="podAntiAffinity"), namespace) if written else ()
    is_deleting = bool(metadata.get("deletionTimestamp"))
    key = (namespace, tuple(sorted(labels.items())), msgspec.json.encode(written) if terms else b"", is_deleting)
    return key, PodGroup(namespace, labels, terms, is_deleting)
