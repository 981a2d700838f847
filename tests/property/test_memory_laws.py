"""The memory policy's rule against kubelet's own walk over all masks, alone and merged with other
resources.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.engine.alignment.memory.memory_allocation import MemoryBlock, allocate_memory, memory_nodes
from topobus.engine.alignment.memory.memory_rule import MemoryAmount, MemoryNode, memory_rule
from topobus.engine.alignment.merge import dispatch, exact
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.engine.alignment.merge.hint_rule import HintRule, Unit, list_hints
from topobus.engine.alignment.merge.mask_algebra import MaskAlgebra, members, pack, unpack
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import Reason
from topobus.values.request import Policy

IDS = (0, 1, 3, 8, 70)
MACHINE = NodeSet(*IDS)


def walk(nodes: list[MemoryNode], request: dict[str, int], reusable: dict[NodeSet, dict[str, int]]) -> tuple[Hint, ...]:
    """Kubelet's calculateHints, mask by mask."""
    smallest = len(nodes)
    feasible: list[NodeSet] = []
    for size in range(1, len(nodes) + 1):
        for chosen in itertools.combinations(nodes, size):
            mask = NodeSet.of(node.id for node in chosen)
            if any(sum(node.amounts[kind].allocatable for node in chosen) < wanted for kind, wanted in request.items()):
                continue
            smallest = min(smallest, size)
            if size == 1 and len(chosen[0].group) > 1:
                continue
            if size > 1 and any(node.assignments and (len(node.group) == 1 or node.group != mask) for node in chosen):
                continue
            left = reusable.get(mask, {})
            if all(
                sum(node.amounts[kind].free for node in chosen) + left.get(kind, 0) >= wanted
                for kind, wanted in request.items()
            ):
                feasible.append(mask)
    return tuple(Hint(mask, len(mask) == smallest) for mask in feasible)


@st.composite
def memory_states(draw: st.DrawFn) -> tuple[list[MemoryNode], dict[str, int], dict[NodeSet, dict[str, int]]]:
    """Nodes with groups (contradictory ones, too), a request of one or two kinds, and something to
    reuse now and then.
    """
    kinds = draw(st.sampled_from([("memory",), ("memory", "hugepages-2Mi")]))
    ids = draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True).map(sorted))
    groups = [NodeSet.of(draw(st.sets(st.sampled_from(ids), min_size=1))) for _ in range(2)]
    nodes = []
    for node in ids:
        sizes = {kind: draw(st.integers(0, 6)) for kind in kinds}
        group = draw(st.sampled_from([NodeSet(node), NodeSet(node), *groups]))
        nodes.append(
            MemoryNode(
                id=node,
                assignments=draw(st.integers(0, 1)),
                group=group,
                amounts={
                    kind: MemoryAmount(allocatable=size, free=draw(st.integers(0, size)))
                    for kind, size in sizes.items()
                },
            )
        )
    reusable = {}
    if draw(st.booleans()):
        reusable[NodeSet.of(draw(st.sets(st.sampled_from(ids), min_size=1)))] = {"memory": draw(st.integers(1, 4))}
    return nodes, {kind: draw(st.integers(1, 12)) for kind in kinds}, reusable


@settings(max_examples=examples(500), deadline=None)
@given(memory_states())
def test_memory_rule_lists_what_kubelet_walks(
    state: tuple[list[MemoryNode], dict[str, int], dict[NodeSet, dict[str, int]]],
) -> None:
    """The same hints in the same order, and the rule knows their width, their nodes, and each
    projection.
    """
    nodes, request, reusable = state
    wanted = walk(nodes, request, reusable)
    rule = memory_rule(nodes, request, reusable)
    masks = [hint.nodes.bits for hint in wanted if hint.nodes is not None]

    assert list_hints(rule) == wanted
    assert rule.width == (min(mask.bit_count() for mask in masks) if masks else None)
    union = 0
    for mask in masks:
        union |= mask
    assert rule.reach == union
    for size in range(1, len(nodes) + 1):
        for order in itertools.combinations([node.id for node in nodes], size):
            projected = set(members(rule.clipped(MaskAlgebra(size), order))) - {0}
            assert projected == {pack(mask, order) for mask in masks} - {0}
            inside = {unpack(mask, order) for mask in members(rule.inside(MaskAlgebra(size), order))}
            assert inside == {mask for mask in masks if not mask & ~sum(1 << node for node in order)}


unit = st.tuples(st.sampled_from(IDS), st.integers(0, 4), st.integers(0, 4)).map(
    lambda drawn: Unit(1 << drawn[0], max(drawn[1:]), min(drawn[1:]))
)
rules = st.builds(
    HintRule,
    units=st.lists(unit, min_size=1, max_size=5).map(tuple),
    request=st.integers(1, 6),
    candidates=st.sets(st.sampled_from(IDS), min_size=1).map(lambda ids: sum(1 << node for node in ids)),
)
lists = st.lists(
    st.builds(
        Hint, st.one_of(st.none(), st.sets(st.sampled_from([*IDS, 9]), min_size=1).map(NodeSet.of)), st.booleans()
    ),
    max_size=4,
).map(tuple)


