"""Computes the CPU, memory and other countable resources that nodes have left for a pod, by the
requests of the pods there.

It also finds whether kube-scheduler could free what is short by preemption, which evicts pods of
lower priority. A node on which something stays short is refused, and one on which preemption would
help is tried last.
Source: kube-scheduler's NodeResourcesFit and DefaultPreemption; k8s.io/component-helpers/resource
(PodRequests), 1.36. The changes of a resize in progress are ignored: the spec counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from topobus.values.outcome import Fact, Reason
from topobus.values.quantity import Quantity
from topobus.values.resource_names import RESOURCE_PREFIX

__all__ = ["NodeResources", "PodNeeds", "Shortage", "needs_of", "priority_of", "requests_of", "why_no_room"]

_NOTHING = Quantity(0)
_ONE = Quantity.parse(1)
_PODS = "pods"
# The resources that a pod may request as a whole beside its containers. For others its own
# `resources` are ignored (IsSupportedPodLevelResource).
_OF_WHOLE_PODS = ("cpu", "memory", "hugepages-")

Amounts = dict[str, Quantity]
Key = tuple[str, str]


@dataclass(frozen=True)
class PodNeeds:
    """What a pod requests, and which pods it may preempt for it."""

    amounts: Mapping[str, Quantity]
    priority: int = 0
    may_preempt: bool = True


@dataclass(frozen=True)
class Shortage:
    """A resource of which a node has too little left for a pod."""

    resource: str
    wanted: Quantity
    free: Quantity
    allocatable: Quantity
    is_final: bool
    """Whether there would be too little even without the pods of lower priority."""

    @property
    def is_permanent(self) -> bool:
        """Say whether even the empty node has too little."""
        return self.wanted > self.allocatable


class _Entry(NamedTuple):
    node: str
    """Empty while it waits."""
    priority: int
    amounts: Amounts


class NodeResources:
    """The requests of pods, by node and priority."""

    def __init__(self) -> None:
        self._capacity: dict[str, Amounts] = {}
        self._used: dict[str, Amounts] = {}
        self._by_priority: dict[str, dict[int, Amounts]] = {}
        self._pods: dict[Key, _Entry] = {}
        self.changes = 0
        """Grows whenever a pod comes to a node or leaves it, or a node offers something else: what
        found no room may find some then."""

    def put_node(self, name: str, allocatable: object) -> None:
        """Record what a node offers to pods. A node without amounts has room for anything."""
        offered = _amounts(allocatable)
        if self._capacity.get(name) != offered:
            self.changes += 1
        self._capacity[name] = offered

    def drop_node(self, name: str) -> None:
        """Forget a node."""
        self._capacity.pop(name, None)

    def put_pod(self, key: Key, plain: Mapping[str, Any] | None, *, is_ours: bool = False) -> None:
        """Record a pod as the server shows it, or None for one that is gone.

        Shapes: is_ours — it is kept although it has no node yet, because a node may be intended for
                it. A pod that has ended takes nothing.
        """
        before = self._pods.pop(key, None)
        if before is not None and before.node:
            for used in (self._used[before.node], self._by_priority[before.node][before.priority]):
                for name, amount in before.amounts.items():
                    used[name] = used[name] - amount
        spec = plain.get("spec") if plain is not None else None
        status = plain.get("status") if plain is not None else None
        phase = status.get("phase") if isinstance(status, Mapping) else None
        entry: _Entry | None = None
        if isinstance(spec, Mapping) and phase not in ("Succeeded", "Failed"):
            named = spec.get("nodeName")
            node = named if isinstance(named, str) else ""
            if node or is_ours:
                entry = _Entry(node, priority_of(spec), requests_of(spec) | {_PODS: _ONE})
        if entry is not None:
            self._pods[key] = entry
            if entry.node:
                _add(self._used.setdefault(entry.node, {}), entry.amounts)
                _add(self._by_priority.setdefault(entry.node, {}).setdefault(entry.priority, {}), entry.amounts)
        if (before.node if before is not None else "") != (entry.node if entry is not None else ""):
            self.changes += 1

    def offers(self, node: str, resource: str) -> bool:
        """Say whether a node offers any of a resource."""
        return self._capacity.get(node, {}).get(resource, _NOTHING).nano > 0

    def shortages(
        self, node: str, needs: PodNeeds, *, besides: Collection[Key] = (), by_claims: Collection[str] = ()
    ) -> tuple[Shortage, ...]:
        """List what is short on a node for a pod, by name.

        Empty when it fits, as far as the node's amounts are known.

        Shapes: besides — waiting pods for which the node is intended: they count as if they were
                there; by_claims — extended resources that device classes serve: where a node offers
                none of one, a claim is made for it. Resources of ours are never short permanently:
                the node's devices decide.
        """
        capacity = self._capacity.get(node)
        if not capacity:
            return ()
        intended: Amounts = {}
        for key in besides:
            entry = self._pods.get(key)
            if entry is not None and not entry.node:
                _add(intended, entry.amounts)
        used = self._used.get(node, {})
        short = []
        for name, wanted in (*needs.amounts.items(), (_PODS, _ONE)):
            offered = capacity.get(name, _NOTHING)
            if wanted.nano <= 0 or (name in by_claims and offered.nano <= 0):
                continue
            taken = used.get(name, _NOTHING).nano + intended.get(name, _NOTHING).nano
            if wanted.nano + taken > offered.nano:
                would_lack = wanted.nano + taken - self._going(node, name, needs) > offered.nano
                free = Quantity(offered.nano - taken, offered.form)
                short.append(
                    Shortage(name, wanted, free, offered, is_final=would_lack and not name.startswith(RESOURCE_PREFIX))
                )
        return tuple(sorted(short, key=lambda shortage: shortage.resource))

    def _going(self, node: str, resource: str, needs: PodNeeds) -> int:
        """Add up, in billionths, what would be free of a resource if the pods that this one may
        preempt were gone.
        """
        if not needs.may_preempt:
            return 0
        lower = (amounts for priority, amounts in self._by_priority.get(node, {}).items() if priority < needs.priority)
        return sum(amounts.get(resource, _NOTHING).nano for amounts in lower)


def why_no_room(node: str, shortages: Sequence[Shortage]) -> Reason | None:
    """Explain what a node has too little of even with preemption. None when preemption may help.

    >>> cpu = Shortage("cpu", Quantity.parse(4), Quantity.parse(1), Quantity.parse(8), is_final=True)
    >>> why_no_room("n1", [cpu]).message
    'node n1: no room: the pod requests cpu 4, free are 1 of 8'
    """
    final = [shortage for shortage in shortages if shortage.is_final]
    if not final:
        return None
    amounts = "; ".join(
        f"{short.resource} {short.wanted}, free are {_at_least_nothing(short.free)} of {short.allocatable}"
        for short in final
    )
    facts: dict[str, Fact] = {
        "node": node,
        "resources": tuple(short.resource for short in final),
        "wanted": tuple(str(short.wanted) for short in final),
        "free": tuple(str(_at_least_nothing(short.free)) for short in final),
        "allocatable": tuple(str(short.allocatable) for short in final),
        "hindrances": len(final),
        "permanent": any(short.is_permanent for short in final),
    }
    return Reason(code="no-room", message=f"node {node}: no room: the pod requests {amounts}", facts=facts)


def needs_of(spec: Mapping[str, Any]) -> PodNeeds:
    """Read what a pod requests, its priority, and whether it may preempt others."""
    return PodNeeds(requests_of(spec), priority_of(spec), spec.get("preemptionPolicy") != "Never")


def priority_of(spec: Mapping[str, Any]) -> int:
    """Read a pod's priority, which admission writes. 0 where there is none."""
    priority = spec.get("priority")
    return priority if isinstance(priority, int) and not isinstance(priority, bool) else 0


