"""The check at the end of the fleet benchmark finds what it is there for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from lab.fleet.audit import find_faults
from lab.fleet.fleet_claims import GPUS_OF_FOUR, fleet_claim
from topobus.formats.messages.messages import ApiObject
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind


def _allocated(number: int, *devices: tuple[str, str]) -> ApiObject:
    results = [{"driver": "topobus.dev", "pool": node, "device": name} for node, name in devices]
    return structs.replace(fleet_claim(number), status={"allocation": {"devices": {"results": results}}})


def _ledger(node: str, **held: list[str]) -> Ledger:
    allocations: dict[str, Any] = {}
    for uid, devices in held.items():
        owner = Owner(kind=OwnerKind.CLAIM, namespace="fleet", name=uid, uid=uid.replace("_", "-"))
        allocations[owner.key] = Allocation(owner=owner, holdings=(Holding(devices={"gpu": tuple(devices)}),))
    return Ledger(node=node, allocations=allocations)


WELL = [_allocated(0, ("n1", "gpu-a"), ("n1", "gpu-b")), _allocated(1, ("n2", "gpu-a"))]
LEDGERS = [_ledger("n1", uid_000000=["gpu-a", "gpu-b"]), _ledger("n2", uid_000001=["gpu-a"])]


def test_nothing_is_wrong_when_claims_and_ledgers_agree() -> None:
    """Devices of one name on two nodes are two devices."""
    assert find_faults(WELL, LEDGERS) == []


@pytest.mark.parametrize(
    ("claims", "ledgers", "fault"),
    [
        pytest.param([WELL[0], fleet_claim(1)], LEDGERS, "claim claim-000001 is not allocated", id="lost"),
        pytest.param(
            [WELL[0], _allocated(1, ("n1", "gpu-b"))],
            LEDGERS,
            "n1 gpu gpu-b is given to claims claim-000000 and claim-000001",
            id="given-twice",
        ),
        pytest.param(
            WELL,
            [_ledger("n1", uid_000000=["gpu-a", "gpu-b"], uid_000007=["gpu-b"]), LEDGERS[1]],
            "ledger of n1: gpu gpu-b is held by uid-000000 and by uid-000007",
            id="held-twice",
        ),
        pytest.param(
            WELL,
            LEDGERS[:1],
            "claim claim-000001 was given [('n2', 'gpu', 'gpu-a')], and ledgers hold [] for it",
            id="not-in-the-ledger",
        ),
        pytest.param(
            WELL[:1],
            LEDGERS,
            "ledgers hold [('n2', 'gpu', 'gpu-a')] for uid-000001, which is no claim",
            id="held-for-nobody",
        ),
    ],
)
def test_fault_is_told_when_there_is_one(claims: list[ApiObject], ledgers: list[Ledger], fault: str) -> None:
    """A claim that was lost, a device with two holders, a ledger that says something else."""
    assert fault in find_faults(claims, ledgers)


def test_claims_are_an_even_mixture() -> None:
    """Of four two want a pair, one a GPU with a NIC, one a single GPU: six GPUs."""
    requests = [fleet_claim(number).spec["devices"]["requests"] for number in range(4)]
    gpus = [
        request["exactly"]["count"]
        for each in requests
        for request in each
        if request["exactly"]["deviceClassName"] == "gpu.topobus.dev"
    ]

    assert sum(gpus) == GPUS_OF_FOUR
    assert [len(each) for each in requests] == [1, 1, 2, 1]
