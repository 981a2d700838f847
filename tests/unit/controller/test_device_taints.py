"""Taints: what rules add to devices, what a silent service means, and when an allocated claim has
to go.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.state.taint_index import TaintIndex, read_rule
from topobus.engine.allocation.tolerations import RuleTaint
from topobus.engine.allocation.values import (
    Allocated,
    DeviceId,
    NoFit,
    Outcome,
)
from topobus.engine.claims.eviction import next_eviction, rule_condition
from topobus.engine.claims.lifecycle import read_claim
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult, Taint
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Device, Inventory
from topobus.values.errors import ContractError
from topobus.values.health import DeviceHealth, HealthState
from unit.controller.allocation import device, gpus, slice_of, solve

START = datetime(2026, 1, 1, tzinfo=UTC)


def rule(
    name: str = "broken", effect: str = "NoExecute", *, selector: dict[str, Any] | None = None, **taint: Any
) -> ApiObject:
    """Make a stored rule; an empty selector means everything."""
    spec = {"taint": {"key": "example.com/broken", "effect": effect, **taint}}
    if selector is not None:
        spec["deviceSelector"] = selector
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceTaintRule",
        metadata={"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"},
        spec=spec,
    )


def claim(*tolerations: dict[str, Any]) -> ApiObject:
    """Ask for one GPU."""
    exactly = {"deviceClassName": "gpu.topobus.dev", "tolerations": list(tolerations)}
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "uid-c"},
        spec={"devices": {"requests": [{"name": "r", "exactly": exactly}]}},
    )


def world(*, health: HealthState = HealthState.HEALTHY) -> StandaloneState:
    """Make a world of one node with two GPUs, of which the first is as said."""
    made = StandaloneState()
    sick = DeviceHealth(state=health, since="2026-01-01T00:00:00Z")
    devices = (Device(name="gpu-0", device_class="gpu", health=sick), Device(name="gpu-1", device_class="gpu"))
    made.put_inventory(Inventory(node="n1", device_class="gpu", generation=1, devices=devices))
    return made


def put_rule(made: StandaloneState, api_object: ApiObject) -> None:
    """Store a rule."""
    made.put_object(ObjectKey("devicetaintrule", "cluster", api_object.metadata["name"]), Stored(1, api_object))


def outcome(made: StandaloneState, *tolerations: dict[str, Any]) -> Outcome:
    """Allocate one GPU."""
    api_object = claim(*tolerations)
    return solve(made.input_for("n1", [(Claim(api_object), read_claim(api_object))]))


def device_of(answer: Outcome) -> str:
    """Name the device allocated."""
    assert isinstance(answer, Allocated), answer
    return answer.results[0].devices.results[0].device


GPU_0 = DeviceId("topobus.dev", "n1", "gpu-0")
TOLERATE = {"key": "example.com/broken", "operator": "Exists"}


@pytest.mark.parametrize(
    ("selector", "first"),
    [
        pytest.param(None, "gpu-0", id="no-selector-means-nothing"),
        pytest.param({}, None, id="empty-selector-means-everything"),
        pytest.param({"device": "gpu-0"}, "gpu-1", id="device"),
        pytest.param({"driver": "topobus.dev", "pool": "n1", "device": "gpu-0"}, "gpu-1", id="all-three"),
        pytest.param({"pool": "n2"}, "gpu-0", id="another-pool"),
        pytest.param({"driver": "nic.topobus.dev"}, "gpu-0", id="another-driver"),
    ],
)
@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_rule_keeps_claims_off_the_devices_that_it_means(
    selector: dict[str, Any] | None, first: str | None, effect: str
) -> None:
    """A rule's taint works as if the driver had published it, on the devices that its selector
    means.
    """
    made = world()
    put_rule(made, rule(effect=effect, selector=selector))

    answer = outcome(made)

    if first is None:
        assert isinstance(answer, NoFit)
        assert any(
            reason.code == "device-tainted" and "example.com/broken" in reason.message for reason in answer.reasons
        )
    else:
        assert device_of(answer) == first
    assert device_of(outcome(made, TOLERATE)) == "gpu-0"


@pytest.mark.parametrize("effect", ["None"])
def test_rule_changes_nothing_when_its_effect_is_none(effect: str) -> None:
    """A dry run taints and keeps nobody off."""
    made = world()
    put_rule(made, rule(effect=effect, selector={}))

    assert device_of(outcome(made)) == "gpu-0"
    assert made.taints.evicting(GPU_0) == ()


def test_world_frees_the_devices_when_a_rule_is_gone() -> None:
    """A rule that is deleted, or that nobody can read any more, taints nothing.

    What waits may fit then.
    """
    made = world()
    put_rule(made, rule(selector={}))
    before = made.supply

    made.drop_object(ObjectKey("devicetaintrule", "cluster", "broken"))

    assert device_of(outcome(made)) == "gpu-0"
    assert made.supply > before
    put_rule(made, rule(selector={}))
    with pytest.raises(ContractError, match="taint"):
        put_rule(made, rule(selector={}, effect="Whatever"))
    assert device_of(outcome(made)) == "gpu-0"


def test_world_changes_nothing_when_only_a_rules_status_does() -> None:
    """What the controller writes into a rule does not make waiting claims be looked at again."""
    made = world()
    put_rule(made, rule(selector={}))
    before = made.supply

    made.put_object(ObjectKey("devicetaintrule", "cluster", "broken"), Stored(2, rule(selector={})))

    assert made.supply == before


def test_silent_service_gives_no_device_whatever_is_tolerated() -> None:
    """Devices of a service that does not answer are not allocated, and the reason says so; with its
    first answer they are.
    """
    made = world()
    made.note_silence({("n1", "gpu"): "2026-01-01T00:00:00Z"})

    answer = outcome(made, {"operator": "Exists"})

    assert isinstance(answer, NoFit)
    assert [reason.code for reason in answer.reasons] == ["too-few-devices", "device-service-silent"]
    assert "2026-01-01T00:00:00Z" in answer.reasons[1].message
    made.note_silence({})
    assert device_of(outcome(made)) == "gpu-0"


def test_silence_is_no_evidence_that_lets_anything_go() -> None:
    """A silent service's devices evict nobody; a fault that was told before still does."""
    well, sick = world(), world(health=HealthState.UNHEALTHY)
    for standalone_state in (well, sick):
        standalone_state.note_silence({("n1", "gpu"): "2026-01-01T00:00:00Z"})

    assert well.taints.evicting(GPU_0) == ()
    assert [rule_taint.taint.key for rule_taint in sick.taints.evicting(GPU_0)] == ["topobus.dev/health"]


