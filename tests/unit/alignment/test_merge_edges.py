"""The merge and what it merges at its edges: more nodes than a bitset holds, several kinds of
memory, distances and places that nobody tells.
"""

from __future__ import annotations

from functools import cached_property

import pytest

from topobus.engine.alignment.devices.proximity import LINK_CLASSES, Site, site_rank, socket_of_nodes
from topobus.engine.alignment.memory.memory_allocation import MemoryBlock, memory_nodes
from topobus.engine.alignment.memory.memory_rule import MemoryAmount, MemoryNode, best_hint, memory_rule
from topobus.engine.alignment.merge import dispatch, hint_rule
from topobus.engine.alignment.merge.beyond_bitset import find_combined
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.engine.alignment.merge.fitness import fit_order
from topobus.engine.alignment.merge.hint_rule import HintRule, Unit, list_hints, sample_hints
from topobus.engine.alignment.merge.preferred_hints import preferred_hints
from topobus.values.device import LinkClass
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import Policy
from topobus.values.view import CoreView


def _rule(amounts: list[int], request: int, **fields: tuple[int, ...]) -> HintRule:
    """One unit a node, all of it free."""
    units = tuple(Unit(1 << node, amount, amount) for node, amount in enumerate(amounts))
    return HintRule(units=units, request=request, candidates=(1 << len(amounts)) - 1, **fields)


def _memory(rows: list[dict[str, int]]) -> list[MemoryNode]:
    return [
        MemoryNode(
            id=node,
            group=NodeSet(node),
            amounts={kind: MemoryAmount(allocatable=size, free=size) for kind, size in row.items()},
        )
        for node, row in enumerate(rows)
    ]


PAGES = {"memory": 10, "hugepages-2Mi": 10}


@pytest.mark.parametrize(
    ("rows", "wanted", "narrowest"),
    [
        ([{"memory": 10, "hugepages-2Mi": 10}] * 20, PAGES, 1),
        ([{"memory": 6, "hugepages-2Mi": 6}] * 20, PAGES, 2),
        ([{"memory": 10}] * 10 + [{"hugepages-2Mi": 10}] * 10, PAGES, 2),
        ([{"memory": 1, "hugepages-2Mi": 1}] * 20, {"memory": 20, "hugepages-2Mi": 20}, 20),
        ([{"memory": 2}] * 10 + [{"hugepages-2Mi": 2}] * 10, {"memory": 18, "hugepages-2Mi": 20}, 19),
        ([{"memory": 2}] * 10 + [{"hugepages-2Mi": 2}] * 10, {"memory": 20, "hugepages-2Mi": 20}, 20),
    ],
    ids=["one", "two-of-both", "one-of-each", "all", "all-but-one", "all-of-each"],
)
def test_memory_of_two_kinds_is_as_narrow_as_it_can_be_when_nodes_are_many(
    rows: list[dict[str, int]], wanted: dict[str, int], narrowest: int
) -> None:
    """Where no bitset reaches, the width is found by trying: what each kind needs alone is only a
    bound.
    """
    rule = memory_rule(_memory(rows), wanted)

    hint = best_hint(rule)

    assert rule.narrowest == narrowest
    # A short look finds one that serves, not always the narrowest one.
    assert hint is not None
    assert hint.nodes is not None
    assert rule.combines(hint.nodes.bits)
    assert hint.preferred == (len(hint.nodes) == narrowest)


def test_best_memory_hint_holds_the_nodes_that_it_must_when_nodes_are_many() -> None:
    """A hint around nodes has them all, and no more than the amount needs besides."""
    rule = memory_rule(_memory([{"memory": 4}] * 20), {"memory": 10})

    around, nowhere = best_hint(rule, 1 << 17), best_hint(memory_rule(_memory([{"memory": 4}] * 20), {"memory": 81}))

    assert around == Hint(NodeSet(0, 1, 17), preferred=True)
    assert nowhere is None


def test_memory_of_other_machines_blocks_takes_nothing() -> None:
    """A block on a node that the machine has no more holds nothing of the others."""
    (node,) = memory_nodes({0: {"memory": 8}}, [MemoryBlock(nodes=NodeSet(9), kind="memory", shares=((9, 4),))])

    assert (node.assignments, node.amounts["memory"].free) == (0, 8)


