"""The life of a classic claim: each version says all that the next one needs."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.classic.rules import classic_lifecycle
from topobus.controller.state.holdings import ClaimHoldings
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.values import DeviceId
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import claim_from_template, claim_names, wanted_claims
from topobus.formats.kubernetes.classic.classic import AllocationResult, ResourceHandle
from topobus.formats.kubernetes.classic.classic_handles import as_structured, only_node, write_handle
from topobus.formats.kubernetes.classic.classic_limits import check_status
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError

DRIVER = "gpu.topobus.dev"
NOW = "2026-01-01T00:00:00Z"
POD = ApiObject(api_version="v1", kind="Pod", metadata={"name": "p", "namespace": "default", "uid": "pod-1"})
RESULT = AllocationResult(
    resource_handles=(write_handle(DRIVER, "n1", ("gpu-0", "gpu-1")),), available_on_nodes=only_node("n1")
)


def _claim(**status: Any) -> ApiObject:
    return ApiObject(
        api_version="resource.k8s.io/v1alpha2",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "u-1"},
        spec={"resourceClassName": "gpu"},
        status=status,
    )


def test_attempt_is_the_same_object_when_it_is_under_way_already() -> None:
    """Another replica that comes to the same attempt writes nothing.

    Another node is another attempt, with the finalizer once.
    """
    first = classic_lifecycle.with_attempt(_claim(), DRIVER, "n1")
    moved = classic_lifecycle.with_attempt(first, DRIVER, "n2")

    assert first.metadata["finalizers"] == ["gpu.topobus.dev/deletion-protection"]
    assert classic_lifecycle.with_attempt(first, DRIVER, "n1") is first
    assert (classic_lifecycle.attempt_of(first), classic_lifecycle.attempt_of(moved)) == (
        classic_lifecycle.Attempt(number=1, node="n1"),
        classic_lifecycle.Attempt(number=2, node="n2"),
    )
    assert moved.metadata["finalizers"] == first.metadata["finalizers"]


def test_attempt_gets_a_new_number_after_a_deallocation() -> None:
    """What an older attempt left behind at a node is another operation than the next one's."""
    allocated = classic_lifecycle.with_allocation(
        classic_lifecycle.with_attempt(_claim(), DRIVER, "n1"), DRIVER, RESULT, now=NOW
    )
    cleared = classic_lifecycle.deallocated(allocated)

    assert classic_lifecycle.attempt_of(classic_lifecycle.with_attempt(cleared, DRIVER, "n1")).number == 2
    assert (
        classic_lifecycle.attempt_of(
            classic_lifecycle.with_attempt(classic_lifecycle.without_protection(cleared, DRIVER), DRIVER, "n1")
        ).number
        == 2
    )
    assert classic_lifecycle.deallocated(cleared) == cleared


def test_allocation_is_written_with_driver_and_user_at_once() -> None:
    """Between allocation and reservation nobody else may take the claim, so there is no between."""
    done = classic_lifecycle.with_allocation(
        classic_lifecycle.with_attempt(_claim(), DRIVER, "n1"),
        DRIVER,
        RESULT,
        now=NOW,
        reserved_for=classic_lifecycle.consumer_of(POD),
    )
    status = classic_lifecycle.status_of(done)

    assert (status.driver_name, status.allocation) == (DRIVER, RESULT)
    assert classic_lifecycle.is_reserved_for(status, POD)
    assert check_status(status) == []


def test_deallocation_clears_all_of_it_in_one_version() -> None:
    """Allocation, driver and request go together.

    The finalizer goes last, by a write of its own.
    """
    done = classic_lifecycle.with_deallocation_request(
        classic_lifecycle.with_allocation(
            classic_lifecycle.with_attempt(_claim(), DRIVER, "n1"), DRIVER, RESULT, now=NOW
        )
    )
    cleared = classic_lifecycle.deallocated(done)

    assert done.status["deallocationRequested"] is True
    assert not {"allocation", "driverName", "deallocationRequested", "reservedFor"} & cleared.status.keys()
    assert classic_lifecycle.has_protection(cleared, DRIVER)
    assert not classic_lifecycle.has_protection(classic_lifecycle.without_protection(cleared, DRIVER), DRIVER)


def test_reservation_of_a_claim_is_for_one_pod_unless_it_is_shareable() -> None:
    """A claim whose class does not share has one user at a time, and none while it is being taken
    back.
    """
    alone = classic_lifecycle.with_reservation(
        classic_lifecycle.with_allocation(_claim(), DRIVER, RESULT, now=NOW), POD
    )
    shared = classic_lifecycle.with_allocation(_claim(), DRIVER, AllocationResult(shareable=True), now=NOW)

    assert classic_lifecycle.with_reservation(alone, POD) is alone
    assert not classic_lifecycle.is_free_for(classic_lifecycle.status_of(alone), 32)
    assert classic_lifecycle.is_free_for(
        classic_lifecycle.status_of(classic_lifecycle.with_reservation(shared, POD)), 32
    )
    assert not classic_lifecycle.is_free_for(
        classic_lifecycle.status_of(classic_lifecycle.with_deallocation_request(shared)), 32
    )
    assert not classic_lifecycle.is_free_for(classic_lifecycle.status_of(_claim()), 32)


