"""Which strategy of the merge decides, and that its answer is the right one: searches on many
nodes, memory of several kinds, lists beside rules.
"""

from __future__ import annotations

from functools import cached_property

import pytest

from topobus.engine.alignment.memory.memory_allocation import allocate_memory
from topobus.engine.alignment.memory.memory_rule import MemoryAmount, MemoryNode, best_hint, memory_rule
from topobus.engine.alignment.merge import dispatch
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.engine.alignment.merge.fitness import fit_order
from topobus.engine.alignment.merge.hint_rule import HintRule, Unit, list_hints, sample_hints
from topobus.engine.alignment.merge.preferred_hints import preferred_hints
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import Reason
from topobus.values.request import Policy

TWELVE = NodeSet.of(range(12))
TWENTY = NodeSet.of(range(20))


def rule(nodes: NodeSet, request: int, free: list[int], total: int = 8) -> HintRule:
    """So much free on each node in turn."""
    units = tuple(Unit(1 << node, total, free[place % len(free)]) for place, node in enumerate(nodes))
    return HintRule(units=units, request=request, candidates=nodes.bits)


def memory_node(node: int, *, assignments: int = 0, **free: int) -> MemoryNode:
    """A node that serves alone, with so many bytes of each kind, all free."""
    amounts = {kind: MemoryAmount(allocatable=size, free=size) for kind, size in free.items()}
    return MemoryNode(id=node, assignments=assignments, group=NodeSet(node), amounts=amounts)


@pytest.mark.parametrize("budget", [1500, 1], ids=["search-proves", "bitset-takes-over"])
@pytest.mark.parametrize("prefer_closest", [False, True], ids=["narrowest", "closest"])
def test_merge_answers_alike_when_the_search_goes_first(
    monkeypatch: pytest.MonkeyPatch, budget: int, *, prefer_closest: bool
) -> None:
    """On ten to sixteen nodes a short search and the bitset give the same answer, whichever comes
    to it.
    """
    opinions = [rule(TWELVE, 12, [3, 0, 5, 1]), rule(TWELVE, 5, [1, 0, 2]), rule(TWELVE, 20, [8, 2])]
    distances = [[10 if row == column else 20 + abs(row - column) for column in range(12)] for row in range(12)]
    monkeypatch.setattr(dispatch, "_SEARCH_FIRST", budget)

    merged = merge_hints(opinions, TWELVE, Policy.BEST_EFFORT, distances=distances, prefer_closest=prefer_closest)
    monkeypatch.setattr(dispatch, "_ALWAYS_BITSET", 16)
    by_bitset = merge_hints(opinions, TWELVE, Policy.BEST_EFFORT, distances=distances, prefer_closest=prefer_closest)

    assert merged == by_bitset
    assert not merged.hint.preferred


def test_rule_works_out_once_what_is_asked_often() -> None:
    """What follows from a rule is kept with it, and of the class itself it is the recipe."""
    wanted = rule(TWELVE, 12, [3])

    assert wanted.free_by_node is wanted.free_by_node
    assert isinstance(HintRule.free_by_node, cached_property)


def test_merge_leaves_assigned_nodes_out_when_memory_joins_others() -> None:
    """Memory beside CPUs takes no node that serves another pod alone into a set of several."""
    memory = memory_rule(
        [memory_node(0, assignments=1, memory=8), memory_node(1, memory=4), memory_node(2, memory=4)], {"memory": 6}
    )
    cpus = rule(NodeSet(0, 1, 2), 17, [7, 6, 5])

    merged = merge_hints([cpus, memory], NodeSet(0, 1, 2), Policy.BEST_EFFORT)

    assert merged.hint == Hint(NodeSet(1, 2), preferred=False)


def test_memory_rule_knows_the_narrowest_set_when_kinds_lie_apart() -> None:
    """On more nodes than a bitset holds, two kinds on different nodes need as many nodes as both
    together.
    """
    nodes = [memory_node(node, memory=4 * (node % 2), huge=4 * (1 - node % 2)) for node in range(20)]

    wanted = memory_rule(nodes, {"memory": 8, "huge": 8})

    assert wanted.narrowest == wanted.width == 4
    assert best_hint(wanted) == Hint(NodeSet(0, 1, 2, 3), preferred=True)
    assert memory_rule(nodes, {"memory": 40, "huge": 40}).width == 20


def test_memory_is_allocated_around_the_affinity_when_nodes_are_many() -> None:
    """An affinity that is too narrow is extended.

    Without one the lowest of the narrowest sets is taken.
    """
    nodes = [memory_node(node, memory=4) for node in range(20)]

    extended = allocate_memory(nodes, {"memory": 10}, Hint(NodeSet(5), preferred=False))
    own = allocate_memory(nodes, {"memory": 10}, Hint(None, preferred=True))

    assert not isinstance(extended, Reason)
    assert not isinstance(own, Reason)
    assert (extended[0].nodes, own[0].nodes) == (NodeSet(0, 1, 5), NodeSet(0, 1, 2))
    assert best_hint(memory_rule(nodes, {"memory": 81})) is None


def test_hints_are_listed_and_recorded_when_nodes_are_many() -> None:
    """Beyond sixteen nodes the narrowest hints come first and the widest is there, too.

    Nothing is listed where nothing fits.
    """
    scarce = rule(TWENTY, 19, [1], total=1)
    widest = Hint(TWENTY, preferred=False)

    listed = list_hints(scarce)

    assert (len(listed), listed[-1]) == (21, widest)
    assert all(hint.preferred and len(hint.nodes or ()) == 19 for hint in listed[:-1])
    assert sample_hints(scarce, 3) == (listed[:3], (1 << 20) - 4)
    assert sample_hints(rule(TWENTY, 21, [1], total=1), 3) == ((), 0)
    assert list_hints(rule(TWENTY, 21, [1], total=1)) == ()


def test_width_is_found_by_trying_when_devices_lie_on_several_of_many_nodes() -> None:
    """A device on two nodes counts once, also where more nodes are there than a bitset holds."""
    units = tuple(Unit(0b11 << node, 1, 1) for node in range(0, 20, 2))

    wanted = HintRule(units=units, request=3, candidates=TWENTY.bits, musts=(0b11 << 18,))

    assert (wanted.narrowest, wanted.width) == (3, 3)


def test_preferred_hints_are_those_of_lists_and_rules_when_both_bind() -> None:
    """A mask must be preferred by each list and each rule.

    Without any the whole machine is all there is.
    """
    fit = fit_order(NodeSet(0, 1))
    listed = (Hint(NodeSet(0), preferred=True), Hint(NodeSet(1), preferred=True), Hint(NodeSet(0, 1), preferred=True))
    cpus = rule(NodeSet(0, 1), 4, [0, 4])
    by_socket = HintRule(units=cpus.units, request=4, candidates=0b11, sockets=(0b01, 0b10))

    both = preferred_hints([listed, cpus, None], NodeSet(0, 1), Policy.RESTRICTED, fit)
    by_rule = preferred_hints([by_socket], NodeSet(0, 1), Policy.SINGLE_NUMA_NODE, fit)
    nothing = preferred_hints([None], NodeSet(0, 1), Policy.RESTRICTED, fit)

    assert both == by_rule == ([Hint(NodeSet(1), preferred=True)], True)
    assert nothing == ([Hint(NodeSet(0, 1), preferred=True)], True)
