"""The merge on rules equals the merge on the lists behind them, by bitsets and by search, on
machines small enough to list.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.laws import examples
from support.merge_twin import merge_by_permutations
from topobus.engine.alignment.merge import beyond_bitset, dispatch, exact
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.engine.alignment.merge.fitness import fit_order
from topobus.engine.alignment.merge.hint_rule import HintRule, Unit, list_hints, sample_hints
from topobus.engine.alignment.merge.mask_algebra import MaskAlgebra, members, pack, unpack
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.request import Policy

# Sparse ids, one above 63.
IDS = (0, 1, 3, 8, 70)
MACHINE = NodeSet(*IDS)
DISTANCES = tuple(tuple(10 if node == other else 10 + abs(node - other) % 17 for other in IDS) for node in IDS)

node_bits = st.sampled_from([1 << node for node in IDS])
places = st.one_of(node_bits, st.tuples(node_bits, node_bits).map(lambda pair: pair[0] | pair[1]))


@st.composite
def units(draw: st.DrawFn, where: st.SearchStrategy[int] = places) -> Unit:
    """An amount somewhere."""
    total = draw(st.integers(0, 5))
    return Unit(draw(where), total, draw(st.integers(0, total)))


@st.composite
def rules(draw: st.DrawFn, where: st.SearchStrategy[int] = places) -> HintRule:
    """A resource of few units on few nodes."""
    return HintRule(
        units=tuple(draw(st.lists(units(where), min_size=1, max_size=6))),
        request=draw(st.integers(1, 8)),
        candidates=sum(draw(st.sets(node_bits, min_size=1))),
        musts=tuple(draw(st.lists(where, max_size=1))),
        sockets=draw(st.sampled_from([(), (), (), (0b11, 1 << 3 | 1 << 8, 1 << 70)])),
    )


simple_rules = rules(node_bits).filter(lambda rule: not rule.sockets)


def walk(rule: HintRule) -> tuple[Hint, ...]:
    """Kubelet's walk over all sets of candidates: which touch enough,
    which of these are preferred.
    """
    nodes = [node for node in IDS if rule.candidates >> node & 1]
    sets = [
        sum(1 << node for node in chosen)
        for size in range(1, len(nodes) + 1)
        for chosen in itertools.combinations(nodes, size)
    ]
    enough = [
        mask.bit_count() for mask in sets if sum(unit.total for unit in rule.units if unit.where & mask) >= rule.request
    ]
    narrowest = min(enough, default=len(nodes))
    most = -(-narrowest // max(len(nodes) // len(rule.sockets), 1)) if rule.sockets else -1
    return tuple(
        Hint(
            NodeSet.from_bits(mask),
            mask.bit_count() == narrowest or sum(1 for socket in rule.sockets if socket & mask) == most,
        )
        for mask in sets
        if sum(unit.free for unit in rule.units if unit.where & mask) >= rule.request
        and all(must & mask for must in rule.musts)
    )


@settings(max_examples=examples(300), deadline=None)
@given(rules())
def test_rule_knows_what_kubelet_walks_when_asked_for_any_of_it(rule: HintRule) -> None:
    """The list, membership, emptiness, width, single nodes, projections and the record all agree
    with a walk over all sets.
    """
    walked = walk(rule)
    masks = [hint.nodes.bits for hint in walked if hint.nodes is not None]

    assert list_hints(rule) == walked
    assert rule.is_empty == (not masks)
    assert rule.width == min((mask.bit_count() for mask in masks), default=None)
    assert rule.singles == sum(mask for mask in masks if mask.bit_count() == 1)
    assert all(rule.prefers(hint.nodes.bits) == hint.preferred for hint in walked if hint.nodes is not None)
    assert sample_hints(rule, 4) == (walked[:4], max(0, len(walked) - 4))
    for size in range(1, len(IDS) + 1):
        for order in itertools.combinations(IDS, size):
            algebra = MaskAlgebra(size)
            inside = {mask for mask in masks if not mask & ~sum(1 << node for node in order)}
            assert {unpack(mask, order) for mask in members(rule.inside(algebra, order))} == inside
            assert set(members(rule.clipped(algebra, order))) == {pack(mask, order) for mask in masks}


@pytest.mark.parametrize("sums_limit", [512, 0], ids=["sums", "dense"])
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.none(), rules()), max_size=3), st.sampled_from(list(Policy)), st.booleans())
def test_merge_of_rules_equals_kubelets_own_walk(
    monkeypatch: pytest.MonkeyPatch,
    sums_limit: int,
    opinions: list[HintRule | None],
    policy: Policy,
    prefer_closest: bool,
) -> None:
    """Merging rules gives what kubelet gets from the lists behind them, whichever way families are
    intersected.
    """
    lists = [None if rule is None else walk(rule) for rule in opinions]

    with monkeypatch.context() as patch:
        patch.setattr(exact, "_SUMS_LIMIT", sums_limit)
        merged = merge_hints(opinions, MACHINE, policy, distances=DISTANCES, prefer_closest=prefer_closest)

    assert (merged.hint, merged.is_admitted) == merge_by_permutations(
        lists, MACHINE, policy, DISTANCES, prefer_closest=prefer_closest
    )
    assert merged.is_exact
    assert policy in (Policy.NONE, Policy.SINGLE_NUMA_NODE) or merged.width == max(
        (min(len(hint.nodes or ()) for hint in hints) for hints in lists if hints), default=0
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(rules().filter(lambda rule: not rule.is_empty), min_size=1, max_size=4), st.booleans())
def test_answer_is_as_wide_as_the_widest_need_when_rules_only_grow(
    opinions: list[HintRule], prefer_closest: bool
) -> None:
    """An answer that is not preferred has the target width, or is the whole window where that is
    narrower.
    """
    merged = merge_hints(opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest)
    window = MACHINE.bits
    for rule in opinions:
        window &= rule.candidates

    assert merged.hint.nodes is not None
    assert merged.has_common == (merged.hint.preferred or bool(window))
    if not merged.hint.preferred and window:
        assert len(merged.hint.nodes) == min(max(rule.width or 0 for rule in opinions), window.bit_count())
        assert not merged.hint.nodes.bits & ~window


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(simple_rules, min_size=1, max_size=4), st.booleans())
def test_search_equals_bitsets_when_there_were_too_many_nodes(
    monkeypatch: pytest.MonkeyPatch,
    opinions: list[HintRule],
    prefer_closest: bool,
) -> None:
    """What very large machines use gives the same answers as what small ones use, and knows that it
    is exact.
    """
    by_bitset = merge_hints(opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "BITSET_LIMIT", 0)
        patch.setattr(dispatch, "_ALWAYS_BITSET", 0)
        by_search = merge_hints(
            opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest
        )

    assert by_search.is_exact
    assert by_search.hint == by_bitset.hint


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rules(), min_size=1, max_size=3), st.booleans(), st.sampled_from([20_000, 3]))
def test_search_gives_right_hints_when_its_budget_ends(
    monkeypatch: pytest.MonkeyPatch, opinions: list[HintRule], prefer_closest: bool, budget: int
) -> None:
    """On too many nodes an answer is one that all resources can serve, of the right width, and only
    a proved one is called exact.
    """
    opinions = [structs.replace(rule, sockets=()) for rule in opinions]
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "BITSET_LIMIT", 0)
        patch.setattr(beyond_bitset, "SEARCH_BUDGET", budget)
        large = merge_hints(opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest)
    wanted = merge_hints(opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest)

    assert large.width == wanted.width
    if large.is_exact:
        assert large.hint == wanted.hint
    if not large.hint.preferred:
        reachable = {MACHINE.bits}
        for rule in opinions:
            masks = {hint.nodes.bits for hint in walk(rule) if hint.nodes is not None} or {MACHINE.bits}
            reachable = {mask & other for mask in masks for other in reachable}
        assert large.hint.nodes is not None
        assert large.hint.nodes.bits in reachable or not reachable - {0}


@pytest.mark.parametrize("nodes", [17, 36, 64, 128])
def test_merge_answers_exactly_when_nodes_are_many_and_alike(nodes: int) -> None:
    """A machine of equal nodes gets the lowest ids, proved, however many nodes it has."""
    everywhere = (1 << nodes) - 1
    cpus = HintRule(units=tuple(Unit(1 << node, 8, 8) for node in range(nodes)), request=12, candidates=everywhere)
    gpus = HintRule(
        units=tuple(Unit(1 << node, 2, node % 2) for node in range(nodes)), request=3, candidates=everywhere
    )

    merged = merge_hints([cpus, gpus], NodeSet.from_bits(everywhere), Policy.BEST_EFFORT)

    assert merged.is_exact
    assert not merged.hint.preferred
    assert merged.hint.nodes == NodeSet(0, 1, 2)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 7), st.data())
def test_closest_mask_is_found_without_looking_at_all(
    monkeypatch: pytest.MonkeyPatch, nodes: int, data: st.DataObject
) -> None:
    """Branch and bound gives the mask of least distance, and of equal
    ones that of smallest value.
    """
    ids = tuple(range(0, 3 * nodes, 3))
    rows = [[data.draw(st.sampled_from([10, 12, 20, 31])) for _ in ids] for _ in ids]
    fit = fit_order(NodeSet(*ids), rows)
    algebra = MaskAlgebra(nodes)
    size = data.draw(st.integers(1, nodes))
    layer = algebra.layers[size] & data.draw(st.integers(0, algebra.everything))
    if not layer:
        return

    with monkeypatch.context() as patch:
        patch.setattr(exact, "_FEW", 0)
        closest = exact._closest(layer, size, ids, fit)

    assert closest == min((unpack(mask, ids) for mask in members(layer)), key=fit)


def test_merge_refuses_when_many_nodes_hide_that_reuse_lies_elsewhere() -> None:
    """A resource that must reuse what it has on node 0 prefers no set without node 0, also where
    too many sets exist to try each.
    """
    everywhere = (1 << 40) - 1
    reusing = HintRule(
        units=tuple(Unit(1 << node, 1, 1) for node in range(40)), request=5, candidates=everywhere, musts=(1,)
    )
    scarce = HintRule(
        units=tuple(Unit(1 << node, 1, int(node >= 35)) for node in range(40)), request=5, candidates=everywhere
    )

    merged = merge_hints([reusing, scarce], NodeSet.from_bits(everywhere), Policy.RESTRICTED)

    assert not merged.is_admitted
