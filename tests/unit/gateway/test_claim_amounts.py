"""How much of shared devices an allocation gives, what it tolerates, and until when it is wanted."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.formats.kubernetes.slices import SICK_TAINT
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.rules.claim_allocation import ClaimAllocation, allocation_of, is_wanted_here
from topobus.values.device_sharing import HeldShare
from topobus.values.names import ClaimUid
from topobus.values.outcome import Refusal

UID = ClaimUid("u")


def result(device: str = "gpu-0", request: str = "r", **fields: Any) -> dict[str, Any]:
    """A device of an allocation."""
    pool = "n1/cpu" if device.startswith("cpu-") else "n1"
    return {"driver": "topobus.dev", "pool": fields.pop("pool", pool), "device": device, "request": request, **fields}


def share(device: str = "gpu-0", share_id: str = "s", **amounts: str) -> dict[str, Any]:
    """A share of a device."""
    return result(device, shareID=share_id, consumedCapacity=amounts)


def claim(*results: dict[str, Any], metadata: dict[str, Any] | None = None, **status: Any) -> ApiObject:
    """An allocated claim."""
    status = {"allocation": {"devices": {"results": list(results)}}, **status}
    return ApiObject(api_version="v1", kind="ResourceClaim", metadata={"uid": UID, **(metadata or {})}, status=status)


def read(*results: dict[str, Any], **fields: Any) -> ClaimAllocation | Refusal:
    """Read an allocation on its node."""
    return allocation_of(claim(*results, **fields), namespace="d", name="c", uid=UID, node="n1")


@pytest.mark.parametrize(
    ("results", "amounts"),
    [
        ([share(memory="1Gi")], {"memory": 1 << 30}),
        ([share(memory="1500m")], {"memory": 2}),
        ([share(memory="0")], {"memory": 0}),
        ([share(memory=str(2**63 - 1))], {"memory": 2**63 - 1}),
        ([share(memory="1"), share(share_id="t", memory="2")], {"memory": 3}),
        ([share(memory="1"), result()], None),
        ([result(consumedCapacity={"memory": "1"})], None),
    ],
    ids=["memory", "rounded up", "nothing", "the most", "two shares", "whole as well", "no share"],
)
def test_amounts_of_a_device_are_added_up(results: list[dict[str, Any]], amounts: dict[str, int] | None) -> None:
    """In whole units, as the ledger counts."""
    allocation = read(*results)

    assert isinstance(allocation, ClaimAllocation), allocation
    assert allocation.shares == ({} if amounts is None else {"gpu": {"gpu-0": HeldShare(amounts=amounts)}})


@pytest.mark.parametrize("amount", ["-1", "-1m", str(2**63), "much"])
def test_amount_that_no_ledger_counts_is_refused(amount: str) -> None:
    """The claim is named, and what is wrong with it."""
    refusal = read(share(memory=amount))

    assert isinstance(refusal, Refusal)
    assert refusal.reasons[0].code == "claim-malformed"
    assert "consumedCapacity" in refusal.reasons[0].message


@pytest.mark.parametrize(
    ("texts", "count"),
    [(["1"], 1), (["4095"], 4095), (["2", "3"], 5), (["0"], None), (["1500m"], None), (["-1"], None), (["x"], None)],
)
def test_cpus_of_a_group_are_counted(texts: list[str], count: int | None) -> None:
    """Whole ones, at least one and no more than a machine can have."""
    allocation = read(*(share("cpu-machine", f"s{number}", cpus=text) for number, text in enumerate(texts)))

    if count is None:
        assert isinstance(allocation, Refusal), allocation
    else:
        assert isinstance(allocation, ClaimAllocation), allocation
        assert allocation.group_cpus == {"cpu-machine": count}


SICK = {"key": SICK_TAINT.key, "operator": "Exists", "effect": SICK_TAINT.effect}


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (SICK, ("gpu-0",)),
        ({**SICK, "tolerationSeconds": 1}, ("gpu-0",)),
        ({**SICK, "tolerationSeconds": 0}, ()),
        ({**SICK, "tolerationSeconds": -1}, ()),
        ({**SICK, "key": "other"}, ()),
    ],
    ids=["for ever", "for a second", "for a moment", "not at all", "another taint"],
)
def test_sick_device_is_taken_where_the_taint_is_tolerated(
    toleration: dict[str, Any], tolerated: tuple[str, ...]
) -> None:
    """A toleration that is over at once tolerates nothing. Each device has its own."""
    allocation = read(result(tolerations=[toleration]), result("gpu-1"))

    assert isinstance(allocation, ClaimAllocation), allocation
    assert allocation.tolerated == tolerated


@pytest.mark.parametrize(("stated", "generation"), [(1, 1), (7, 7), (0, 0), (-1, 0), ("2", 0), (None, 0)])
def test_generation_is_what_the_server_counts(stated: object, generation: int) -> None:
    """0 where it counts none."""
    allocation = read(result(), metadata={"generation": stated})

    assert isinstance(allocation, ClaimAllocation), allocation
    assert allocation.generation == generation


@pytest.mark.parametrize("request_name", ["r/a/b", "r/", "/a", "R"])
def test_request_name_that_is_none_is_refused(request_name: str) -> None:
    """One alternative at the most, each a DNS label."""
    refusal = read(result(request=request_name))

    assert isinstance(refusal, Refusal)
    assert "wanted a DNS label" in refusal.reasons[0].message


@pytest.mark.parametrize(
    ("stored", "is_wanted"),
    [
        (None, False),
        (claim(result()), True),
        (claim(result(), metadata={"uid": "another"}), False),
        (claim(result(pool="n2")), False),
        (claim(result(), metadata={"deletionTimestamp": "t"}), False),
        (claim(result(), metadata={"deletionTimestamp": "t"}, reservedFor=[{"name": "p"}]), True),
    ],
    ids=["gone", "allocated", "replaced", "elsewhere", "deleted", "deleted with a pod"],
)
def test_claim_is_wanted_while_a_pod_may_use_it(stored: ApiObject | None, is_wanted: bool) -> None:
    """A deleted one gets no further pod."""
    assert is_wanted_here(stored, UID, "n1") is is_wanted


PARTS = {
    "shape-worker": ("cpu-numa-0", "gpu-0", "nic-0"),
    "shape-cpu-0": ("cpu-numa-0",),
    "shape-cpu-1": ("cpu-numa-0",),
}
CPUS = {"shape-worker": {"cpu-numa-0": 16}, "shape-cpu-0": {"cpu-numa-0": 1}, "shape-cpu-1": {"cpu-numa-0": 1}}


def read_shapes(*results: dict[str, Any]) -> ClaimAllocation:
    """Read an allocation of shapes on a node that has these."""
    allocation = allocation_of(claim(*results), namespace="d", name="c", uid=UID, node="n1", parts=PARTS, cpus=CPUS)
    assert isinstance(allocation, ClaimAllocation), allocation
    return allocation


def test_cpus_of_shapes_and_single_cpus_are_one_number_of_their_group() -> None:
    """The ledger chooses all of a claim at once; other claims have shares of the group as well."""
    allocation = read_shapes(result("shape-worker"), result("shape-cpu-0"), result("shape-cpu-1", request="s"))

    assert allocation.group_cpus == {"cpu-numa-0": 18}
    assert allocation.held == {"cpu": ("cpu-numa-0",), "gpu": ("gpu-0",), "nic": ("nic-0",)}
    assert (allocation.by_share, allocation.shares) == ({"cpu": ("cpu-numa-0",)}, {})
    assert [(each.request, each.allocated, each.share_id) for each in allocation.part("cpu").devices] == [
        ("r", "shape-worker", ""),
        ("r", "shape-cpu-0", ""),
        ("s", "shape-cpu-1", ""),
    ]


def test_admin_access_to_a_shape_takes_no_cpus() -> None:
    """It holds nothing."""
    allocation = read_shapes(result("shape-worker", adminAccess=True))

    assert (allocation.group_cpus, allocation.held) == ({}, {})
