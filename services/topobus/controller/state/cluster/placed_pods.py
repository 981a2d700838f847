"""The pods of a cluster as the rules about other pods see them: their host ports by node, and
groups of like pods with how many are on each node.

Pods behind our gate are included, and a pod counts on the node that is intended for it. Only a
reference to the group, the ports and the node are kept of each pod.
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
    """Empty while it waits."""
    group: _GroupKey
    ports: tuple[HostPort, ...]


class PlacedPods:
    """Pods by group and node."""

    def __init__(self) -> None:
        self._pods: dict[Key, _Entry] = {}
        self._groups: dict[_GroupKey, PodGroup] = {}
        self._members: Counter[_GroupKey] = Counter()
        self._nodes: dict[_GroupKey, Counter[str]] = {}
        self._ports: dict[str, Counter[HostPort]] = {}
        self._unbearing = 0

    @property
    def has_anti_affinity(self) -> bool:
        """Say whether any pod, placed or waiting, has a required anti-affinity: then the rules must
        check every pod.
        """
        return self._unbearing > 0

    def put_pod(self, key: Key, plain: Mapping[str, Any] | None, *, is_ours: bool = False) -> None:
        """Store a pod, or remove it with None.

        A pod that has ended, or that waits for another scheduler (not `is_ours`), does not count.
        """
        self._forget(key)
        spec, metadata, status = ((plain or {}).get(part) for part in ("spec", "metadata", "status"))
        phase = status.get("phase") if isinstance(status, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(metadata, Mapping) or phase in ("Succeeded", "Failed"):
            return
        named = spec.get("nodeName")
        node = named if isinstance(named, str) else ""
        if not node and not is_ours:
            return
        group_key, group = _group(key[0], metadata, spec)
        entry = _Entry(node, group_key, host_ports_of(spec))
        self._pods[key] = entry
        self._groups.setdefault(group_key, group)
        self._members[group_key] += 1
        self._unbearing += bool(group.anti_affinity)
        if node:
            self._nodes.setdefault(group_key, Counter())[node] += 1
            if entry.ports:
                self._ports.setdefault(node, Counter()).update(entry.ports)

    def groups(self, assumed: Mapping[Key, str]) -> Iterator[tuple[PodGroup, Mapping[str, int]]]:
        """List the groups with how many of their pods are on each node.

        Shapes: assumed — waiting pods to the nodes that are intended for them, where they count as
        present.
        """
        more: dict[_GroupKey, Counter[str]] = {}
        for key, node in assumed.items():
            entry = self._pods.get(key)
            if entry is not None and not entry.node:
                more.setdefault(entry.group, Counter())[node] += 1
        for group_key in self._nodes.keys() | more.keys():
            counts = self._nodes.get(group_key, Counter())
            yield self._groups[group_key], counts + more[group_key] if group_key in more else counts

    def ports_on(self, node: str, assumed: Mapping[Key, str]) -> Collection[HostPort]:
        """List the host ports in use on a node, including those of pods that are intended for
        it.
        """
        used = set(self._ports.get(node, ()))
        for key, intended in assumed.items():
            entry = self._pods.get(key)
            if intended == node and entry is not None and not entry.node:
                used.update(entry.ports)
        return used

    def _forget(self, key: Key) -> None:
        entry = self._pods.pop(key, None)
        if entry is None:
            return
        group_key = entry.group
        self._unbearing -= bool(self._groups[group_key].anti_affinity)
        self._members[group_key] -= 1
        if entry.node:
            counts = self._nodes[group_key]
            counts[entry.node] -= 1
            if not counts[entry.node]:
                del counts[entry.node]
            if not counts:
                del self._nodes[group_key]
            if entry.ports:
                used = self._ports[entry.node]
                used.subtract(entry.ports)
                self._ports[entry.node] = +used
                if not self._ports[entry.node]:
                    del self._ports[entry.node]
        if not self._members[group_key]:
            del self._members[group_key]
            del self._groups[group_key]


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
