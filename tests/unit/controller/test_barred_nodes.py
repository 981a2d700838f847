"""A node that has refused a device to a claim bars that node alone: all others are looked at as for
any claim of its shape.
"""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry

from topobus.bus.bus import Bus
from topobus.controller.commit.allocator import Allocator, Member, member
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.values import Allocated, DeviceId
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject
from topobus.process.clock import SystemClock
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.values.device import Device, Inventory

NODES = ("n1", "n2", "n3")


def _allocator() -> tuple[Allocator, StandaloneState]:
    state = StandaloneState()
    for node in NODES:
        devices = tuple(Device(name=f"gpu-{index}", device_class="gpu") for index in range(2))
        state.put_inventory(Inventory(node=node, device_class="gpu", generation=1, devices=devices))
    registry = CollectorRegistry()
    runtime = Runtime(
        name="controller",
        node="central",
        bus=cast(Bus, None),
        clock=SystemClock(),
        readiness=Readiness(),
        registry=registry,
    )
    return Allocator(ControllerSettings(), runtime, state, CelCompiler(), ControllerMetrics(registry)), state


def _wanting(state: StandaloneState, name: str) -> Member:
    request = {"name": "r", "exactly": {"deviceClassName": "gpu.topobus.dev", "count": 2}}
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, "namespace": "default", "uid": f"uid-{name}"},
        spec={"devices": {"requests": [request]}},
    )
    key = ObjectKey("resourceclaim", "default", name)
    state.put_object(key, Stored(1, api_object))
    return member(key, state.objects[key], state.classes)


async def _first(allocator: Allocator, state: StandaloneState, claim: Member) -> str:
    outcome = await allocator.first(state.nodes(), [claim])
    assert isinstance(outcome, tuple), outcome
    assert isinstance(outcome[1], Allocated)
    return outcome[0]


async def test_next_node_is_chosen_without_a_search_when_the_first_has_refused() -> None:
    """The claims' shape was found to fit its like before, so the only search is on the node that
    refused.
    """
    allocator, state = _allocator()
    refused, before = _wanting(state, "refused"), _wanting(state, "before")
    chosen_before = await _first(allocator, state, before)
    allocator.refusals.add(refused.key, [DeviceId("topobus.dev", "n1", "gpu-0")], "held")
    spent = allocator.spent
    on_first = (await allocator.search_members("n1", [refused])).steps
    searched = allocator.spent - spent

    chosen = await _first(allocator, state, refused)

    assert (chosen_before, chosen) == ("n1", "n2")
    assert allocator.spent - spent - searched == on_first


async def test_node_stays_open_to_others_when_it_has_refused_one() -> None:
    """That a node does not fit without the device that it refused says nothing of other claims."""
    allocator, state = _allocator()
    refused, other = _wanting(state, "refused"), _wanting(state, "other")
    allocator.refusals.add(refused.key, [DeviceId("topobus.dev", "n1", "gpu-0")], "held")
    chosen = await _first(allocator, state, refused)

    chosen_for_other = await _first(allocator, state, other)

    assert (chosen, chosen_for_other) == ("n2", "n1")


async def test_every_node_is_searched_when_anothers_device_was_refused() -> None:
    """Nobody knows from which nodes another vendor's pool may be reached."""
    allocator, state = _allocator()
    claim = _wanting(state, "claim")
    allocator.refusals.add(claim.key, [DeviceId("volume.example.com", "volumes", "vol-0")], "held")

    assert [allocator._are_barred([claim], node) for node in NODES] == [True] * 3
    assert await _first(allocator, state, claim) == "n1"
