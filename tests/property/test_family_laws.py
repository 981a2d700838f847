"""The merge on rules equals the merge on the lists behind them, by bitsets and by search, on machines small enough to list."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topobus.domain.alignment.merge import dispatch, exact
from topobus.domain.alignment.merge.dispatch import merge_opinions
from topobus.domain.alignment.merge.hint_lists import fit_order, merge_hints
from topobus.domain.alignment.merge.hint_rule import HintRule, Unit, feasible_masks, list_hints, sample_hints, unpack
from topobus.domain.alignment.merge.mask_algebra import MaskAlgebra, members
from topobus.domain.idset import NodeSet
from topobus.domain.request import Policy

# Sparse ids, one above 63.
IDS = (0, 1, 3, 8, 70)
MACHINE = NodeSet(*IDS)
DISTANCES = tuple(tuple(10 if identifier == other else 10 + abs(identifier - other) % 17 for other in IDS) for identifier in IDS)

node_bits = st.sampled_from([1 << identifier for identifier in IDS])
places = st.one_of(node_bits, st.tuples(node_bits, node_bits).map(lambda pair: pair[0] | pair[1]))


@st.composite
def units(draw: st.DrawFn, where: st.SearchStrategy[int] = places) -> Unit:
    """An amount somewhere."""
    total = draw(st.integers(0, 5))
    return Unit(draw(where), total, draw(st.integers(0, total)))


@st.composite
def families(draw: st.DrawFn, where: st.SearchStrategy[int] = places) -> HintRule:
    """A resource of few units on few nodes."""
    return HintRule(
        units=tuple(draw(st.lists(units(where), min_size=1, max_size=6))),
        request=draw(st.integers(1, 8)),
        candidates=sum(draw(st.sets(node_bits, min_size=1))),
        musts=tuple(draw(st.lists(where, max_size=1))),
        sockets=draw(st.sampled_from([(), (), (), (0b11, 1 << 3 | 1 << 8, 1 << 70)])),
    )


simple_families = families(node_bits).filter(lambda hint_rule: not hint_rule.sockets)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(st.none(), families()), max_size=4), st.sampled_from(list(Policy)), st.booleans())
def test_merge_of_rules_equals_the_merge_of_lists(opinions: list[HintRule | None], policy: Policy, prefer_closest: bool) -> None:
    """Hint, admission, target width and "nothing in common" are the same with and without lists."""
    lists = [None if opinion is None else list_hints(opinion) for opinion in opinions]

    by_rule = merge_opinions(opinions, MACHINE, policy, distances=DISTANCES, prefer_closest=prefer_closest)
    by_list = merge_hints(lists, MACHINE, policy, distances=DISTANCES, prefer_closest=prefer_closest)

    assert (by_rule.hint, by_rule.is_admitted, by_rule.width, by_rule.has_common) == (
        by_list.hint,
        by_list.is_admitted,
        by_list.width,
        by_list.has_common,
    )
    assert by_rule.is_exact


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(simple_families, min_size=1, max_size=4), st.booleans())
def test_search_equals_bitsets_when_there_were_too_many_nodes(
    monkeypatch: pytest.MonkeyPatch,
    opinions: list[HintRule],
    prefer_closest: bool,
) -> None:
    """What very large machines use gives the same answers as what small ones use, and knows that it is exact."""
    by_bitset = merge_opinions(opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "BITSET_LIMIT", 0)
        patch.setattr(dispatch, "_ALWAYS_BITSET", 0)
        by_search = merge_opinions(opinions, MACHINE, Policy.BEST_EFFORT, distances=DISTANCES, prefer_closest=prefer_closest)

    assert by_search.is_exact
    assert by_search.hint == by_bitset.hint


@settings(max_examples=200, deadline=None)
@given(families())
def test_families_know_their_own_lists(family: HintRule) -> None:
    """Membership, emptiness, narrowest feasible width and the record all agree with the list."""
    masks = list(feasible_masks(family))
    hints, omitted = sample_hints(family, 4)

    assert family.is_empty == (not masks)
    assert family.width() == (min(mask.bit_count() for mask in masks) if masks else None)
    assert all(family.has(mask) for mask in masks)
    assert hints == list_hints(family)[:4]
    assert omitted == max(0, len(masks) - 4)


@pytest.mark.parametrize("nodes", [17, 36, 64, 128])
def test_merge_answers_exactly_when_nodes_are_many_and_alike(nodes: int) -> None:
    """A machine of equal nodes gets the lowest ids, proved, however many nodes it has."""
    everywhere = (1 << nodes) - 1
    cpus = HintRule(units=tuple(Unit(1 << index, 8, 8) for index in range(nodes)), request=12, candidates=everywhere)
    gpus = HintRule(units=tuple(Unit(1 << index, 2, index % 2) for index in range(nodes)), request=3, candidates=everywhere)

    merged = merge_opinions([cpus, gpus], NodeSet.from_bits(everywhere), Policy.BEST_EFFORT)

    assert merged.is_exact
    assert not merged.hint.preferred
    assert merged.hint.nodes == NodeSet(0, 1, 2)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 7), st.data())
def test_closest_mask_is_found_without_looking_at_all(monkeypatch: pytest.MonkeyPatch, nodes: int, data: st.DataObject) -> None:
    """Branch and bound gives the mask of least distance, and of equal ones that of smallest value."""
    ids = tuple(range(0, 3 * nodes, 3))
    rows = [[data.draw(st.sampled_from([10, 12, 20, 31])) for _ in ids] for _ in ids]
    fit = fit_order(NodeSet(*ids), rows)
    universe = MaskAlgebra(nodes)
    size = data.draw(st.integers(1, nodes))
    layer = universe.layers[size] & data.draw(st.integers(0, universe.everything))
    if not layer:
        return

    with monkeypatch.context() as patch:
        patch.setattr(exact, "_FEW", 0)
        found = exact.closest(layer, size, ids, fit)

    assert found == min((unpack(mask, ids) for mask in members(layer)), key=fit)