def test_reservations_of_gone_pods_are_dropped_and_the_last_asks_the_claim_back() -> None:
    """A delayed claim that nobody uses any more is deallocated.

    One that is kept stays allocated.
    """
    alone = classic_lifecycle.with_reservation(
        classic_lifecycle.with_allocation(_claim(), DRIVER, RESULT, now=NOW), POD
    )

    asked = classic_lifecycle.without_reservations(alone, frozenset({"pod-1"}), asks_back=True)
    kept = classic_lifecycle.without_reservations(alone, frozenset({"pod-1"}), asks_back=False)

    assert (asked.status.get("deallocationRequested"), "reservedFor" in asked.status) == (True, False)
    assert "deallocationRequested" not in kept.status
    assert classic_lifecycle.without_reservations(alone, frozenset({"other"}), asks_back=True) is alone


def test_allocation_is_read_as_a_structured_one_by_whoever_asks_what_is_held() -> None:
    """The gateway and the count of what is taken read one shape, whichever generation the claim is
    of.
    """
    done = classic_lifecycle.with_allocation(_claim(), DRIVER, RESULT, now=NOW)
    holdings = ClaimHoldings()
    holdings.put("c", Stored(1, done))

    assert [result["device"] for result in as_structured(done).status["allocation"]["devices"]["results"]] == [
        "gpu-0",
        "gpu-1",
    ]
    assert holdings.holders(["n1"], except_uids=()).keys() == {
        DeviceId("topobus.dev", "n1", "gpu-0"),
        DeviceId("topobus.dev", "n1", "gpu-1"),
    }


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{}",
        "[1]",
        '{"node": "n1", "kind": "Other", "apiVersion": "topobus.dev/v1"}',
        '{"node": "n1", "kind": "AllocatedDevices", "apiVersion": "topobus.dev/v1", "devices": ["nic-0"]}',
    ],
)
def test_handle_of_ours_is_refused_when_it_is_not_ours_to_have_written(data: str) -> None:
    """A damaged handle is never read as one without devices."""
    broken = AllocationResult(resource_handles=(ResourceHandle(driver_name=DRIVER, data=data),))

    with pytest.raises(ContractError, match=r"status\.allocation\.resourceHandles\[0\]\.data"):
        as_structured(classic_lifecycle.with_allocation(_claim(), DRIVER, broken, now=NOW))


def test_handle_of_another_driver_is_left_alone() -> None:
    """Only that driver understands it: to us the claim holds nothing."""
    other = AllocationResult(resource_handles=(ResourceHandle(driver_name="gpu.example.com", data="anything"),))

    assert as_structured(classic_lifecycle.with_allocation(_claim(), "gpu.example.com", other, now=NOW)).status[
        "allocation"
    ]["devices"] == {
        "results": [],
        "config": [],
    }


def test_world_keeps_classic_claims_apart_from_structured_ones() -> None:
    """A keeper of one generation never sees the other's claims, and both count as holders."""
    state = StandaloneState()
    key = ObjectKey("resourceclaim", "default", "c")
    state.put_object(key, Stored(1, classic_lifecycle.with_allocation(_claim(), DRIVER, RESULT, now=NOW)))

    assert ([object_key for object_key, _ in state.classic_claims()], state.claims()) == ([key], ())

    state.drop_object(key)
    assert state.classic_claims() == ()


def test_template_of_classic_claims_makes_classic_claims_for_pods_of_the_old_form() -> None:
    """The claim has its template's generation, and the pod's entry its old or new form."""
    claims = [
        {"name": "g", "source": {"resourceClaimTemplateName": "t"}},
        {"name": "h", "source": {"resourceClaimName": "x"}},
    ]
    pod = ApiObject(
        api_version="v1",
        kind="Pod",
        metadata=POD.metadata,
        spec={"containers": [{"name": "c"}], "resourceClaims": claims},
    )
    spec = {"metadata": {"labels": {"a": "b"}}, "spec": {"resourceClassName": "gpu"}}
    template = ApiObject(
        api_version="resource.k8s.io/v1alpha2", kind="ResourceClaimTemplate", metadata={"name": "t"}, spec=spec
    )

    (wanted,) = wanted_claims(pod)
    made = claim_from_template(pod, wanted, template, now=NOW)

    assert (made.api_version, made.spec, made.metadata["labels"]) == (
        "resource.k8s.io/v1alpha2",
        {"resourceClassName": "gpu"},
        {"a": "b"},
    )
    assert claim_names(pod) == (made.metadata["name"], "x")