def test_sick_device_evicts_by_its_health() -> None:
    """Evidence of a fault taints NoExecute, by the driver's own word."""
    (rule_taint,) = world(health=HealthState.UNHEALTHY).taints.evicting(GPU_0)

    assert (rule_taint.taint.effect, rule_taint.rule) == ("NoExecute", "")


def allocation(*tolerations: dict[str, Any], devices: tuple[str, ...] = ("gpu-0",)) -> AllocationResult:
    """Allocate devices with tolerations."""
    results = [
        {"request": "r", "driver": "topobus.dev", "pool": "n1", "device": name, "tolerations": list(tolerations)}
        for name in devices
    ]
    return read_as({"devices": {"results": results}}, AllocationResult, where="allocation")


TAINT = Taint(key="example.com/broken", value="yes", effect="NoExecute")


@pytest.mark.parametrize(
    ("tolerations", "after_s"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([TOLERATE], None, id="for-ever"),
        pytest.param([{"operator": "Exists"}], None, id="everything"),
        pytest.param([{**TOLERATE, "tolerationSeconds": 60}], 60, id="for-a-minute"),
        pytest.param([{**TOLERATE, "tolerationSeconds": 0}], 0, id="for-no-time"),
        pytest.param([{**TOLERATE, "tolerationSeconds": -5}], 0, id="for-less-than-no-time"),
        pytest.param(
            [{**TOLERATE, "tolerationSeconds": 60}, {**TOLERATE, "tolerationSeconds": 30}], 30, id="the-shortest"
        ),
        pytest.param([{**TOLERATE, "tolerationSeconds": 60}, TOLERATE], 60, id="a-limit-beside-none"),
        pytest.param([{**TOLERATE, "effect": "NoSchedule"}], 0, id="another-effect"),
        pytest.param([{"key": "example.com/broken", "operator": "Equal", "value": "no"}], 0, id="another-value"),
        pytest.param([{"key": "example.com/broken", "value": "yes"}], None, id="equal-by-default"),
        pytest.param([{"key": "example.com/broken", "operator": "Is", "value": "yes"}], 0, id="unknown-operator"),
        pytest.param([{**TOLERATE, "tolerationSeconds": 2**62}], None, id="longer-than-any-calendar"),
    ],
)
def test_claim_goes_when_its_toleration_ends(tolerations: list[dict[str, Any]], after_s: int | None) -> None:
    """A claim without a toleration goes at once, one with seconds that long after the taint came,
    one that tolerates it for ever never.
    """
    eviction = next_eviction(allocation(*tolerations), lambda _: [RuleTaint(TAINT, "broken")], lambda _, __: START)

    if after_s is None:
        assert eviction is None
    else:
        assert eviction is not None
        assert (eviction.due, eviction.device, eviction.rule) == (START + timedelta(seconds=after_s), GPU_0, "broken")


