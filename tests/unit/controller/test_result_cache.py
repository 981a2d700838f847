"""What the controller keeps between claims: which nodes are looked at again, and when no search is
made at all.
"""

from __future__ import annotations

import pytest

from lab.allocator.cases import Cluster, claim, node_name
from lab.allocator.measures import Bench
from topobus.controller.state.result_cache import RequestShape
from topobus.engine.allocation.values import (
    Allocated,
    Mode,
    NoFit,
    Outcome,
)
from topobus.engine.claims.lifecycle import read_claim
from topobus.engine.claims.stored import ObjectKey
from topobus.formats.messages.messages import ApiObject
from topobus.values.machine import Machine


def _shape(bench: Bench, **wanted: object) -> RequestShape:
    raw = claim(1, **wanted)  # type: ignore[arg-type]  # the case's own options
    api_object = ApiObject(api_version=raw["apiVersion"], kind=raw["kind"], metadata=raw["metadata"], spec=raw["spec"])
    return bench.judgements.shape([read_claim(api_object)])


def _never() -> Outcome:
    raise AssertionError("a search was made")


@pytest.mark.parametrize("mode", Mode)
def test_node_is_left_out_until_something_becomes_free_there(mode: Mode) -> None:
    """In mode compatible anything that changes there opens it, for upstream's defects may make a
    claim fit when more is taken.
    """
    bench = Bench(Cluster(3), mode)
    shape = _shape(bench)
    assert list(bench.judgements.open_nodes(shape)) == [node_name(index) for index in range(3)]
    bench.judgements.close(shape, node_name(0))
    assert list(bench.judgements.open_nodes(shape)) == [node_name(1), node_name(2)]

    assert bench.place(claim(7, count=8, match=None))  # takes all of the first node
    opened = node_name(0) in bench.judgements.open_nodes(shape)
    bench.judgements.close(shape, node_name(0))
    bench.state.drop_object(ObjectKey("resourceclaim", "bench", "claim-000007"))

    assert opened is (mode is Mode.COMPATIBLE)
    assert node_name(0) in bench.judgements.open_nodes(shape)


def test_new_node_is_looked_at_and_closed_ones_stay_closed() -> None:
    """A node that joins does not send claims over all full nodes again."""
    bench = Bench(Cluster(3))
    shape = _shape(bench)
    for node in bench.judgements.open_nodes(shape):
        bench.judgements.close(shape, node)

    bench.state.put_machine(Machine(node="node-00099", numa_nodes=(), cpus=()))

    assert list(bench.judgements.open_nodes(shape)) == ["node-00099"]


def test_no_search_is_made_on_a_second_node_of_the_kind() -> None:
    """What one node answered holds for its like, with the other's names.

    Also for another claim with the same spec.
    """
    bench = Bench(Cluster(2))
    outcomes = bench.judge_all(claim(1))
    assert all(isinstance(outcome, Allocated) for outcome in outcomes)

    again = [bench.judgements.get_or_search(_shape(bench), node_name(index), _never) for index in range(2)]

    assert again == outcomes
    assert [
        [granted_device.pool for granted_device in each.results[0].devices.results]
        for each in again
        if isinstance(each, Allocated)
    ] == [[node_name(index)] * 2 for index in range(2)]


def test_no_search_is_made_for_a_plain_claim_whatever_is_taken() -> None:
    """After one allocation bits say which devices of any node with the same content fit, and when
    none do.
    """
    bench = Bench(Cluster(8, taken=0.5))
    shape = _shape(bench)
    bench.judgements.get_or_search(shape, node_name(0), lambda: bench.judge_all(claim(1), is_shared=False)[0])
    fresh = bench.judge_all(claim(1), is_shared=False)
    assert isinstance(fresh[0], Allocated), "the first node gives the sample"

    cached = [bench.judgements.get_or_search(shape, node_name(index), _never) for index in range(8)]

    assert [outcome.results if isinstance(outcome, Allocated) else NoFit for outcome in cached] == [
        outcome.results if isinstance(outcome, Allocated) else NoFit for outcome in fresh
    ]


def test_question_is_another_one_when_its_class_changes() -> None:
    """What was found under the old selectors is not told under the new ones."""
    bench = Bench(Cluster(1))
    before = _shape(bench)
    assert _shape(bench) is before

    key = ObjectKey("deviceclass", "_", "gpu")
    bench.state.drop_object(key)

    assert _shape(bench) is not before
