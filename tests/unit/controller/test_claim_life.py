"""The life of a claim: attempt, allocation, condition, protection.

Each version says all that the next one needs.
"""

from __future__ import annotations

import msgspec
import pytest

from topobus.controller.state.holdings import ClaimHoldings
from topobus.engine.allocation.values import DeviceId, PoolId
from topobus.engine.claims import attempts, lifecycle
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.stored import Stored
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    DevicesAllocated,
    GrantedConfiguration,
    GrantedDevice,
    OpaqueConfiguration,
)
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.errors import ContractError
from topobus.values.quantity import Quantity
from topobus.values.request import DeviceRequest, Policy

CLAIM = ApiObject(
    api_version="resource.k8s.io/v1",
    kind="ResourceClaim",
    metadata={"name": "c", "namespace": "default", "uid": "u-1", "generation": 1},
    spec={"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}},
)


def _granted(driver: str, device: str, **fields: object) -> GrantedDevice:
    return msgspec.convert({"request": "r", "driver": driver, "pool": "n1", "device": device, **fields}, GrantedDevice)


ALLOCATION = AllocationResult(
    devices=DevicesAllocated(
        results=(
            _granted("topobus.dev", "gpu-1"),
            _granted("topobus.dev", "gpu-0"),
            _granted("topobus.dev", "nic-0", adminAccess=True),
            _granted("other.example.com", "x"),
        )
    )
)
ATTEMPT = Attempt(number=3, node="n1", allocation=ALLOCATION)


def test_attempt_is_read_back_when_it_was_written() -> None:
    """Whoever finds the claim after a crash reads the very attempt, and the claim is protected
    meanwhile.
    """
    tried = attempts.with_attempt(CLAIM, ATTEMPT)

    assert attempts.attempt_of(tried) == ATTEMPT
    assert attempts.number_of(tried) == 3
    assert tried.metadata["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert attempts.with_attempt(tried, ATTEMPT) == tried


def test_attempt_keeps_its_number_when_it_is_dropped() -> None:
    """The next attempt gets another number, so another operation at the node."""
    dropped = attempts.without_attempt(attempts.with_attempt(CLAIM, ATTEMPT))

    assert attempts.attempt_of(dropped) is None
    assert attempts.number_of(dropped) == 3
    assert lifecycle.is_finished(dropped)


def test_allocation_ends_the_attempt_when_it_is_written() -> None:
    """The status has the result and the time; the protection stays."""
    done = lifecycle.with_allocation(attempts.with_attempt(CLAIM, ATTEMPT), ALLOCATION, now="2026-01-01T00:00:00Z")

    assert attempts.attempt_of(done) is None
    assert lifecycle.status_of(done).allocation == msgspec.structs.replace(
        ALLOCATION, allocation_timestamp="2026-01-01T00:00:00Z"
    )
    assert done.status["conditions"][0]["status"] == "True"
    assert not lifecycle.is_finished(done)


def test_holdings_count_attempts_but_not_admin_access() -> None:
    """An attempt counts as holding already; admin access holds nothing.

    What a claim lets go is told.
    """
    holdings = ClaimHoldings()

    taken = {
        PoolId(granted_device.driver, "n1")
        for granted_device in ALLOCATION.devices.results
        if not granted_device.admin_access
    }
    assert holdings.put("k", Stored(1, attempts.with_attempt(CLAIM, ATTEMPT))) == (taken, frozenset())
    assert sorted(device_id.device for device_id in holdings.holders(["n1"], except_uids=())) == ["gpu-0", "gpu-1", "x"]
    assert holdings.holders(["n2"], except_uids=()) == {}
    assert holdings.holders(["n1"], except_uids=("u-1",)) == {}
    assert holdings.put("k", Stored(2, lifecycle.with_allocation(CLAIM, ALLOCATION, now="t"))) == (
        frozenset(),
        frozenset(),
    )
    assert holdings.put("k", None) == (taken, taken)
    assert holdings.holders(["n1"], except_uids=()) == {}


def test_holdings_add_up_shares_when_claims_share_a_device() -> None:
    """Shares of one device are added; a claim's own are left out for itself."""
    holdings = ClaimHoldings()
    for uid in ("a", "b"):
        granted = _granted("net.example.com", "big", shareID=uid, consumedCapacity={"memory": "2Gi"})
        api_object = msgspec.structs.replace(CLAIM, metadata=CLAIM.metadata | {"uid": uid})
        shared = lifecycle.with_allocation(
            api_object, AllocationResult(devices=DevicesAllocated(results=(granted,))), now="t"
        )
        holdings.put(uid, Stored(1, shared))

    device = DeviceId("net.example.com", "n1", "big")
    assert holdings.consumed(["n1"], except_uids=()) == {device: {"memory": Quantity.parse("4Gi")}}
    assert holdings.consumed(["n1"], except_uids=("a",)) == {device: {"memory": Quantity.parse("2Gi")}}
    assert holdings.holders(["n1"], except_uids=()) == {}


def test_placement_request_names_exactly_our_devices_of_the_node() -> None:
    """The node is asked for these devices and no others, whatever its own policy.

    Foreign drivers are not its business.
    """
    request = lifecycle.placement_request(CLAIM, ALLOCATION, "n1")

    assert request is not None
    assert request.policy is Policy.NONE
    assert request.containers[0].devices == (
        DeviceRequest(device_class="gpu", count=2, names=("gpu-0", "gpu-1")),
        DeviceRequest(device_class="nic", count=1, names=("nic-0",), is_shared=True),
    )
    assert lifecycle.placement_request(CLAIM, ALLOCATION, "elsewhere") is None


def test_condition_keeps_its_time_when_only_the_reason_changes() -> None:
    """The transition time is when the status changed, as in Kubernetes.

    Conditions of others stay.
    """
    foreign = ApiObject(
        api_version="v1", kind="ResourceClaim", metadata={"name": "c"}, status={"conditions": [{"type": "Other"}]}
    )

    first = lifecycle.with_condition(foreign, is_true=False, reason="A", message="a", now="t1")
    second = lifecycle.with_condition(first, is_true=False, reason="B", message="b" * 5000, now="t2")

    assert [condition["type"] for condition in second.status["conditions"]] == ["Other", "Allocated"]
    assert second.status["conditions"][1]["lastTransitionTime"] == "t1"
    assert len(second.status["conditions"][1]["message"]) == 4096


def test_condition_is_not_written_again_when_the_object_has_it() -> None:
    """The object itself comes back, also with a long message and with a field that a server added;
    not when it says something else, or is about an older spec.
    """
    claim = ApiObject(api_version="v1", kind="ResourceClaim", metadata={"name": "c", "generation": 1})
    stored = lifecycle.with_condition(claim, is_true=False, reason="B", message="b" * 5000, now="t1")
    (condition,) = stored.status["conditions"]
    served = msgspec.structs.replace(stored, status={"conditions": [condition | {"lastProbeTime": None}]})
    changed = msgspec.structs.replace(stored, metadata={"name": "c", "generation": 2})

    again = lifecycle.with_condition(served, is_true=False, reason="B", message="b" * 5000, now="t2")
    other = lifecycle.with_condition(stored, is_true=False, reason="B", message="b", now="t2")
    newer = lifecycle.with_condition(changed, is_true=False, reason="B", message="b" * 5000, now="t2")

    assert again is served
    assert other.status["conditions"] == [condition | {"message": "b"}]
    assert newer.status["conditions"] == [condition | {"observedGeneration": 2}]


def test_share_ids_are_the_same_when_made_again() -> None:
    """A share id is a UUID that follows from the claim, so a retry writes the same."""
    shared = AllocationResult(devices=DevicesAllocated(results=(_granted("topobus.dev", "gpu-0", shareID="SHARE-0"),)))

    allocation_result, again, other = (lifecycle.with_uuids(shared, uid) for uid in ("u", "u", "v"))

    assert allocation_result == again != other
    assert len(allocation_result.devices.results[0].share_id or "") == 36


@pytest.mark.parametrize(
    ("metadata", "spec", "wanted"),
    [
        ({"name": "c"}, {}, "metadata.uid is missing"),
        (
            {"name": "c", "uid": "u"},
            {"devices": {"requests": [{"name": "r"}]}},
            "exactly one of exactly and firstAvailable",
        ),
        ({"name": "c", "uid": "u"}, {"devices": []}, "devices"),
    ],
)
def test_read_claim_says_what_is_wrong_when_nobody_checked_it(
    metadata: dict[str, str], spec: dict[str, object], wanted: str
) -> None:
    """A stored claim is not trusted: every limit is checked again."""
    api_object = ApiObject(api_version="v1", kind="ResourceClaim", metadata=metadata, spec=spec)

    with pytest.raises(ContractError, match=wanted):
        lifecycle.read_claim(api_object)


def test_attempt_has_the_claims_own_configuration_once() -> None:
    """32 configurations of 9 kB on the wire stand in the spec.

    The attempt only says where, keeps the class's own, and is read back whole and in order.
    """
    config = [
        {
            "requests": ["r"] if number % 2 else [],
            "opaque": {"driver": "topobus.dev", "parameters": {"n": number, "text": '"' * 4_500}},
        }
        for number in range(32)
    ]
    claim = msgspec.structs.replace(CLAIM, spec={"devices": {**CLAIM.spec["devices"], "config": config}})
    own = [
        GrantedConfiguration(source="FromClaim", requests=configuration.requests, opaque=configuration.opaque)
        for configuration in lifecycle.read_claim(claim).devices.config
    ]
    of_class = GrantedConfiguration(
        source="FromClass", opaque=OpaqueConfiguration(driver="topobus.dev", parameters={"a": 1})
    )
    granted_configuration = GrantedConfiguration(
        source="FromClaim", opaque=OpaqueConfiguration(driver="topobus.dev", parameters={"mates": 2})
    )
    devices = msgspec.structs.replace(ALLOCATION.devices, config=(of_class, *own, granted_configuration))
    attempt = msgspec.structs.replace(ATTEMPT, allocation=msgspec.structs.replace(ALLOCATION, devices=devices))

    tried = attempts.with_attempt(claim, attempt)

    assert attempts.attempt_of(tried) == attempt
    assert len(encode(tried)) < len(encode(claim)) + 4_000


def test_attempt_is_refused_when_the_configuration_that_it_means_is_gone() -> None:
    """Whoever changed the spec under an attempt is told so.

    Nothing is allocated with another configuration.
    """
    config = [{"opaque": {"driver": "topobus.dev", "parameters": {"n": 1}}}]
    claim = msgspec.structs.replace(CLAIM, spec={"devices": {**CLAIM.spec["devices"], "config": config}})
    own = GrantedConfiguration(
        source="FromClaim", opaque=OpaqueConfiguration(driver="topobus.dev", parameters={"n": 1})
    )
    devices = msgspec.structs.replace(ALLOCATION.devices, config=(own,))
    tried = attempts.with_attempt(
        claim, msgspec.structs.replace(ATTEMPT, allocation=msgspec.structs.replace(ALLOCATION, devices=devices))
    )

    with pytest.raises(ContractError, match="does not have"):
        attempts.attempt_of(msgspec.structs.replace(tried, spec=CLAIM.spec))
