"""Computes the CPU, memory and other countable resources that nodes have left, by the requests of bound pods.

Flows in: every bound pod and every node. Flows out: whether a pod's requests fit beside the pods of a node. It is a hint: nodes without room are
tried last and never refused, since kube-scheduler decides (preemption, in-place resizes, and overhead that admission adds later can change the
answer).
Source: kube-scheduler's NodeResourcesFit; k8s.io/component-helpers/resource (PodRequests), 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.domain.quantity import Quantity

__all__ = ["NodeResources", "requests_of"]

_NOTHING = Quantity(0)
_PODS = "pods"

Amounts = dict[str, Quantity]


class NodeResources:
    """What bound pods ask for, by node."""

    def __init__(self) -> None:
        self._capacity: dict[str, Amounts] = {}
        self._used: dict[str, Amounts] = {}
        self._pods: dict[tuple[str, str], tuple[str, Amounts]] = {}

    def put_node(self, name: str, allocatable: object) -> None:
        """Take in what a node offers to pods; a node that does not say so has room for anything."""
        self._capacity[name] = _amounts(allocatable)

    def drop_node(self, name: str) -> None:
        """Forget a node."""
        self._capacity.pop(name, None)

    def put_pod(self, key: tuple[str, str], plain: Mapping[str, Any] | None) -> None:
        """Take in a pod as the server shows it, or None for one that is gone; one without a node, or that has ended, takes nothing."""
        node, before = self._pods.pop(key, ("", {}))
        for name, amount in before.items():
            self._used[node][name] = self._used[node][name] - amount
        spec = plain.get("spec") if plain is not None else None
        status = plain.get("status") if plain is not None else None
        phase = status.get("phase") if isinstance(status, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(spec.get("nodeName"), str) or phase in ("Succeeded", "Failed"):
            return
        asked = requests_of(spec) | {_PODS: Quantity.parse(1)}
        self._pods[key] = (spec["nodeName"], asked)
        used = self._used.setdefault(spec["nodeName"], {})
        for name, amount in asked.items():
            used[name] = used.get(name, _NOTHING) + amount

    def fits(self, node: str, asked: Mapping[str, Quantity]) -> bool:
        """Say whether a pod's requests fit beside those of the pods on a node, as far as the node says what it has."""
        capacity, used = self._capacity.get(node, {}), self._used.get(node, {})
        wanted = {**asked, _PODS: Quantity.parse(1)}
        return not capacity or all(
            (used.get(name, _NOTHING) + amount).nano <= capacity.get(name, _NOTHING).nano
            for name, amount in wanted.items()
            if amount.nano > 0
        )


def requests_of(spec: Mapping[str, Any]) -> Amounts:
    """Add up what a pod asks for: its containers and sidecars together, or more where an init container needs more; and the overhead.

    What cannot be read counts as nothing: the API server has checked it, and this is a hint.
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
    _add(total, _amounts(spec.get("overhead")))
    return total


def _containers(spec: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    containers = spec.get(part)
    return [container for container in containers if isinstance(container, Mapping)] if isinstance(containers, list) else []


def _asked(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources")
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
