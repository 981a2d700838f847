"""Claims that wish for no place: of equal devices they get those that lie closest together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, DeviceId
from topobus.engine.claims.lifecycle import read_claim, with_allocation
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.closer_devices import bring_closer, our_devices, spanned_nodes
from topobus.formats.kubernetes import admit
from topobus.formats.messages.messages import ApiObject
from topobus.values.idset import NodeSet
from unit.controller.nearness import COMPILER, NODE, claim, names, state

GPUS = tuple(f"gpu-{number}" for number in range(8))


def _both(there: StandaloneState, *wanted: ApiObject) -> tuple[Allocated, Allocated]:
    """Allocate by first fit, and bring the devices closer."""
    specs = [(Claim(api_object), read_claim(api_object)) for api_object in wanted]
    given = there.input_for(NODE, specs)
    first = allocate(given, COMPILER)
    assert isinstance(first, Allocated)
    return first, _closer(there, given, first)


def _closer(there: StandaloneState, given: AllocationInput, first: Allocated) -> Allocated:
    view = there.view_of(NODE)
    assert view is not None
    return bring_closer(given, first, view, COMPILER)


@pytest.mark.parametrize(
    ("held", "wanted", "first_fit", "expected"),
    [
        pytest.param(("gpu-0",), {"gpu": 2}, ["gpu-1", "gpu-2"], ["gpu-2", "gpu-3"], id="one-switch"),
        pytest.param(
            ("gpu-0", "gpu-2", "gpu-5"),
            {"gpu": 2},
            ["gpu-1", "gpu-3"],
            ["gpu-6", "gpu-7"],
            id="one-switch-on-the-other-socket",
        ),
        pytest.param(
            ("gpu-0",),
            {"gpu": 4},
            ["gpu-1", "gpu-2", "gpu-3", "gpu-4"],
            ["gpu-4", "gpu-5", "gpu-6", "gpu-7"],
            id="one-numa-node",
        ),
        pytest.param(
            ("gpu-0",),
            {"gpu": 3},
            ["gpu-1", "gpu-2", "gpu-3"],
            ["gpu-1", "gpu-2", "gpu-3"],
            id="already-as-close-as-can-be",
        ),
        pytest.param(
            ("gpu-0",), {"gpu": 5}, ["gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5"], None, id="no-place-has-room"
        ),
        pytest.param(("gpu-0",), {"gpu": 1}, ["gpu-1"], None, id="one-device"),
        pytest.param((), {"cpu": 2}, ["cpu-0", "cpu-112"], None, id="cpus-alone-are-kubelets-choice"),
    ],
)
def test_devices_are_exchanged_for_closer_ones_when_there_are_equal_ones(
    held: tuple[str, ...], wanted: dict[str, int], first_fit: list[str], expected: list[str] | None
) -> None:
    """Under one switch, else on one NUMA node.

    What first fit found stays where nothing closer is free.
    """
    first, closer = _both(state(gpu=held), claim(wanted))

    assert names(first) == [first_fit]
    assert names(closer) == [expected or first_fit]


def test_claims_of_one_pod_get_devices_of_one_switch_when_first_fit_parts_them() -> None:
    """A GPU by one claim and a NIC by another are one group."""
    first, closer = _both(
        state(gpu=("gpu-0", "gpu-1"), nic=()), claim({"gpu": 1}, name="a"), claim({"nic": 1}, name="b")
    )

    assert names(first) == [["gpu-2"], ["nic-0"]]
    assert names(closer) == [["gpu-2"], ["nic-2"]]


def test_fullest_place_is_taken_when_several_have_room() -> None:
    """Three switches have a GPU and a NIC free, one of them a single GPU: it is taken, and whole
    switches stay for larger claims.
    """
    first, closer = _both(state(gpu=("gpu-0", "gpu-6"), nic=("nic-0", "nic-1")), claim({"gpu": 1, "nic": 1}))

    assert names(first) == [["gpu-1", "nic-2"]]
    assert names(closer) == [["gpu-7", "nic-6"]]


def test_better_alternative_stays_when_a_worse_one_would_lie_closer() -> None:
    """Two large GPUs on two sockets are what the claim asks for first: two NICs under one switch
    are no equal answer.
    """
    alternatives = [
        {"name": "gpus", "deviceClassName": "gpu.topobus.dev", "count": 2},
        {"name": "nics", "deviceClassName": "nic.topobus.dev", "count": 2},
    ]
    spec = {"devices": {"requests": [{"name": "r", "firstAvailable": alternatives}]}}
    wanted = admit(
        ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "c"}, spec=spec),
        uid="u",
        now="2026-01-01T00:00:00Z",
    )
    there = state(gpu=("gpu-0", "gpu-1", "gpu-2", "gpu-4", "gpu-5", "gpu-6"))

    first, closer = _both(there, wanted)

    assert names(first) == names(closer) == [["gpu-3", "gpu-7"]]


@settings(deadline=None)
@for_all(held=st.sets(st.sampled_from(GPUS), max_size=6), count=st.integers(min_value=1, max_value=8))
def test_closer_devices_are_as_many_free_ones_and_never_span_more_nodes(held: set[str], count: int) -> None:
    """Whatever is held: no device twice, none that is held, as many as before, and not on more NUMA
    nodes.
    """
    there = state(gpu=tuple(sorted(held))) if held else state()
    specs: list[tuple[Claim, Any]] = [(Claim(wanted), read_claim(wanted)) for wanted in [claim({"gpu": count})]]
    given = there.input_for(NODE, specs)
    first = allocate(given, COMPILER)
    if not isinstance(first, Allocated):
        assert len(held) + count > len(GPUS)
        return
    closer = _closer(there, given, first)

    (before,), (after,) = names(first), names(closer)
    assert len(set(after)) == len(after) == len(before)
    assert not set(after) & held
    assert len(_sockets(after)) <= len(_sockets(before))


@settings(deadline=None)
@for_all(
    held=st.sets(st.sampled_from([*GPUS, *(name.replace("gpu", "nic") for name in GPUS)]), max_size=12),
    wanted=st.sampled_from([{"gpu": 2}, {"gpu": 1, "nic": 1}, {"gpu": 2, "nic": 2}, {"gpu": 3}, {"gpu": 1, "cpu": 1}]),
)
def test_nothing_closer_is_there_when_devices_are_said_to_lie_closest(held: set[str], wanted: dict[str, int]) -> None:
    """The short look, by which most claims are done, never misses what the long one would find."""
    there = state(
        gpu=tuple(sorted(name for name in held if name.startswith("gpu"))),
        nic=tuple(sorted(name for name in held if name.startswith("nic"))),
    )
    specs: list[tuple[Claim, Any]] = [(Claim(each), read_claim(each)) for each in [claim(wanted)]]
    given = there.input_for(NODE, specs)
    first = allocate(given, COMPILER)
    if not isinstance(first, Allocated) or not there.lie_together(NODE, our_devices(first.results, NODE)):
        return

    assert names(_closer(there, given, first)) == names(first)


@pytest.mark.parametrize(
    ("wanted", "is_closest"),
    [({"gpu": 2}, True), ({"gpu": 3}, False), ({"gpu": 1, "cpu": 1}, False), ({"gpu": 1}, True)],
    ids=["one-switch", "two-switches", "with-a-cpu", "one-device"],
)
def test_devices_are_said_to_lie_closest_when_one_switch_has_them(wanted: dict[str, int], *, is_closest: bool) -> None:
    """CPUs lie under no switch: with them it takes the long look."""
    first, _ = _both(state(), claim(wanted))

    assert state().lie_together(NODE, our_devices(first.results, NODE)) is is_closest


def test_devices_are_not_said_to_lie_closest_when_nobody_knows_them() -> None:
    """Without a machine, without devices of our own, and where a device
    is not published any more.
    """
    there, unknown = state(), DeviceId("topobus.dev", NODE, "gpu-99")

    assert not there.lie_together("elsewhere", [unknown])
    assert not there.lie_together(NODE, [])
    assert not there.lie_together(NODE, [unknown])


def _sockets(devices: list[str]) -> set[bool]:
    return {int(name.removeprefix("gpu-")) >= 4 for name in devices}


def test_condition_says_which_nodes_a_claim_spans_and_what_would_change_it() -> None:
    """A claim on two NUMA nodes is told so; on one node nothing is said of it."""
    there = state(gpu=("gpu-0", "gpu-1", "gpu-2", "gpu-4", "gpu-5", "gpu-6"))
    wanted = claim({"gpu": 2})
    _, closer = _both(there, wanted)
    _, whole = _both(state(), wanted)
    spanned = spanned_nodes(closer.results[0], there.numa_nodes_of)
    conditions = with_allocation(wanted, closer.results[0], now="2026-01-01T00:00:00Z", spanned=spanned).status[
        "conditions"
    ]

    assert spanned == NodeSet(0, 1)
    assert conditions[0]["message"] == (
        "2 devices allocated; they span NUMA nodes 0 and 1: with locality hard:numa the claim waits until "
        "one node has them all"
    )
    assert spanned_nodes(whole.results[0], there.numa_nodes_of) == NodeSet()


def test_devices_of_unknown_place_span_nothing() -> None:
    """What nobody can tell is not said."""
    _, closer = _both(state(gpu=("gpu-0", "gpu-1", "gpu-2", "gpu-4", "gpu-5", "gpu-6")), claim({"gpu": 2}))

    def unknown(_: DeviceId) -> NodeSet | None:
        return None

    assert spanned_nodes(closer.results[0], unknown) == NodeSet()
