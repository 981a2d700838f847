"""Shapes beside other devices: each lies where all of its parts do."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, NoFit, Outcome
from topobus.engine.claims.lifecycle import owner_of, read_claim
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.scheduling.aligned_allocation import AlignedClaims, allocate_near, read_alignment_request
from topobus.engine.scheduling.closer_devices import bring_closer
from topobus.engine.scheduling.pod_alignment import aligned_pod_request
from topobus.formats.kubernetes import admit
from topobus.formats.messages.messages import ApiObject
from unit.controller.nearness import COMPILER, NODE, claim, entry, names, state

PAIR = "shape-gpu-nic"


def solve(there: StandaloneState, *wanted: ApiObject, pod: ApiObject | None = None) -> Outcome:
    """Allocate these claims together, as those of a pod if there is one."""
    specs = [(Claim(api_object), read_claim(api_object)) for api_object in wanted]
    wished = [AlignedClaims(asked, read_alignment_request(spec, "claim")) for asked, spec in specs]
    owners = {api_object.metadata["name"]: owner_of(api_object).key for api_object in wanted}
    request = aligned_pod_request(Pod(pod), owners) if pod is not None else None
    return allocate_near(there.input_for(NODE, specs), wished, there.view_of(NODE), COMPILER, pod=request)


# On the demo node gpu-N and nic-N lie under switch N // 2 and on NUMA node N // 4.
@pytest.mark.parametrize(
    ("wanted", "fields", "held", "expected"),
    [
        pytest.param(
            {"gpu-nic": 1, "gpu": 1},
            {"locality": "hard:switch"},
            ("gpu-0",),
            [f"{PAIR}-2", "gpu-3"],
            id="beside-a-device",
        ),
        pytest.param(
            {"gpu-nic": 2}, {"locality": "hard:switch"}, ("gpu-1",), [f"{PAIR}-2", f"{PAIR}-3"], id="beside-another"
        ),
        pytest.param(
            {"gpu-nic": 2, "fpga": 1},
            {"policy": "single-numa-node"},
            ("gpu-4", "gpu-6"),
            [f"{PAIR}-0", f"{PAIR}-1", "fpga-0"],
            id="policy",
        ),
        pytest.param({"half": 1}, {"policy": "single-numa-node"}, ("gpu-0",), ["shape-half-1"], id="half"),
        pytest.param({"machine": 1}, {"locality": "soft:numa"}, (), ["shape-machine"], id="soft-given-up"),
    ],
)
def test_shape_lies_in_a_place_when_all_of_its_parts_do(
    wanted: dict[str, int], fields: dict[str, str], held: tuple[str, ...], expected: list[str]
) -> None:
    """The places that claims wish for hold for shapes too."""
    assert names(solve(state(gpu=held), claim(wanted, entry(**fields)))) == [expected]


def test_shape_is_refused_when_no_place_has_all_of_its_parts() -> None:
    """The whole machine lies on both NUMA nodes."""
    outcome = solve(state(), claim({"machine": 1}, entry(locality="hard:numa")))

    assert isinstance(outcome, NoFit)
    assert "none of that class lies there" in summarize(outcome.reasons)


def test_places_of_the_parts_are_written_when_a_shape_was_aligned() -> None:
    """A service that prepares another device of the claim reads there where the parts are."""
    outcome = solve(state(gpu=("gpu-0",)), claim({"gpu-nic": 1, "gpu": 1}, entry(locality="hard:numa")))

    assert isinstance(outcome, Allocated)
    parameters: Any = outcome.results[0].devices.config[-1].opaque
    assert names(outcome) == [[f"{PAIR}-1", "gpu-2"]]
    assert parameters.parameters["pcieSwitches"] == ["0000:00:00.0", "0000:10:00.0"]


@pytest.mark.parametrize(
    ("locality", "expected"),
    [("hard:switch", [[f"{PAIR}-2"], ["gpu-3"]]), ("hard:numa", [[f"{PAIR}-1"], ["gpu-2"]])],
)
def test_claims_of_a_pod_lie_together_when_one_is_for_a_shape(locality: str, expected: list[list[str]]) -> None:
    """The parts count as the pod's devices when the node's engine judges all of it."""
    names_of_claims = ("pair", "gpu")
    used = {"claims": [{"name": name} for name in names_of_claims], "limits": {"cpu": "4"}}
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata={"name": "trainer", "annotations": {"topobus.dev/locality": locality}},
        spec={
            "containers": [{"name": "main", "resources": used}],
            "resourceClaims": [{"name": name, "resourceClaimName": name} for name in names_of_claims],
        },
    )
    pair, gpu = claim({"gpu-nic": 1}, name="pair"), claim({"gpu": 1}, name="gpu")

    outcome = solve(state(gpu=("gpu-0",)), pair, gpu, pod=admit(pod, uid="uid-trainer", now="2026-01-01T00:00:00Z"))

    assert names(outcome) == expected


@pytest.mark.parametrize(
    ("held", "wanted", "first_fit", "expected"),
    [
        pytest.param(
            ("gpu-1",), {"gpu-nic": 1, "gpu": 1}, [f"{PAIR}-0", "gpu-2"], [f"{PAIR}-2", "gpu-3"], id="with-a-device"
        ),
        pytest.param(
            ("gpu-0",), {"gpu-nic": 2}, [f"{PAIR}-1", f"{PAIR}-2"], [f"{PAIR}-2", f"{PAIR}-3"], id="with-another"
        ),
    ],
)
def test_shape_is_exchanged_for_a_closer_one_when_there_is_one(
    held: tuple[str, ...], wanted: dict[str, int], first_fit: list[str], expected: list[str]
) -> None:
    """As devices are: a place has room when the parts are free."""
    there = state(gpu=held)
    asked = claim(wanted)
    given = there.input_for(NODE, [(Claim(asked), read_claim(asked))])
    first, view = allocate(given, COMPILER), there.view_of(NODE)
    assert isinstance(first, Allocated)
    assert view is not None

    closer = bring_closer(given, first, view, COMPILER)

    assert (names(first), names(closer)) == ([first_fit], [expected])
