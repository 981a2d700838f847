"""Kubelet's merge as kubelet does it: every permutation of hints, one comparison after the other.

Slow, and shares no code with ours but distances.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.request import Policy

__all__ = ["better_by_kubelet", "merge_by_permutations"]

Rank = Callable[[NodeSet], tuple[int, float, int]]


def merge_by_permutations(
    lists: Sequence[Sequence[Hint] | None],
    machine: NodeSet,
    policy: Policy,
    distances: Sequence[Sequence[int]],
    *,
    prefer_closest: bool,
) -> tuple[Hint, bool]:
    """Give kubelet's hint and whether the pod is admitted."""
    if policy is Policy.NONE:
        return Hint(None, preferred=False), True
    flat = [
        [Hint(None, preferred=True)] if hints is None else list(hints) or [Hint(None, preferred=False)]
        for hints in lists
    ]
    is_single = policy is Policy.SINGLE_NUMA_NODE
    if is_single:
        flat = [
            [hint for hint in hints if hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)]
            for hints in flat
        ]
    rank = _rank(machine, distances if prefer_closest and not is_single else ())
    width = max(
        (min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0) for hints in flat), default=0
    )
    best: Hint | None = None
    for combination in itertools.product(*flat):
        merged = machine
        for hint in combination:
            merged = merged if hint.nodes is None else merged & hint.nodes
        raw = {hint.nodes for hint in combination if hint.nodes is not None}
        if merged:
            best = _better(
                best, Hint(merged, all(hint.preferred for hint in combination) and len(raw) <= 1), width, rank
            )
    answer = best if best is not None else Hint(machine, preferred=not lists)
    if is_single and answer.nodes == machine:
        answer = Hint(None, answer.preferred)
    return answer, policy is Policy.BEST_EFFORT or answer.preferred


def better_by_kubelet(
    current: Hint, candidate: Hint, width: int, machine: NodeSet, distances: Sequence[Sequence[int]]
) -> Hint:
    """Give the one of two candidates that kubelet keeps."""
    return _better(current, candidate, width, _rank(machine, distances))


def _rank(machine: NodeSet, distances: Sequence[Sequence[int]]) -> Rank:
    """Fewer nodes, then the smaller mean distance, then the smaller value."""
    rows = {node: dict(zip(machine.ids, row, strict=True)) for node, row in zip(machine.ids, distances, strict=False)}

    def rank(nodes: NodeSet) -> tuple[int, float, int]:
        mean = sum(rows[node][other] for node in nodes for other in nodes) / len(nodes) ** 2 if rows else 0.0
        return len(nodes), mean, nodes.bits

    return rank


def _better(current: Hint | None, candidate: Hint, width: int, rank: Rank) -> Hint:
    assert candidate.nodes is not None
    if current is None or current.nodes is None:
        return candidate
    if candidate.preferred != current.preferred:
        return candidate if candidate.preferred else current
    fitter = candidate if rank(candidate.nodes) < rank(current.nodes) else current
    if candidate.preferred:
        return fitter
    candidate_width, current_width = len(candidate.nodes), len(current.nodes)
    if current_width > width:
        return fitter
    if current_width == width:
        return fitter if candidate_width == width else current
    if candidate_width > width:
        return current
    if candidate_width == width:
        return candidate
    if candidate_width == current_width:
        return fitter
    return candidate if candidate_width > current_width else current