def requests_of(spec: Mapping[str, Any]) -> Amounts:
    """Add up a pod's requests.

    They are those of its containers and sidecars together, or more where an init container needs
    more, or those of the pod as a whole, plus the overhead. A malformed part counts as nothing,
    because the API server has checked it.
    """
    total: Amounts = {}
    for container in _containers(spec, "containers"):
        _add(total, _asked(container))
    sidecars: Amounts = {}
    peak: Amounts = {}
    for container in _containers(spec, "initContainers"):
        asked = _asked(container)
        if container.get("restartPolicy") == "Always":
            _add(total, asked)
            _add(sidecars, asked)
            continue
        for name, amount in asked.items():
            during = sidecars.get(name, _NOTHING) + amount
            if during.nano > peak.get(name, _NOTHING).nano:
                peak[name] = during
    for name, amount in peak.items():
        if amount.nano > total.get(name, _NOTHING).nano:
            total[name] = amount
    for name, amount in _asked(spec).items():
        if name.startswith(_OF_WHOLE_PODS):
            total[name] = amount
    _add(total, _amounts(spec.get("overhead")))
    return total


def _containers(spec: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    containers = spec.get(part)
    return (
        [container for container in containers if isinstance(container, Mapping)]
        if isinstance(containers, list)
        else []
    )


def _asked(asker: Mapping[str, Any]) -> Amounts:
    """Read what a container, or a pod as a whole, requests."""
    resources = asker.get("resources")
    if not isinstance(resources, Mapping):
        return {}
    # The API server fills requests in from limits; a pod that comes by another way may lack them.
    return _amounts(resources.get("limits")) | _amounts(resources.get("requests"))


def _amounts(value: object) -> Amounts:
    quantities: Amounts = {}
    for name, text in value.items() if isinstance(value, Mapping) else ():
        try:
            quantities[str(name)] = Quantity.parse(text)
        except (ValueError, TypeError):
            continue
    return quantities


def _add(total: Amounts, more: Mapping[str, Quantity]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, _NOTHING) + amount


def _at_least_nothing(amount: Quantity) -> Quantity:
    """Show as 0 what is left on a node that has become smaller than its pods' requests."""
    return max(amount, _NOTHING)
