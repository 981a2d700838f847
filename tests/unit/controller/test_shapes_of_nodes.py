"""Shapes in the stand-alone controller: what its slices have, and who excludes whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from support.shape_names import plain
from support.shape_nodes import (
    NODE,
    RecordingState,
    claim_for,
    holding,
    recorded,
    sick,
    state_of,
    store,
    structured,
    timeless,
)
from topobus.bus.streams.state import Entry
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.controller.commit.node_ledgers import Held, NodeLedgers
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.bitset_allocator import make_bitset_plan
from topobus.engine.allocation.capacity import rivals
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.allocation.suggestions import would_fit
from topobus.engine.allocation.tolerations import TaintRule
from topobus.engine.allocation.values import Allocated, DeviceId, Mode, NoFit, Outcome
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.eviction import next_eviction
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.decisions import NodeFit
from topobus.engine.shapes.shape_parts import without_shapes
from topobus.formats.kubernetes.built_in_classes import class_selector, shape_selector
from topobus.formats.kubernetes.resource import AllocationResult, SliceSpec, Taint, TaintSelector
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import PlaceReply, PlaceRequest
from topobus.simulation.machines import PROFILES
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Reason, Refusal
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment
from unit.controller.allocation import COMPILER, solve

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POD = Owner(kind=OwnerKind.POD, namespace="default", name="p", uid="uid-p")
HALF = ("shape-half-0", "shape-half-1")


def outcome_of(state: StandaloneState, *claims: Claim) -> Outcome:
    """Search the node for claims, as the controller does."""
    return solve(state.input_for(NODE, [(claim, claim.spec) for claim in claims], mode=Mode.CORRECTED))


def results_of(state: StandaloneState, *claims: Claim) -> tuple[AllocationResult, ...]:
    """Find devices for claims that fit."""
    outcome = outcome_of(state, *claims)
    assert isinstance(outcome, Allocated), outcome
    return outcome.results


def names(results: Sequence[AllocationResult]) -> list[str]:
    """Name what was granted, shapes without their digests."""
    return [plain(granted.device) for result in results for granted in result.devices.results]


def parts(state: StandaloneState, *shapes: str) -> tuple[str, ...]:
    """Name the parts of shapes, which are named without their digests."""
    parts_by_shape = {plain(shape.device): of_shape for shape, of_shape in state.stock.table_of(NODE).parts.items()}
    return tuple(part.device for shape in shapes for part in parts_by_shape[shape])


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_controller_has_the_slices_that_the_command_prints(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes and their counters among them, in whatever order the inventories arrive."""
    assert run(["slices", "--machine", profile, "--shapes", "--node", NODE, "--output", "json"]) == ExitCode.OK
    printed = [read_as(item["spec"], SliceSpec, where="slice") for item in json.loads(capsys.readouterr().out)["items"]]
    machine, inventories = recorded(profile)

    for order in (inventories, inventories[::-1]):
        state = RecordingState()
        state.put_machine(machine)
        for inventory in order:
            state.put_inventory(inventory)

        derived = [each.spec for origin in sorted(state.seen) for each in state.seen[origin]]
        assert [timeless(spec) for spec in derived] == [timeless(spec) for spec in printed]


def test_shapes_end_with_the_devices_when_the_inventories_are_dropped() -> None:
    """A node of which nothing is left has no shapes, and the same devices bring them back."""
    state = state_of("dgx")
    for inventory in recorded("dgx")[1]:
        state.drop_inventory(NODE, inventory.device_class)
    gone = dict(state.taints.parts)

    for inventory in recorded("dgx")[1]:
        state.put_inventory(inventory)

    assert gone == {}
    assert names(results_of(state, claim_for("half"))) == ["shape-half-0"]


def test_shapes_that_the_operator_adds_come_and_go_with_the_nodes_alignment() -> None:
    """Whether that is heard before the inventories or after them."""
    trio = OwnShape(name="trio", parts={"gpu": 2, "nic": 1}, within="numa")
    alignment = NodeAlignment(node=NODE, own_shapes=(trio,))
    early, late = StandaloneState(), state_of("dgx")
    early.put_alignment(NODE, alignment)
    for inventory in recorded("dgx")[1]:
        early.put_inventory(inventory)
    late.put_alignment(NODE, alignment)

    granted = [sorted(plain(shape.device) for shape in state.stock.table_of(NODE).parts) for state in (early, late)]
    late.put_alignment(NODE, None)

    assert granted[0] == granted[1]
    assert [name for name in granted[1] if name.startswith("shape-trio")] == [
        f"shape-trio-0000-{bus}-00-0" for bus in ("18", "4b", "9a", "ca")
    ]
    assert not any("trio" in shape.device for shape in late.stock.table_of(NODE).parts)


