"""The benchmark of a cluster's fill: what it calls wrong in the end, and
how it shows its figures.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab.bench.cluster import ClusterFigures, ProcessFigures, draw
from lab.fleet.fill_outcome import faults_of, left_at_nodes
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind


def _claim(name: str, *devices: str, users: int = 1) -> dict[str, Any]:
    results = [{"request": "r", "driver": "topobus.dev", "pool": "n1", "device": device} for device in devices]
    allocation = {"allocation": {"devices": {"results": results}}} if devices else {}
    reserved = [{"resource": "pods", "name": name, "uid": f"pod-{index}"} for index in range(users)]
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": {**allocation, "reservedFor": reserved}}


def _ledger(**held: str) -> Ledger:
    """Hold devices for claims, by the claim's name."""
    allocations = {}
    for name, device in held.items():
        owner = Owner(kind=OwnerKind.CLAIM, namespace="fill", name=name, uid=f"uid-{name}")
        holding = Holding(devices={"gpu": (device,)})
        allocations[owner.key] = Allocation(owner=owner, decision_id="d", holdings=(holding,))
    return Ledger(node="n1", allocations=allocations)


def test_fill_has_no_faults_when_each_claim_has_what_its_ledger_holds() -> None:
    """Claims with devices of their own, reserved and held, are what a fill is for."""
    assert faults_of([_claim("a", "gpu-0"), _claim("b", "gpu-1")], [_ledger(a="gpu-0", b="gpu-1")]) == []


@pytest.mark.parametrize(
    ("claims", "ledger", "fault"),
    [
        ([_claim("a")], _ledger(), "1 claims without devices: a"),
        ([_claim("a", "gpu-0", users=2)], _ledger(a="gpu-0"), "1 claims that are not reserved for one pod: a"),
        (
            [_claim("a", "gpu-0"), _claim("b", "gpu-0")],
            _ledger(a="gpu-0"),
            "1 devices in two claims: n1/gpu/gpu-0 (a, b)",
        ),
        (
            [_claim("a", "gpu-0")],
            _ledger(),
            "1 devices that the node's ledger does not hold for their claim: n1/gpu/gpu-0 of a",
        ),
        ([_claim("a", "gpu-0")], _ledger(a="gpu-0", b="gpu-0"), "1 devices that a ledger holds for two: n1/gpu/gpu-0"),
    ],
    ids=["lost", "unreserved", "double", "unheld", "held-twice"],
)
def test_fill_names_its_fault_when_something_is_wrong(claims: list[dict[str, Any]], ledger: Ledger, fault: str) -> None:
    """A lost claim, a device twice and a ledger that says otherwise are each named."""
    assert faults_of(claims, [ledger]) == [fault]


def test_device_of_a_late_answer_is_left_and_no_fault() -> None:
    """What a node holds for a claim that went elsewhere is named apart:
    its gateway lets go of it.
    """
    claims, ledgers = [_claim("a", "gpu-0"), _claim("b")], [_ledger(a="gpu-0", b="gpu-1")]

    assert left_at_nodes(claims, ledgers) == ["n1/gpu/gpu-1"]
    assert left_at_nodes(claims[:1], [_ledger(a="gpu-0")]) == []


def test_figures_are_drawn_with_writes_a_claim_and_faults() -> None:
    """The table says how many writes a claim took, and what is wrong in the end."""
    use = ProcessFigures(name="controller-0", until_ready_s=1.5, ms_a_claim=3.25, resident_mib=120.0)
    figures = ClusterFigures(
        nodes=10,
        claims=20,
        replicas=2,
        ready_s=2.0,
        fill_s=4.0,
        claims_a_second=5.0,
        wait_median_s=0.5,
        wait_p99_s=0.9,
        floor_patches_a_second=300.0,
        pause_after_kill_s=0.25,
        processes=[use],
        requests_until_ready={"list pods": 1},
        requests_of_fill={"patch pods": 20, "patch resourceclaims": 40, "watch pods": 1},
        conflicts=3,
        left_at_nodes=2,
        faults=["1 claims without devices: a"],
    )

    lines = draw(figures).splitlines()

    assert any(
        line.split()[:4] == ["writes", "of", "a", "claim"] and "3.00" in line and line.endswith("3") for line in lines
    )
    assert any(line.startswith("after the kill") and "0.25 s" in line for line in lines)
    assert lines[-1] == "WRONG: 1 claims without devices: a"
