"""Which pods would have to move so that one more pod fits: the fewest, of these the least important,
and only such as fit elsewhere, are replaced by their owner, and may be disrupted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec
from msgspec import Struct

from topobus.controller.snapshots.rules.cluster_view import ClusterView, Edits, Key, Plain
from topobus.controller.snapshots.rules.explain import explain_pod
from topobus.controller.snapshots.rules.pod_trial import PodTrial
from topobus.controller.snapshots.rules.snapshot import has_ended, node_of
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.scheduling.kube_rules.label_selectors import LabelSelector, selects
from topobus.engine.scheduling.node_resources import priority_of
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
    free = planner.node_that_fits(nodes)
    if free is not None:
        return MovePlan(node=free)
    kept: Counter[str] = Counter()
    movable = {node: planner.movable_on(node, kept) for node in nodes}
    # A node that does not take the pod even when all others are gone needs no further look.
    hopeful = [node for node in nodes if movable[node] and planner.node_that_fits((node,), without=movable[node])]
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
            is_complete = is_complete and not planner.is_cut_short
            return MovePlan(node=best[1], moves=best[3], kept=dict(kept), is_complete=is_complete)
    why = explain_pod(view, key, compiler, is_brief=True).message
    is_complete = is_complete and not planner.is_cut_short
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
        self.is_cut_short = False
        """Whether not all ways to place the pods of some set were tried."""

    def node_that_fits(self, nodes: Sequence[str], *, without: Sequence[_Movable] = ()) -> str | None:
        """Name the first node on which the pod fits once some others are gone. None when there is none."""
        with self._view.changed(self._released(without)):
            trial = PodTrial(self._view, self._key, self._compiler)
            return next((node for node in nodes if trial.fits(node)), None)

    def movable_on(self, node: str, kept: Counter[str]) -> tuple[_Movable, ...]:
        """List the pods of a node that may move, the least important first."""
        movable = []
        for key, plain in self._pods_on.get(node, ()):
            owners: Sequence[Plain] = plain["metadata"].get("ownerReferences") or ()
            owner = next((each for each in owners if each.get("controller")), {})
            budgets = tuple(each for each, budget in self._budgets.items() if _protects(each, budget, key, plain))
            if owner.get("kind") not in _MAKERS:
                kept[f"owned by {owner.get('kind')}" if owner else "made by no controller"] += 1
            elif any(_allowed(self._budgets[each]) < 1 for each in budgets):
                kept["their PodDisruptionBudget allows none"] += 1
            elif any(set(self._view.users_of(claim)) - {key} for claim in self._view.claims_of(key)):
                kept["they share a claim with others"] += 1
            else:
                movable.append(
                    _Movable(
                        key=key,
                        priority=priority_of(plain["spec"]),
                        owner=f"{owner['kind']}/{owner.get('name')}",
                        budgets=budgets,
                    )
                )
        return tuple(sorted(movable, key=lambda pod: (pod.priority, pod.key)))

    def moves(self, chosen: Sequence[_Movable], node: str) -> tuple[Move, ...] | None:
        """Place the pod on a node, and the chosen ones elsewhere. None when one of them fits nowhere, or
        a budget does not allow all.
        """
        disrupted = Counter(budget for pod in chosen for budget in pod.budgets)
        if any(_allowed(self._budgets[budget]) < count for budget, count in disrupted.items()):
            return None
        with self._view.changed(self._released(chosen)):
            placed = PodTrial(self._view, self._key, self._compiler).placed(node)
            if placed is None:
                return None
            self._tries = _MOST_TRIES
            with self._view.changed(placed):
                return self._relocated(sorted(chosen, key=lambda each: (-each.priority, each.key)))

    def _relocated(self, pods: Sequence[_Movable]) -> tuple[Move, ...] | None:
        """Find nodes for pods that are released, trying all ways as far as the tries reach."""
        if not pods:
            return ()
        pod, *others = pods
        trial = PodTrial(self._view, pod.key, self._compiler)
        for node in self._view.node_names:
            self._tries -= 1
            if self._tries < 0:
                self.is_cut_short = True
                return None
            placed = trial.placed(node)
            if placed is None:
                continue
            with self._view.changed(placed):
                rest = self._relocated(others)
            if rest is not None:
                move = Move(
                    namespace=pod.key[0],
                    name=pod.key[1],
                    uid=trial.pod.uid,
                    owner=pod.owner,
                    priority=pod.priority,
                    to=node,
                )
                return (move, *rest)
        return None

    def _released(self, pods: Sequence[_Movable]) -> Edits:
        return {place: plain for pod in pods for place, plain in self._view.released(pod.key).items()}


def _cheapest_first(pods: Sequence[_Movable], count: int) -> Iterator[tuple[_Movable, ...]]:
    """List the sets of so many pods, by the sum of their priorities where there are few of them.

    Pods come the least important first, so the first sets are cheap in any case.
    """
    sets = combinations(pods, count)
    first = [chosen for _, chosen in zip(range(_MOST_SETS + 1), sets, strict=False)]
    yield from sorted(first, key=lambda chosen: (sum(pod.priority for pod in chosen), [pod.key for pod in chosen]))


def _protects(budget_key: Key, budget: Plain, key: Key, plain: Plain) -> bool:
    """Say whether a PodDisruptionBudget is about a pod."""
    selector = (budget.get("spec") or {}).get("selector")
    read = msgspec.convert(selector, LabelSelector | None)
    return budget_key[0] == key[0] and selects(read, plain["metadata"].get("labels") or {})


def _allowed(budget: Plain) -> int:
    return int((budget.get("status") or {}).get("disruptionsAllowed") or 0)