def test_shape_excludes_its_parts_and_they_exclude_it() -> None:
    """A half takes its GPUs and pairs with it, and one GPU of the other half takes that."""
    state = state_of("dgx")
    store(state, claim_for("half", "first"), *results_of(state, claim_for("half", "first")))

    (gpu,) = names(results_of(state, claim_for("gpu")))
    store(state, claim_for("gpu", "gpu"), *results_of(state, claim_for("gpu", "gpu")))

    assert gpu in parts(state, HALF[1])
    assert isinstance(outcome_of(state, claim_for("half")), NoFit)
    assert isinstance(outcome_of(state, claim_for("gpu", count=4)), NoFit)
    assert set(names(results_of(state, claim_for("gpu", count=3)))) < set(parts(state, HALF[1]))
    assert len(names(results_of(state, claim_for("gpu-nic", count=3)))) == 3


def test_shape_and_its_parts_count_once_when_claim_and_ledger_have_them() -> None:
    """What a claim has as a shape and the ledger as parts is the same. It is free when both have
    let go of it, and nothing else is blocked meanwhile.
    """
    state = state_of("dgx")
    half, other = claim_for("half", "half"), claim_for("half", "other")
    (result,) = results_of(state, half)
    allocated = store(state, half, result)
    state.put_ledger(holding(half.owner, *parts(state, HALF[0])))

    both = names(results_of(state, other))
    store(state, half, AllocationResult(), revision=2)
    only_ledger = names(results_of(state, other))
    store(state, half, result, revision=3)
    state.drop_ledger(NODE)
    only_claim = names(results_of(state, other))
    store(state, half, AllocationResult(), revision=4)

    assert allocated.status["allocation"]
    assert (both, only_ledger, only_claim) == ([HALF[1]],) * 3
    assert names(results_of(state, other)) == [HALF[0]]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(HALF[1:], [HALF[1]], id="the-parts-of-one"),
        pytest.param((), [HALF[0]], id="nothing"),
        pytest.param(("shape-socket-0",), None, id="other-devices"),
    ],
)
def test_claim_finds_its_shape_again_when_the_ledger_has_the_parts(
    held: Sequence[str], expected: list[str] | None
) -> None:
    """A crash between ledger and status: it gets what it holds or nothing."""
    state = state_of("dgx")
    half = claim_for("half")
    in_ledger = parts(state, *held) if held != ("shape-socket-0",) else parts(state, HALF[0])[:3]
    if in_ledger:
        state.put_ledger(holding(half.owner, *in_ledger))

    outcome = outcome_of(state, half)

    assert (names(outcome.results) if isinstance(outcome, Allocated) else None) == expected


def test_refusal_names_who_holds_a_part_when_no_shape_fits() -> None:
    """A pod that kubelet gave a GPU by the device plugin, and a claim that has another half."""
    state = state_of("dgx")
    store(state, claim_for("half", "first"), *results_of(state, claim_for("half", "first")))
    gpu = parts(state, HALF[1])[0]
    state.put_ledger(holding(POD, gpu))

    outcome = outcome_of(state, claim_for("half"))

    assert isinstance(outcome, NoFit)
    text = plain(summarize(outcome.reasons))
    assert f"1 device ({HALF[1]}): {gpu} is held by pod default/p" in text
    first = ", ".join(parts(state, HALF[0])[:4])
    assert f"1 device ({HALF[0]}): {first} and 4 more are held by claim default/first" in text


def test_advice_names_the_holders_of_the_parts_when_they_prevent_a_shape() -> None:
    """It counts the parts that each would release."""
    state = state_of("dgx")
    state.put_ledger(holding(POD, *parts(state, "shape-machine")))
    half = claim_for("half")

    (advice, *_) = would_fit(state.input_for(NODE, [(half, half.spec)], mode=Mode.CORRECTED), solve)

    assert "when pod default/p (8 devices) releases them" in advice.message


def test_sick_part_makes_its_shape_unallocatable_and_evicts_its_claim() -> None:
    """As if the claim had the device itself."""
    state = state_of("dgx")
    (result,) = results_of(state, claim_for("half"))
    nic = next(name for name in parts(state, HALF[0]) if name.startswith("nic-"))
    before = next_eviction(result, state.taints.evicting, lambda *_: NOW)

    state.put_inventory(sick(next(each for each in recorded("dgx")[1] if each.device_class == "nic"), nic))

    eviction = next_eviction(result, state.taints.evicting, lambda *_: NOW)
    assert before is None
    assert eviction is not None
    assert plain(eviction.device.device) == HALF[0]
    assert names(results_of(state, claim_for("half"))) == [HALF[1]]


