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

from topobus.engine.scheduling.kube_rules.host_ports import HostPort, host_ports_of
from topobus.engine.scheduling.kube_rules.pod_affinity import PodAffinity, terms_of
from topobus.engine.scheduling.pod_groups import AffinityTerm, PodGroup
from topobus.formats.kubernetes.shape import read_as
from topobus.values.errors import ContractError

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
        spec, metadata, status = ((plain or {}).get(part) for part in ("spec", "metadata", "status"))
        phase = status.get("phase") if isinstance(status, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(metadata, Mapping) or phase in ("Succeeded", "Failed"):
            return
        node = spec.get("nodeName")
        if not isinstance(node, str) or not node:
            return
        group_key, group = _group(key[0], metadata, spec)
        entry = self._pods[key] = _Entry(node, group_key, host_ports_of(spec))
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
    """Make the group of a pod.

    Unreadable parts of other schedulers' pods are ignored, for the API server has checked them.
    """
    written_labels = metadata.get("labels")
    labels = (
        {str(key): str(value) for key, value in written_labels.items()} if isinstance(written_labels, Mapping) else {}
    )
    affinity = spec.get("affinity")
    written = affinity.get("podAntiAffinity") if isinstance(affinity, Mapping) else None
    terms: tuple[AffinityTerm, ...] = ()
    if isinstance(written, Mapping):
        try:
            terms = terms_of(read_as(written, PodAffinity, where="podAntiAffinity"), namespace)
        except ContractError:
            written = None
    is_deleting = bool(metadata.get("deletionTimestamp"))
    key = (namespace, tuple(sorted(labels.items())), msgspec.json.encode(written) if terms else b"", is_deleting)
    return key, PodGroup(namespace, labels, terms, is_deleting)