def test_hints_are_cut_when_nodes_are_too_many_to_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest ones stand first, the widest is there, and the list stays a list."""
    monkeypatch.setattr(hint_rule, "_LISTED", 20)
    rule = _rule([1] * 18, 2)

    hints = list_hints(rule)

    assert len(hints) == 21
    assert hints[0] == Hint(NodeSet(0, 1), preferred=True)
    assert hints[-1] == Hint(NodeSet.of(range(18)), preferred=False)


def test_record_shows_the_first_hints_and_counts_the_rest_when_nodes_are_many() -> None:
    """A record has a handful of hints and how many more there may be.

    Of a rule that cannot be met it has none.
    """
    few, many, none = _rule([1] * 7, 7), _rule([1] * 8, 2), _rule([1] * 8, 9)

    assert sample_hints(few, 4) == ((Hint(NodeSet.of(range(7)), preferred=True),), 126)
    assert sample_hints(many, 2) == ((Hint(NodeSet(0, 1), preferred=True), Hint(NodeSet(0, 2), preferred=True)), 253)
    assert sample_hints(none, 4) == ((), 0)


def test_rules_attribute_is_itself_when_it_is_looked_up_on_the_class() -> None:
    """What is worked out late belongs to a rule; the class has the recipe."""
    assert isinstance(vars(HintRule)["nodes"], cached_property)
    assert isinstance(HintRule.nodes, cached_property)


def test_fitness_counts_no_distance_when_the_machine_does_not_tell_it() -> None:
    """A node without a row adds nothing; the ids decide."""
    fit = fit_order(NodeSet(0, 1, 2), ((10, 20), (20, 10)))

    assert fit(0b011) == (2, 60, 0b011)
    assert fit(0b110) == (2, 10, 0b110)


@pytest.mark.parametrize("first", [0, 1500], ids=["bitsets", "search"])
def test_merge_is_the_same_when_the_search_gives_up_first(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """With ten to sixteen nodes a short search goes before the bitsets.

    Whichever answers, the answer is one.
    """
    monkeypatch.setattr(dispatch, "_SEARCH_FIRST", first)
    machine = NodeSet.of(range(12))
    amounts = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

    merged = merge_hints([_rule(amounts, 11), _rule(amounts[::-1], 23)], machine, Policy.BEST_EFFORT)

    assert merged.is_exact
    assert merged.hint == Hint(NodeSet(0, 1, 2), preferred=False)


def test_merge_is_the_same_when_a_list_stands_beside_rules_on_many_nodes() -> None:
    """The short search is for rules alone; with a list the bitsets answer."""
    machine = NodeSet.of(range(12))
    listed = [Hint(NodeSet.of(range(11)), preferred=True), Hint(NodeSet(5, 6, 7), preferred=False)]

    merged = merge_hints([_rule([1] * 12, 3), listed], machine, Policy.BEST_EFFORT)

    assert merged.hint == Hint(NodeSet(0, 1, 2), preferred=False)


def test_preferred_hints_are_those_that_lists_and_rules_prefer() -> None:
    """Each list narrows what is preferred; one without an opinion does not."""
    machine = NodeSet(0, 1, 2)
    listed = (Hint(NodeSet(0), preferred=True), Hint(NodeSet(2), preferred=True), Hint(NodeSet(1), preferred=False))
    indifferent = (Hint(None, preferred=True),)

    hints, is_all = preferred_hints(
        [_rule([1, 1, 1], 1), listed, indifferent, None], machine, Policy.RESTRICTED, fit_order(machine, ())
    )

    assert hints == [Hint(NodeSet(0), preferred=True), Hint(NodeSet(2), preferred=True)]
    assert is_all


def test_preferred_hints_are_wider_when_sockets_are_aligned() -> None:
    """With align-by-socket all sets on one socket are preferred, not the narrowest alone."""
    machine = NodeSet(0, 1, 2, 3)
    rule = _rule([2, 2, 2, 2], 2, sockets=(0b0011, 0b1100))

    hints, _ = preferred_hints([rule], machine, Policy.RESTRICTED, fit_order(machine, ()))

    assert Hint(NodeSet(0, 1), preferred=True) in hints
    assert Hint(NodeSet(0, 2), preferred=True) not in hints


@pytest.mark.parametrize(
    ("first", "second", "link_class"),
    [
        (Site("s", "r", 1, 1), Site("s", "q", 2, 2), LinkClass.SWITCH),
        (Site("", "r", 1, 1, "p"), Site("", "q", 2, 2, "p"), LinkClass.SWITCH),
        (Site("s", "r", 1, 1), Site("t", "r", 2, 2), LinkClass.ROOT),
        (Site("", "", 1, 1), Site("", "", 3, 2), LinkClass.NUMA),
        (Site("", "", 1, 1), Site("", "", 2, 1), LinkClass.SOCKET),
        (Site("", "", 0, 0), Site("", "", 0, 0), LinkClass.SYSTEM),
    ],
)
def test_sites_are_as_close_as_the_narrowest_place_that_they_share(
    first: Site, second: Site, link_class: LinkClass
) -> None:
    """What is not known is shared with nobody."""
    assert LINK_CLASSES[site_rank(first, second)] is link_class
    assert LINK_CLASSES[site_rank(second, first)] is link_class


def test_node_has_no_socket_when_its_cpus_do_not_tell_one() -> None:
    """A core without a node or without a socket says nothing about either."""
    cores = [
        CoreView(cpus=CpuSet(0), numa_node=0, socket=1),
        CoreView(cpus=CpuSet(1), numa_node=1),
        CoreView(cpus=CpuSet(2), socket=0),
    ]

    assert socket_of_nodes(cores) == {0: 0b10}


def test_search_gives_a_right_mask_and_no_proof_when_its_budget_ends() -> None:
    """The only mask of that width comes last, each resource doing without another node.

    The budget ends before, and all nodes stand in.
    """
    rules = [_rule([1, 1, 0, 0, 3, 3], 7)] * 2
    fit = fit_order(NodeSet.of(range(6)), ())

    proved = find_combined(rules, range(6), 2, fit, is_closest=True, budget=10_000)
    cut = find_combined(rules, range(6), 2, fit, is_closest=True, budget=15)

    assert proved == (0b110000, True)
    assert cut == (0b111111, False)