def test_taint_rule_for_a_part_taints_its_shape() -> None:
    """An operator who drains one GPU drains what has it, and no other half."""
    state = state_of("dgx")
    (result,) = results_of(state, claim_for("half"))
    gpu = parts(state, HALF[0])[0]
    taint = Taint(key="drain", effect="NoExecute")
    rule = TaintRule("r", TaintSelector(driver="topobus.dev", device=gpu), taint)

    state._put_rule("r", rule)

    eviction = next_eviction(result, state.taints.evicting, lambda *_: NOW)
    assert eviction is not None
    assert (eviction.rule, plain(eviction.device.device)) == ("r", HALF[0])
    assert names(results_of(state, claim_for("half"))) == [HALF[1]]
    marked = {candidate.id.device for candidate in state.stock.table_of(NODE).candidates if candidate.device.taints}
    having = {
        shape.device for shape, of_shape in state.taints.parts.items() if gpu in {part.device for part in of_shape}
    }
    assert marked == having | {gpu}


class _Node:
    """A bus behind which one node answers: it places what is asked, or refuses with its ledger."""

    def __init__(self, *held: str, outcome: Placement | Refusal) -> None:
        self.asked: list[PlaceRequest] = []
        self._outcome = outcome
        self._ledger = holding(claim_for("half").owner, *held, sequence=4)

    async def ask(self, _: Any, request: PlaceRequest, **__: Any) -> PlaceReply:
        """Answer."""
        self.asked.append(request)
        return PlaceReply(decision_id="d2", node=NODE, result=self._outcome, ledger_sequence=4)

    async def get(self, *_: Any, **__: Any) -> Entry[Ledger]:
        """Show the ledger."""
        return Entry(parts={"node": NODE}, revision=1, value=self._ledger)


async def newest() -> bool:
    """Say that the attempt is the claim's newest."""
    return True


async def test_ledger_gets_the_parts_when_a_claim_gets_a_shape() -> None:
    """By class and name, as if the claim had asked for them."""
    state = state_of("dgx")
    half = claim_for("half")
    (result,) = results_of(state, half)
    bus: Any = _Node(outcome=Placement(containers=()))

    held = await NodeLedgers(bus, state, 1.0).hold(half, Attempt(number=1, node=NODE, allocation=result), newest)

    assert isinstance(held, Held)
    (request,) = bus.asked
    assert {device.device_class: device.names for device in request.pod.containers[0].devices} == {
        device_class: tuple(name for name in parts(state, HALF[0]) if name.startswith(f"{device_class}-"))
        for device_class in ("gpu", "nic")
    }


async def test_attempt_for_a_shape_is_held_when_the_ledger_has_its_parts() -> None:
    """The node has forgotten the operation, and its ledger has what it did."""
    state = state_of("dgx")
    half = claim_for("half")
    (result,) = results_of(state, half)
    refusal = Refusal(reasons=(Reason(code="already-placed", message="it is held"),))
    bus: Any = _Node(*parts(state, HALF[0]), outcome=refusal)

    held = await NodeLedgers(bus, state, 1.0).hold(half, Attempt(number=1, node=NODE, allocation=result), newest)

    assert held == Held()


async def test_attempt_is_refused_when_the_machine_no_longer_has_the_shape() -> None:
    """The node is not asked: what the parts were is not known any more."""
    state = state_of("dgx")
    pair = claim_for("gpu-nic")
    (result,) = results_of(state, pair)
    state.drop_inventory(NODE, "gpu")
    bus: Any = _Node(outcome=Placement(containers=()))

    refused = await NodeLedgers(bus, state, 1.0).hold(pair, Attempt(number=1, node=NODE, allocation=result), newest)

    assert isinstance(refused, Refusal)
    assert refused.reasons[0].code == "shape-unknown"
    assert names([result])[0] == "shape-gpu-nic-0000-18-00-0"
    assert result.devices.results[0].device in refused.reasons[0].message
    assert bus.asked == []


def test_fit_names_the_parts_when_a_claim_gets_a_shape() -> None:
    """They are what the pod's own request has to go round."""
    state = state_of("dgx")
    parts_by_shape = state.stock.table_of(NODE).parts

    fit = NodeFit(NODE, results_of(state, claim_for("gpu-nic"), claim_for("fpga", "b")))

    assert {name: len(devices) for name, devices in fit.devices(parts_by_shape).items()} == {
        "fpga": 1,
        "gpu": 1,
        "nic": 1,
    }


def test_shape_stays_one_when_its_parts_are_unknown() -> None:
    """An allocation of a machine that has changed since is left as it is."""
    state = state_of("dgx")
    (result,) = results_of(state, claim_for("half"))

    assert without_shapes(result, {}) == result


