"""The search for the fittest mask that all resources reach together equals trying all combinations
of each, also with several kinds of memory at once.
"""

from __future__ import annotations

from functools import reduce
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.engine.alignment.memory.memory_rule import MemoryAmount, MemoryNode, memory_rule
from topobus.engine.alignment.merge.beyond_bitset import find_combined
from topobus.engine.alignment.merge.fitness import fit_order
from topobus.engine.alignment.merge.hint_rule import HintRule, Unit
from topobus.values.idset import NodeSet

KINDS = ("memory", "hugepages-2Mi")
sizes = st.sampled_from([0, 0, 1, 2, 3, 5])


@st.composite
def memory_rules(draw: st.DrawFn, count: int) -> HintRule:
    """Memory of one or two kinds on nodes that hold nothing yet."""
    kinds = KINDS[: draw(st.integers(1, 2))]
    nodes = [
        MemoryNode(
            id=node,
            group=NodeSet(node),
            amounts={kind: MemoryAmount(allocatable=size, free=size) for kind in kinds for size in [draw(sizes)]},
        )
        for node in range(count)
    ]
    return memory_rule(nodes, {kind: draw(st.integers(1, 6)) for kind in kinds})


@st.composite
def device_rules(draw: st.DrawFn, count: int) -> HintRule:
    """Devices, one node each."""
    amounts = [draw(sizes) for _ in range(count)]
    units = tuple(Unit(1 << node, amount, amount) for node, amount in enumerate(amounts))
    return HintRule(units=units, request=draw(st.integers(1, 8)), candidates=(1 << count) - 1)


@st.composite
def rules_on_nodes(draw: st.DrawFn) -> tuple[int, list[HintRule]]:
    """Two or three resources that each can be had, on up to six nodes."""
    count = draw(st.integers(3, 6))
    rule = st.one_of(memory_rules(count), device_rules(count)).filter(lambda rule: rule.is_combining)
    return count, draw(st.lists(rule, min_size=2, max_size=3))


def try_all(rules: list[HintRule], count: int) -> set[int]:
    """List every mask that is an intersection of one combination from each rule."""
    combinations_by_rule = [{mask for mask in range(1, 1 << count) if rule.combines(mask)} for rule in rules]
    return reduce(lambda masks, more: {mask & other for mask in masks for other in more}, combinations_by_rule)


@settings(max_examples=examples(300))
@given(rules_on_nodes(), st.booleans(), st.data())
def test_search_finds_the_fittest_mask_that_trying_all_combinations_finds(
    case: tuple[int, list[HintRule]], is_closest: bool, data: st.DataObject
) -> None:
    """Of the wanted width, proved, and of smallest value or distance."""
    count, rules = case
    size = data.draw(st.integers(max(rule.combination_width or 0 for rule in rules), count))
    rows = [
        [10 if node == other else 10 + (7 * (node + other) + node * other) % 13 for other in range(count)]
        for node in range(count)
    ]
    fit = fit_order(NodeSet.of(range(count)), rows if is_closest else ())

    combined = find_combined(rules, range(count), size, fit, is_closest=is_closest, budget=20_000)

    wanted = [sum(1 << node for node in chosen) for chosen in combinations(range(count), size)]
    assert combined == (min(set(wanted) & try_all(rules, count), key=fit), True)


def test_search_goes_on_without_a_node_when_what_is_left_has_enough_of_each_kind() -> None:
    """The cheapest node to leave out is kept: leaving it out takes from one kind of memory what two
    others would not.
    """
    rows = [
        [(1, 3), (5, 3), (5, 0), (3, 0), (5, 2)],
        [(2, 3), (5, 1), (5, 0), (2, 2), (5, 0)],
    ]
    rules = [
        memory_rule(
            [
                MemoryNode(
                    id=node,
                    group=NodeSet(node),
                    amounts={
                        kind: MemoryAmount(allocatable=size, free=size)
                        for kind, size in zip(KINDS, amounts, strict=True)
                    },
                )
                for node, amounts in enumerate(row)
            ],
            dict(zip(KINDS, wanted, strict=True)),
        )
        for row, wanted in zip(rows, [(3, 6), (1, 3)], strict=True)
    ]
    fit = fit_order(NodeSet.of(range(5)), ())

    combined = find_combined(rules, range(5), 2, fit, is_closest=False, budget=20_000)

    reachable = {mask for mask in try_all(rules, 5) if mask.bit_count() == 2}
    assert combined == (min(reachable, key=fit), True) == (0b00011, True)
