"""Laws of the merge and of `place`, on random inputs.

The merge against a brute-force twin of kubelet's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.alignment_nodes import container, dgx, holding, pod
from support.laws import examples
from support.merge_twin import better_by_kubelet, merge_by_permutations
from topobus.engine.alignment.merge.dispatch import Merged, merge_hints
from topobus.engine.alignment.merge.fitness import fit_order, width_class
from topobus.engine.alignment.planning.placement import place
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import PodRequest, Policy, Scope
from topobus.values.view import NodeView

HintLists = list[list[Hint] | None]

# Sparse ids on purpose, one of them above 63, and one (9) that the machine lacks.
MACHINE = NodeSet(0, 2, 3, 70)
DISTANCES = ((10, 21, 31, 12), (21, 10, 21, 31), (31, 21, 10, 21), (12, 31, 21, 10))

masks = st.one_of(st.none(), st.frozensets(st.sampled_from([0, 2, 3, 70, 9]), max_size=4).map(NodeSet.of))
hints = st.builds(Hint, masks, st.booleans())
hint_lists = st.lists(st.one_of(st.none(), st.lists(hints, max_size=5)), max_size=4)
policies = st.sampled_from(list(Policy))


def merge(lists: Sequence[Sequence[Hint] | None], policy: Policy, *, prefer_closest: bool = False) -> Merged:
    """The merge on the sparse machine."""
    return merge_hints(lists, MACHINE, policy, distances=DISTANCES, prefer_closest=prefer_closest)


@settings(max_examples=examples(600), deadline=None)
@given(hint_lists, policies, st.booleans())
def test_merge_equals_kubelets_own_walk(lists: HintLists, policy: Policy, prefer_closest: bool) -> None:
    """The merge without permutations gives what walking all of them gives."""
    merged = merge(lists, policy, prefer_closest=prefer_closest)

    assert (merged.hint, merged.is_admitted) == merge_by_permutations(
        lists, MACHINE, policy, DISTANCES, prefer_closest=prefer_closest
    )


@pytest.mark.parametrize("distances", [(), DISTANCES], ids=["narrowest", "closest"])
def test_kubelets_comparison_keeps_the_smaller_key_when_any_two_candidates_meet(
    distances: Sequence[Sequence[int]],
) -> None:
    """For every pair of candidates and every target width kubelet keeps the one of smaller key
    (docs/knowledge/topology-merge.md#theorem-1).
    """
    fit = fit_order(MACHINE, distances)
    sets = [NodeSet.of(chosen) for size in range(1, 5) for chosen in itertools.combinations(MACHINE.ids, size)]
    candidates = [Hint(nodes, preferred) for nodes in sets for preferred in (True, False)]

    def key(hint: Hint, width: int) -> tuple[object, ...]:
        assert hint.nodes is not None
        fitness = fit(hint.nodes.bits)
        return (0, fitness) if hint.preferred else (1, width_class(len(hint.nodes), width), fitness)

    for width in range(6):
        for current, candidate in itertools.product(candidates, repeat=2):
            kept = better_by_kubelet(current, candidate, width, MACHINE, distances)
            assert kept == min(current, candidate, key=lambda hint: key(hint, width))


@settings(max_examples=examples(200), deadline=None)
@given(hint_lists, policies, st.randoms(use_true_random=False))
def test_merge_ignores_the_order_of_resources_and_of_hints(lists: HintLists, policy: Policy, drawn: object) -> None:
    """Neither the order of resources nor that of their hints changes the answer."""
    import random

    assert isinstance(drawn, random.Random)
    shuffled = [
        hint_list if hint_list is None else drawn.sample(hint_list, k=len(hint_list))
        for hint_list in drawn.sample(lists, k=len(lists))
    ]

    assert merge(shuffled, policy).hint == merge(lists, policy).hint


@settings(max_examples=examples(200), deadline=None)
@given(hint_lists)
def test_merge_admits_no_less_when_the_policy_is_wider(lists: HintLists) -> None:
    """What single-numa-node admits, restricted admits.

    What restricted admits, best-effort admits.
    """
    order = (Policy.SINGLE_NUMA_NODE, Policy.RESTRICTED, Policy.BEST_EFFORT, Policy.NONE)
    admitted = [merge(lists, policy).is_admitted for policy in order]

    assert admitted == sorted(admitted)


@settings(max_examples=examples(200), deadline=None)
@given(hint_lists)
def test_merge_never_loses_a_preferred_answer(lists: HintLists) -> None:
    """If one mask is preferred by every resource, the answer is preferred."""
    common = [
        mask
        for mask in (
            NodeSet.from_bits(bits)
            for bits in {hint.nodes.bits for hints_ in lists for hint in hints_ or () if hint.nodes}
        )
        if not mask.isdisjoint(MACHINE)
        and all(hints_ is not None and Hint(mask, preferred=True) in hints_ for hints_ in lists)
    ]

    assert not common or merge(lists, Policy.RESTRICTED).hint.preferred


@st.composite
def requests(draw: st.DrawFn, name: str = "asked") -> PodRequest:
    """A pod of one to three containers."""
    amounts = {"gpu": st.integers(0, 5), "nic": st.integers(0, 4), "fpga": st.integers(0, 2)}
    containers = tuple(
        container(
            f"c{place}",
            cpus=draw(st.integers(0, 60)),
            **{device_class: count for device_class, amount in amounts.items() if (count := draw(amount))},
        )
        for place in range(draw(st.integers(1, 3)))
    )
    return pod(name, *containers, policy=draw(policies), scope=draw(st.sampled_from(list(Scope))))


@st.composite
def busy_nodes(draw: st.DrawFn) -> NodeView:
    """The demo machine with some of it held by two pods."""
    view = dgx()
    gpus = draw(st.permutations([f"gpu-{index}" for index in range(8)]))
    cut, end = draw(st.integers(0, 3)), draw(st.integers(3, 6))
    first = draw(st.integers(0, 80))
    view = holding(view, "one", cpus=f"{first}-{first + 15}", gpu=tuple(gpus[:cut]))
    return holding(view, "two", gpu=tuple(gpus[cut:end]), fpga=draw(st.sampled_from([(), ("fpga-0",)])))


@settings(max_examples=examples(120), deadline=None)
@given(busy_nodes(), requests())
def test_place_gives_all_that_is_asked_or_reasons(view: NodeView, request: PodRequest) -> None:
    """A placement has every count, nothing held, nothing twice among app containers.

    A refusal has a reason; both come out again the same.
    """
    outcome = place(view, request)

    assert place(view, request) == outcome
    if isinstance(outcome, Refusal):
        assert outcome.reasons
        return
    taken: list[str] = []
    for want, got in zip(request.containers, outcome.containers, strict=True):
        assert len(got.cpus) == want.cpus
        assert {device.device_class: device.count for device in want.devices} == {
            name: len(names) for name, names in got.devices.items()
        }
        taken += [f"{name}/{device}" for name, names in got.devices.items() for device in names]
        taken += [f"cpu/{cpu}" for cpu in got.cpus]
        for cpus in view.held_cpus.values():
            assert cpus.isdisjoint(got.cpus)
        for name, names in got.devices.items():
            assert not set(names) & view.held_devices.get(name, {}).keys()
    assert len(taken) == len(set(taken))


@settings(max_examples=examples(60), deadline=None)
@given(busy_nodes(), requests())
def test_place_is_right_about_what_to_free(view: NodeView, request: PodRequest) -> None:
    """Freeing exactly the owners that a refusal names makes the pod fit."""
    from topobus.engine.alignment.planning.node_view import without_owners

    outcome = place(view, request)
    if isinstance(outcome, Placement) or not outcome.to_free:
        return
    freed = frozenset(str(reason.facts["owner"]) for reason in outcome.to_free)

    assert isinstance(place(without_owners(view, freed), request), Placement)