def test_levels_are_offered_by_alternatives_when_a_claim_takes_what_there_is() -> None:
    """A half, else four pairs, else four GPUs: with a GPU of each half gone, it is four pairs only if
    there are four.
    """
    state = state_of("dgx")
    alternatives = [
        {"name": "half", "deviceClassName": "half.topobus.dev", "count": 1},
        {"name": "pairs", "deviceClassName": "gpu-nic.topobus.dev", "count": 4},
        {"name": "gpus", "deviceClassName": "gpu.topobus.dev", "count": 4},
    ]
    claim = structured("c", {"devices": {"requests": [{"name": "r", "firstAvailable": alternatives}]}})
    gpus = [name for half in HALF for name in parts(state, half) if name.startswith("gpu-")]
    nics = [name for half in HALF for name in parts(state, half) if name.startswith("nic-")]

    answers = []
    for held in ((), (gpus[0], gpus[4]), (*nics[:3], *nics[4:6])):
        state.put_ledger(holding(POD, *held))
        answers.append({granted.request for granted in results_of(state, claim)[0].devices.results})

    assert answers == [{"r/half"}, {"r/pairs"}, {"r/gpus"}]


@pytest.mark.parametrize(
    "held",
    [
        pytest.param((), id="nothing"),
        pytest.param(("gpu-0000-18-00-0",), id="a-device"),
        pytest.param(("nic-0000-19-00-0", "gpu-0000-9b-00-0"), id="one-of-each-half"),
        pytest.param(("shape-half-1",), id="a-shape"),
    ],
)
@pytest.mark.parametrize(
    ("level", "count"), [("gpu", 1), ("gpu", 4), ("gpu-nic", 1), ("gpu-nic", 3), ("half", 1), ("half", 2), ("fpga", 1)]
)
def test_bits_choose_what_the_search_chooses_when_devices_take_counters(
    level: str, count: int, held: tuple[str, ...]
) -> None:
    """A claim for devices of one level needs no search, though each takes counters that others take."""
    state = state_of("dgx")
    table, claim = state.stock.table_of(NODE), claim_for(level, count=count)
    in_ledger = (parts(state, name) if name in HALF else (name,) for name in held)
    state.put_ledger(holding(POD, *(name for names_of_parts in in_ledger for name in names_of_parts)))
    outcome = outcome_of(state, claim)

    plan = make_bitset_plan(table, [claim.spec], state.classes, COMPILER, Mode.CORRECTED)

    assert plan is not None
    places = plan.solve(state.stock.state_of(NODE).taken)
    chosen = [plain(table.candidates[place].id.device) for place in places[0]] if places is not None else None
    assert chosen == (names(outcome.results) if isinstance(outcome, Allocated) else None)


def test_bits_leave_claims_to_the_search_when_they_may_take_one_counter_twice() -> None:
    """A pair and a GPU may be one GPU. In mode `compatible` counters depend on what a search tried."""
    state = state_of("dgx")
    table = state.stock.table_of(NODE)
    both = [claim_for("gpu-nic").spec, claim_for("gpu").spec]

    assert make_bitset_plan(table, both, state.classes, COMPILER, Mode.CORRECTED) is None
    assert make_bitset_plan(table, both[1:], state.classes, COMPILER, Mode.COMPATIBLE) is None


def test_devices_of_shapes_are_no_rivals_to_classic_claims() -> None:
    """Classic claims count nothing, and the ledger keeps a shape from a device that they hold."""
    (pool,) = (pool for pool in state_of("dgx").stock.table_of(NODE).pools if pool.id.pool == NODE)

    assert rivals(pool) == frozenset()


def test_cluster_home_allocates_from_the_slices_with_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    """The node's inventories have no shapes, and its slices count all the same."""
    assert run(["slices", "--machine", "dgx", "--shapes", "--node", NODE, "--output", "json"]) == ExitCode.OK
    state = ApiServerState()
    for inventory in recorded("dgx")[1]:
        state.put_inventory(inventory)
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "u"}
    for item in json.loads(capsys.readouterr().out)["items"]:
        item["metadata"]["ownerReferences"] = [owner]
        state.put("ResourceSlice", "v1", item)
    for level in ("half", "gpu"):
        selector = shape_selector(level) if level == "half" else class_selector(level)
        device_class = {
            "metadata": {"name": f"{level}.topobus.dev"},
            "spec": {"selectors": [{"cel": {"expression": selector}}]},
        }
        state.put("DeviceClass", "v1", device_class)
    half, gpu = claim_for("half", "half"), claim_for("gpu", "gpu")

    outcome = solve(state.input_for(NODE, [(claim, claim.spec) for claim in (half, gpu)], mode=Mode.CORRECTED))

    assert state.foreign == {}
    assert isinstance(outcome, Allocated)
    shape, device = (granted.device for result in outcome.results for granted in result.devices.results)
    assert plain(shape) == HALF[0]
    assert device not in {part.device for part in state.taints.parts[DeviceId("topobus.dev", NODE, shape)]}
