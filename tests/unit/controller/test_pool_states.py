"""Pools told apart: ready, incomplete, invalid and obsolete, and what each means for a claim."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.engine.allocation.pools import Pool, PoolState, Slice, gather_pools
from topobus.engine.allocation.values import ALL_GATES, Allocated, Fault, Mode, Node, NoFit
from unit.controller.allocation import NODE, claim, devices_of, given, gpus, request, slice_of, solve

COUNTED = {"counterSet": "set", "counters": {"slots": {"value": 1}}}
SITUATIONS: dict[PoolState, list[Slice]] = {
    PoolState.READY: [slice_of(gpus(1), name="a", count=2), slice_of(gpus(2)[1:], name="b", count=2)],
    PoolState.INCOMPLETE: [slice_of(gpus(1), name="a", count=2)],
    PoolState.INVALID: [slice_of(gpus(1), name="a", count=2), slice_of(gpus(1), name="b", count=2)],
    # The count says that another slice of the pool is somewhere, and it is newer.
    PoolState.OBSOLETE: [
        slice_of(gpus(1), name="a", count=2),
        slice_of(gpus(1), name="b", generation=2, count=2, nodeName="elsewhere"),
    ],
}
WHY = {
    PoolState.READY: "",
    PoolState.INCOMPLETE: "1 of 2 slices of generation 1 are published",
    PoolState.INVALID: "two devices are named dev-0",
    PoolState.OBSOLETE: "generation 1 is published here, 2 elsewhere",
}


def pools(slices: list[Slice]) -> tuple[Pool, ...]:
    """Gather the pools of the node."""
    return gather_pools(slices, Node(NODE), ALL_GATES)


@pytest.mark.parametrize("state", PoolState)
def test_pool_is_told_apart(state: PoolState) -> None:
    """Each state is found, with why."""
    (pool,) = pools(SITUATIONS[state])

    assert (pool.state, pool.why) == (state, WHY[state])
    assert bool(pool.candidates) is (state is PoolState.READY)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        pytest.param(
            {"consumesCounters": [{**COUNTED, "counterSet": "other"}]}, "uses counter other", id="unknown-set"
        ),
        pytest.param(
            {"consumesCounters": [{**COUNTED, "counters": {"x": {"value": 1}}}]},
            "uses counter set/x",
            id="unknown-counter",
        ),
    ],
)
def test_pool_is_invalid_when_a_device_uses_what_is_not_counted(device: dict[str, Any], why: str) -> None:
    """Counters are told by set and name, also when the device is another node's."""
    counters = slice_of([], name="0", count=3, sharedCounters=[{"name": "set", "counters": {"slots": {"value": 2}}}])
    own_resource_slice = slice_of(gpus(1), name="1", count=3)
    other_resource_slice = slice_of([{"name": "far", **device}], name="2", count=3, nodeName="elsewhere")

    (pool,) = pools([counters, own_resource_slice, other_resource_slice])

    assert pool.state is PoolState.INVALID
    assert why in pool.why


def test_pool_is_invalid_when_two_counter_sets_have_one_name() -> None:
    """Nobody could say which of them a device uses."""
    counters = [{"name": "set", "counters": {"slots": {"value": 2}}}]
    twins = [slice_of([], name=str(number), count=3, sharedCounters=counters) for number in range(2)]

    (pool,) = pools([*twins, slice_of(gpus(1), name="2", count=3)])

    assert (pool.state, pool.why) == (PoolState.INVALID, "two counter sets are named set")


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("state", PoolState)
def test_claim_for_some_devices_skips_a_pool_that_is_not_ready(state: PoolState, mode: Mode) -> None:
    """Another pool serves the claim.

    Without one the reasons name the pool's state, and an invalid pool ends this node only.
    """
    other = slice_of(gpus(1), pool="other", name="z")

    served = solve(given([*SITUATIONS[state], other], claim(request(count=1)), mode=mode))
    alone = solve(given(SITUATIONS[state], claim(request(count=9)), mode=mode))

    assert devices_of(served) == [["dev-0"]]
    if state is PoolState.INVALID:
        assert isinstance(alone, Fault)
        assert alone.is_local
    else:
        assert isinstance(alone, NoFit)
        codes = [reason.code for reason in alone.reasons]
        assert (f"pool-{state}" in codes) is (state is not PoolState.READY)
        assert all(WHY[state] in reason.message for reason in alone.reasons if reason.code.startswith("pool-"))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("state", PoolState)
def test_claim_for_all_devices_needs_whole_pools_and_minds_no_obsolete_one(state: PoolState, mode: Mode) -> None:
    """Of a pool that is not whole, "all" is unknown; an obsolete pool counts as absent."""
    other = slice_of(gpus(1), pool="other", name="z")

    outcome = solve(given([*SITUATIONS[state], other], claim(request(allocationMode="All")), mode=mode))

    if state in (PoolState.READY, PoolState.OBSOLETE):
        assert isinstance(outcome, Allocated)
        assert len(outcome.results[0].devices.results) == (3 if state is PoolState.READY else 1)
    else:
        assert isinstance(outcome, Fault)
        assert outcome.reason.code == f"pool-{state}"
