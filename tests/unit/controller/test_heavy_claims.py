"""Claims that are dear to judge: refused like an API server does, searched where nobody waits, and
given up so that others have their turn.
"""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from topobus.controller.commit import node_search
from topobus.controller.commit.allocator import Allocator, Member, member
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.admission import has_heavy_selector
from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.values import Allocated, Fault, GaveUp
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.lifecycle import read_claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.clock import ManualClock
from topobus.values.device import Device, Inventory

TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
HEAVY = f"{TEN}.all(a, {TEN}.all(b, {TEN}.all(c, a > 0)))"
TOO_DEAR = f"{TEN}.all(z, {TEN}.all(y, {TEN}.all(x, {HEAVY})))"


def _allocator(state: StandaloneState, clock: ManualClock) -> Allocator:
    no_bus: Any = None
    registry, settings = CollectorRegistry(), ControllerSettings()
    runtime = Runtime(
        name="controller", node="central", bus=no_bus, clock=clock, readiness=Readiness(), registry=registry
    )
    return Allocator(settings, runtime, state, CelCompiler(), ControllerMetrics(registry))


def _state(*nodes: str) -> StandaloneState:
    state = StandaloneState()
    for node in nodes:
        devices = tuple(Device(name=f"gpu-{index}", device_class="gpu") for index in range(4))
        state.put_inventory(Inventory(node=node, device_class="gpu", generation=1, devices=devices))
    return state


def _member(expression: str) -> Member:
    request = {
        "name": "r",
        "exactly": {"deviceClassName": "gpu.topobus.dev", "selectors": [{"cel": {"expression": expression}}]},
    }
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "u"},
        spec={"devices": {"requests": [request]}},
    )
    return member(ObjectKey("resourceclaim", "default", "c"), Stored(1, api_object))


async def test_finder_refuses_a_selector_that_may_cost_too_much_on_every_way() -> None:
    """A claim that an API server would refuse is refused, however
    quickly a node could be judged.
    """
    state = _state("n1", "n2")
    allocator, members = _allocator(state, ManualClock()), [_member(f"true || {TOO_DEAR}")]

    looked, outcomes = await allocator.search_on("n1", members), await allocator.first(state.nodes(), members)

    assert isinstance(looked, Fault)
    assert "is too complex" in looked.reason.message
    assert isinstance(outcomes, list)
    assert isinstance(outcomes[0], Fault)


async def test_finder_allocates_by_a_heavy_selector() -> None:
    """A selector that takes long but not too long is evaluated all the same."""
    state = _state("n1")
    members = [_member(HEAVY)]

    choice = await _allocator(state, ManualClock()).first(state.nodes(), members)

    assert has_heavy_selector(read_claim(members[0].stored.value), CelCompiler())
    assert isinstance(choice, tuple)
    assert isinstance(choice[1], Allocated)


class _HastyClock(ManualClock):
    """A clock on which every look takes four seconds."""

    def monotonic(self) -> float:
        """Give the time, and let some pass."""
        self.advance(4.0)
        return super().monotonic()


async def test_finder_gives_up_the_nodes_left_when_a_claim_takes_too_long() -> None:
    """After ten seconds the other claims have their turn: what was not looked at is told as given
    up, never as "does not fit".
    """
    nodes = tuple(f"n{index}" for index in range(8))
    state = _state(*nodes)

    outcomes = await _allocator(state, _HastyClock()).first(nodes, [_member("false")])

    assert isinstance(outcomes, list)
    assert isinstance(outcomes[-1], GaveUp)
    assert explain_nodes(nodes, outcomes)[0] == "SearchGaveUp"


async def test_search_is_given_up_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node alone may not hold the others up, either."""
    monkeypatch.setattr(node_search, "LONGEST_S", 0.0)
    state = _state("n1")

    outcome = await _allocator(state, _HastyClock()).search_members("n1", [_member(HEAVY)])

    assert isinstance(outcome, GaveUp)


async def test_node_is_counted_once_when_its_search_fails_in_a_way_that_nobody_thought_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both homes search by the same `NodeSearch`: a node at fault is told, and counted among what
    is set aside as long as it fails by the same.
    """
    state, registry, no_bus = _state("n1", "n2"), CollectorRegistry(), None
    runtime = Runtime(
        name="controller", node="central", bus=no_bus, clock=ManualClock(), readiness=Readiness(), registry=registry
    )  # type: ignore[arg-type]  # never asked
    allocator = Allocator(ControllerSettings(), runtime, state, CelCompiler(), ControllerMetrics(registry))
    monkeypatch.setattr(state, "input_for", lambda *_, **__: {}["devices"])

    outcomes = [await allocator.search_on("n1", [_member("true")]) for _ in range(2)]

    assert [outcome.reason.code for outcome in outcomes if isinstance(outcome, Fault) and outcome.is_local] == [
        "node-failed"
    ] * 2
    assert registry.get_sample_value("topobus_controller_objects_set_aside_total", {"loop": "nodes"}) == 1
