"""Which pods would have to move so that one more pod fits: the fewest, of these the least important,
and only such as fit elsewhere, are replaced by their owner, and may be disrupted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
from msgspec import Struct

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Edits, Key, Plain
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.pod_trial import PodTrial
from topobus.controller.snapshots.rules.snapshot import has_ended, node_of
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.templates import owner_pod_uid
from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector, selects
from topobus.values.cluster_answers import Move, MovePlan

__all__ = ["plan_moves"]

# Sets of pods that are tried on one node for each number of pods: some seconds.
_MOST_SETS = 2_000
# Nodes that are tried for the pods of one set.
_MOST_TRIES = 1_000
# Owners that replace a pod when it is gone.
_MAKERS = ("ReplicaSet", "StatefulSet", "ReplicationController", "Job")


class _Movable(Struct, frozen=True, kw_only=True):
    key: Key
    priority: int
    owner: str
    budgets: tuple[Key, ...]


def plan_moves(view: ClusterView, key: Key, compiler: SelectorCompiler) -> MovePlan:
    """Find the fewest pods that would have to move so that a pod of the snapshot fits.

    Order: the fewest pods, then the lowest sum of priorities, then the node's name, then the pods'.
    Errors: raises ContractError for a pod that cannot be read.
    """
    planner = _Planner(view, key, compiler)
    nodes = view.node_names
    free = next((node for node in nodes if planner.fits(key, {}, node)), None)
    if free is not None:
        return MovePlan(node=free)
    kept: Counter[str] = Counter()
    movable = {node: planner.movable_on(node, kept) for node in nodes}
    # A node that does not take the pod even when all others are gone needs no further look.
    hopeful = [node for node in nodes if movable[node] and planner.fits(key, planner.without(movable[node]), node)]
    is_complete = True
    for count in range(1, max((len(movable[node]) for node in hopeful), default=0) + 1):
        best: tuple[int, str, tuple[_Movable, ...], tuple[Move, ...]] | None = None
        for node in hopeful:
            for number, chosen in enumerate(_cheapest_first(movable[node], count)):
                cost = sum(pod.priority for pod in chosen)
                if number >= _MOST_SETS or (best is not None and cost >= best[0]):
                    is_complete = is_complete and number < _MOST_SETS
                    break
                moves = planner.moves(chosen, node)
                if moves is not None:
                    best = (cost, node, chosen, moves)
                    break
        if best is not None:
            return MovePlan(node=best[1], moves=best[3], kept=dict(kept), is_complete=is_complete)
    why = explain_pod(view, key, compiler, is_brief=True).message
    return MovePlan(kept=dict(sorted(kept.items())), why=why, is_complete=is_complete)


class _Planner:
    def __init__(self, view: ClusterView, key: Key, compiler: SelectorCompiler) -> None:
        self._view, self._key, self._compiler = view, key, compiler
        self._budgets = dict(view.of_kind("PodDisruptionBudget"))
        self._pods_on: dict[str, list[tuple[Key, Plain]]] = defaultdict(list)
        for place, plain in view.of_kind("Pod"):
            if not has_ended(plain):
                self._pods_on[node_of(plain)].append((place, plain))
        self._tries = 0

    def fits(self, key: Key, edits: Edits, node: str) -> bool:
        """Say whether a pod that waits fits on a node after some edits."""
        with self._view.changed(edits):
            return self._trial(key).fits(node)

    def movable_on(self, node: str, kept: Counter[str]) -> tuple[_Movable, ...]:
        """List the pods of a node that may move, the least important first."""
        movable = []
        for key, plain in self._pods_on.get(node, ()):
            owner = next((each for each in _owners(plain) if each.get("controller")), {})
            budgets = tuple(each for each, budget in self._budgets.items() if _protects(each, budget, key, plain))
            if owner.get("kind") not in _MAKERS:
                kept[f"owned by {owner.get('kind')}" if owner else "made by no controller"] += 1
            elif any(_allowed(self._budgets[each]) < 1 for each in budgets):
                kept["their PodDisruptionBudget allows none"] += 1
            elif not self._has_own_claims(key, plain):
                kept["they share a claim with others"] += 1
            else:
                priority = (plain.get("spec") or {}).get("priority")
                movable.append(
                    _Movable(
                        key=key,
                        priority=priority if isinstance(priority, int) else 0,
                        owner=f"{owner['kind']}/{owner.get('name')}",
                        budgets=budgets,
                    )
                )
        return tuple(sorted(movable, key=lambda pod: (pod.priority, pod.key)))

    def without(self, pods: Sequence[_Movable]) -> Edits:
        """Take pods away, with the allocations of their claims."""
        edits: dict[tuple[str, Key], Plain | None] = {("Pod", pod.key): None for pod in pods}
        for pod in pods:
            for claim in self._claims_of(pod.key):
                edits["ResourceClaim", claim] = {**self._view.objects["ResourceClaim", claim], "status": {}}
        return edits

    def moves(self, chosen: Sequence[_Movable], node: str) -> tuple[Move, ...] | None:
        """Place the pod on a node, and the chosen ones elsewhere. None when one of them fits nowhere, or
        a budget does not allow all.
        """
        disrupted = Counter(budget for pod in chosen for budget in pod.budgets)
        if any(_allowed(self._budgets[budget]) < count for budget, count in disrupted.items()):
            return None
        edits = dict(self.without(chosen))
        placed = self._placed(self._key, edits, node)
        if placed is None:
            return None
        edits |= placed
        self._tries = _MOST_TRIES
        return self._relocated(sorted(chosen, key=lambda each: (-each.priority, each.key)), edits)

    def _relocated(self, pods: Sequence[_Movable], edits: Edits) -> tuple[Move, ...] | None:
        """Find nodes for pods that are gone, trying all ways as far as the tries reach."""
        if not pods:
            return ()
        pod, *others = pods
        plain = self._view.objects["Pod", pod.key]
        spec = {name: value for name, value in plain["spec"].items() if name != "nodeName"}
        waiting: Edits = {**edits, ("Pod", pod.key): {**plain, "spec": spec}}
        for node in self._view.node_names:
            self._tries -= 1
            if self._tries < 0:
                return None
            placed = self._placed(pod.key, waiting, node)
            rest = self._relocated(others, {**waiting, **placed}) if placed is not None else None
            if rest is not None:
                move = Move(
                    namespace=pod.key[0],
                    name=pod.key[1],
                    uid=str((plain.get("metadata") or {}).get("uid") or ""),
                    owner=pod.owner,
                    priority=pod.priority,
                    to=node,
                )
                return (move, *rest)
        return None

    def _placed(self, key: Key, edits: Edits, node: str) -> dict[tuple[str, Key], Plain | None] | None:
        """Return the edits that place a pod on a node. None when it does not fit there."""
        with self._view.changed(edits):
            return self._trial(key).placed(node)

    def _trial(self, key: Key) -> PodTrial:
        pod = self._view.pod(key)
        assert pod is not None
        return PodTrial(self._view, key, pod, self._compiler)

    def _claims_of(self, key: Key) -> tuple[Key, ...]:
        pod = self._view.pod(key)
        assert pod is not None
        return tuple((key[0], use.claim) for use in pod.uses if use.claim and (key[0], use.claim) in self._view.claims)

    def _has_own_claims(self, key: Key, plain: Plain) -> bool:
        """Say whether no other pod has reserved the claims of a pod: then they end with it."""
        for place in self._claims_of(key):
            claim = self._view.claim(place)
            assert claim is not None
            is_made_for = owner_pod_uid(claim.object) == (plain.get("metadata") or {}).get("uid")
            if not is_made_for and set(self._view.users_of(claim)) != {key}:
                return False
        return True


def _cheapest_first(pods: Sequence[_Movable], count: int) -> Iterator[tuple[_Movable, ...]]:
    """List the sets of so many pods, by the sum of their priorities where there are few of them.

    Pods come the least important first, so the first sets are cheap in any case.
    """
    sets = combinations(pods, count)
    first = [chosen for _, chosen in zip(range(_MOST_SETS + 1), sets, strict=False)]
    yield from sorted(first, key=lambda chosen: (sum(pod.priority for pod in chosen), [pod.key for pod in chosen]))


def _owners(plain: Plain) -> list[dict[str, Any]]:
    return list((plain.get("metadata") or {}).get("ownerReferences") or ())


def _protects(budget_key: Key, budget: Plain, key: Key, plain: Plain) -> bool:
    """Say whether a PodDisruptionBudget is about a pod."""
    selector = (budget.get("spec") or {}).get("selector")
    labels: Mapping[str, str] = (plain.get("metadata") or {}).get("labels") or {}
    return budget_key[0] == key[0] and selects(
        msgspec.convert(selector, LabelSelector) if selector is not None else None, labels
    )


def _allowed(budget: Plain) -> int:
    allowed = (budget.get("status") or {}).get("disruptionsAllowed")
    return allowed if isinstance(allowed, int) else 0
