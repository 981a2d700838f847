"""What a newer server or another writer put into an object stays there, whatever the controller
writes into it.

What it does not know of a choice it refuses.
"""

from __future__ import annotations

from typing import Any

import pytest

from topobus.engine.allocation.values import Fault
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.reservations import PodRef, with_reservation, without_allocation
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from unit.controller.allocation import claim, given, gpus, slice_of, solve

NEW = {"fromTheFuture": {"a": [1, {"b": None}]}}


def stored() -> ApiObject:
    """Make a claim with fields that nobody here knows, on every level."""
    request = {"name": "r", "exactly": {"deviceClassName": "gpu", **NEW}, **NEW}
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "namespace": "default", "uid": "u", "annotations": {"other.io/x": "y"}, **NEW},
        spec={"devices": {"requests": [request], **NEW}, **NEW},
        status={"conditions": [{"type": "Other", "status": "True", **NEW}], **NEW},
    )


def test_unknown_fields_stay_when_the_controller_writes() -> None:
    """Attempt, allocation, reservation, condition and the way back leave
    everything else as it was.
    """
    api_object = stored()
    allocation = AllocationResult()

    attempted = attempts.with_attempt(api_object, attempts.Attempt(number=1, node="n", allocation=allocation))
    allocated = lifecycle.with_allocation(attempted, allocation, now="2026-01-01T00:00:00Z")
    reserved = with_reservation(allocated, PodRef("default", "p", "u1"))
    assert isinstance(reserved, ApiObject)
    back = without_allocation(lifecycle.with_deallocation(reserved, why="test"), why="test", now="2026-01-01T00:00:00Z")

    for written in (attempted, allocated, reserved, back):
        again = decode(encode(written), ApiObject, where="test")
        assert again.spec == api_object.spec
        assert again.metadata["fromTheFuture"] == NEW["fromTheFuture"]
        assert again.metadata["annotations"]["other.io/x"] == "y"
        assert again.status["fromTheFuture"] == NEW["fromTheFuture"]
        assert {"type": "Other", "status": "True", **NEW} in again.status["conditions"]


@pytest.mark.parametrize(
    ("devices", "code"),
    [
        pytest.param(
            {"requests": [{"name": "r", "atLeast": {"deviceClassName": "gpu"}}]},
            "unknown-request",
            id="kind-of-request",
        ),
        pytest.param(
            {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "selectors": [{"rego": {}}]}}]},
            "unknown-selector",
            id="selector",
        ),
        pytest.param(
            {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "allocationMode": "Most"}}]},
            "unknown-mode",
            id="mode",
        ),
        pytest.param(
            {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}], "constraints": [{"sameRack": True}]},
            "unknown-constraint",
            id="constraint",
        ),
    ],
)
def test_unknown_kinds_are_refused_and_never_skipped(devices: dict[str, Any], code: str) -> None:
    """A choice that nobody here knows ends the claim, in the search as in the check before it."""
    claim_to_allocate = claim(*devices["requests"], constraints=devices.get("constraints", ()))

    outcome = solve(given([slice_of(gpus(2))], claim_to_allocate))

    assert isinstance(outcome, Fault)
    assert outcome.reason.code == code
    raw = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "c", "uid": "u"},
        spec={"devices": devices},
    )
    with pytest.raises(ContractError, match="wanted"):
        lifecycle.read_claim(raw)