def test_claim_goes_with_the_first_of_its_devices() -> None:
    """The earliest taint that is not borne decides."""
    times = {"gpu-0": START + timedelta(hours=1), "gpu-1": START}

    eviction = next_eviction(
        allocation(devices=("gpu-0", "gpu-1")),
        lambda _: [RuleTaint(TAINT)],
        lambda device_id, _: times[device_id.device],
    )

    assert eviction is not None
    assert eviction.device.device == "gpu-1"


def test_rule_tells_what_it_would_do_and_what_it_does() -> None:
    """Its condition counts devices and pods.

    In progress it is while claims that have to go are there.
    """
    held = [(allocation(), ["default/p1"]), (allocation(devices=("gpu-1",)), ["default/p2", "default/p3"])]
    executing, trying = read_rule(rule(selector={"device": "gpu-0"})), read_rule(rule(effect="None", selector={}))

    assert rule_condition(executing, published=1, pending=1, allocations=held) == (
        True,
        "PodsPendingEviction",
        "1 published devices selected, 1 of them allocated to claims of 1 pods; 1 claims are to be released",
    )
    assert rule_condition(executing, published=1, pending=0, allocations=[])[:2] == (False, "Completed")
    assert rule_condition(trying, published=2, pending=0, allocations=held) == (
        False,
        "None",
        "2 published devices selected, 2 of them allocated to claims of 3 pods; nothing is evicted",
    )


@for_all(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["dev-0", "dev-1", None])), max_size=6),
    st.permutations(range(6)),
)
def test_taint_book_is_the_same_in_any_order_of_rules(rules: list[tuple[str, str | None]], order: list[int]) -> None:
    """What slices look like follows from the rules that are there, not from when each came."""
    slices = (slice_of(gpus(2)), slice_of([device("dev-9")], driver="nic"))
    stored = {
        name: read_rule(rule(name, selector={} if meant is None else {"device": meant}, value=name))
        for name, meant in rules
    }
    names = sorted(stored)
    taint_index, other = TaintIndex(), TaintIndex()
    seen = taint_index.put((0, "s"), slices)
    for name in names:
        seen = taint_index.put_rule(name, stored[name]).get((0, "s"), seen)
    for index in order:
        if index < len(names):
            other.put_rule(names[index], stored[names[index]])

    assert other.put((0, "s"), slices) == seen