@pytest.mark.parametrize("sums_limit", [512, 0], ids=["sums", "dense"])
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    memory=memory_states(),
    others=st.lists(st.one_of(st.none(), rules, lists), max_size=3),
    policy=st.sampled_from(list(Policy)),
    prefer_closest=st.booleans(),
)
def test_merge_with_memory_and_lists_equals_the_merge_of_lists(
    monkeypatch: pytest.MonkeyPatch,
    sums_limit: int,
    memory: tuple[list[MemoryNode], dict[str, int], dict[NodeSet, dict[str, int]]],
    others: list[HintRule | tuple[Hint, ...] | None],
    policy: Policy,
    prefer_closest: bool,
) -> None:
    """Rules, memory and custom hints together give what the lists behind them give.

    Memory counts once a kind, as in kubelet.
    """
    nodes, request, reusable = memory
    rule = memory_rule(nodes, request, reusable)
    distances = tuple(tuple(10 + abs(node - other) % 13 for other in IDS) for node in IDS)
    opinions = [*others, *([rule] * len(request))]
    plain = [list_hints(opinion) if isinstance(opinion, HintRule) else opinion for opinion in others] + [
        list_hints(rule)
    ] * len(request)

    with monkeypatch.context() as patch:
        patch.setattr(exact, "_SUMS_LIMIT", sums_limit)
        by_rule = merge_hints(opinions, MACHINE, policy, distances=distances, prefer_closest=prefer_closest)
    by_list = merge_hints(plain, MACHINE, policy, distances=distances, prefer_closest=prefer_closest)

    assert (by_rule.hint, by_rule.is_admitted, by_rule.width) == (by_list.hint, by_list.is_admitted, by_list.width)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=8))
def test_memory_is_conserved_when_blocks_come_and_go(wishes: list[tuple[int, bool]]) -> None:
    """Whatever is allocated is taken from somewhere once, groups never overlap, and all is free
    again when all blocks are gone.
    """
    capacity = {node: {"memory": 8} for node in range(4)}
    blocks: list[MemoryBlock] = []
    for wanted, is_released in wishes:
        nodes = memory_nodes(capacity, blocks)
        made = allocate_memory(nodes, {"memory": wanted}, Hint(None, preferred=False))
        if isinstance(made, Reason):
            assert not list_hints(memory_rule(nodes, {"memory": wanted}))
            continue
        assert made[0].size_bytes == wanted
        blocks += made
        if is_released:
            blocks.pop(0)
        for node in memory_nodes(capacity, blocks):
            assert 0 <= node.amounts["memory"].free <= 8
            assert node.assignments == 0 or all(block.nodes == node.group for block in blocks if node.id in block.nodes)

    assert all(node.amounts["memory"].free == 8 and node.assignments == 0 for node in memory_nodes(capacity, []))


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    memory=memory_states(),
    others=st.lists(st.one_of(rules, lists), min_size=1, max_size=3),
    prefer_closest=st.booleans(),
)
def test_merge_of_very_large_machines_gives_right_hints(
    monkeypatch: pytest.MonkeyPatch,
    memory: tuple[list[MemoryNode], dict[str, int], dict[NodeSet, dict[str, int]]],
    others: list[HintRule | tuple[Hint, ...]],
    prefer_closest: bool,
) -> None:
    """Where no bitset reaches, a preferred answer is never lost nor invented, and any other answer
    is a reachable one.
    """
    nodes, request, reusable = memory
    rule = memory_rule(nodes, request, reusable)
    distances = tuple(tuple(10 + abs(node - other) % 13 for other in IDS) for node in IDS)
    plain = [list_hints(opinion) if isinstance(opinion, HintRule) else opinion for opinion in others] + [
        list_hints(rule)
    ] * len(request)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "BITSET_LIMIT", -1)
        large = merge_hints(
            [*others, *([rule] * len(request))],
            MACHINE,
            Policy.BEST_EFFORT,
            distances=distances,
            prefer_closest=prefer_closest,
        )
    wanted = merge_hints(plain, MACHINE, Policy.BEST_EFFORT, distances=distances, prefer_closest=prefer_closest)

    assert large.hint.preferred == wanted.hint.preferred
    assert large.width == wanted.width
    if large.is_exact:
        assert large.hint == wanted.hint
    reachable = {MACHINE.bits}
    for hints in plain:
        masks = {MACHINE.bits if hint.nodes is None else hint.nodes.bits for hint in hints} or {MACHINE.bits}
        reachable = {mask & other for mask in masks for other in reachable}
    assert large.hint.nodes is not None
    assert large.hint.nodes.bits in reachable or not reachable - {0}
