"""The node allocation state as a view of inventories and ledger."""

from __future__ import annotations

from topobus.engine.ledger.classic_state import node_allocation_state
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

GPUS = Inventory(
    node="n1",
    device_class="gpu",
    generation=1,
    devices=(Device(name="gpu-0", device_class="gpu", model="H100", capacity={"memory": 5}),),
)
CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="team", name="c", uid="u-1")
POD = Owner(kind=OwnerKind.POD, namespace="team", name="p", uid="u-2")


def _ledger(*allocations: Allocation) -> Ledger:
    return Ledger(node="n1", allocations={allocation.owner.key: allocation for allocation in allocations})


def test_state_tells_claims_apart_from_other_holders() -> None:
    """Claims by uid as classic drivers kept them.

    What pods hold is taken, too, and stands beside.
    """
    claim = Allocation(owner=CLAIM, holdings=(Holding(devices={"gpu": ("gpu-0",)}, cpus=CpuSet(2, 10)),))
    pod = Allocation(owner=POD, holdings=(Holding(container="main", devices={"nic": ("nic-0",)}),))

    state = node_allocation_state("n1", [GPUS], _ledger(claim, pod))

    held = {"namespace": "team", "name": "c", "devices": {"gpu": ["gpu-0"], "cpu": ["cpu-2", "cpu-10"]}}
    assert state["spec"]["allocatableDevices"] == [
        {"class": "gpu", "name": "gpu-0", "health": "healthy", "model": "H100", "capacity": {"memory": 5}}
    ]
    assert (state["spec"]["allocatedClaims"], state["spec"]["preparedClaims"]) == ({"u-1": held}, {})
    assert state["spec"]["otherHolders"] == [
        {"kind": "pod", "namespace": "team", "name": "p", "devices": {"nic": ["nic-0"]}}
    ]


def test_state_lists_a_claim_as_prepared_when_containers_may_use_it() -> None:
    """It stays allocated besides."""
    state = node_allocation_state("n1", [GPUS], _ledger(Allocation(owner=CLAIM, is_prepared=True)))

    assert state["spec"]["allocatedClaims"].keys() == state["spec"]["preparedClaims"].keys() == {"u-1"}


def test_state_is_not_ready_with_the_reason_when_a_part_is_missing() -> None:
    """A node without a ledger, or without devices, is none for a claim."""
    assert node_allocation_state("n1", [GPUS], _ledger())["status"] == {"state": "Ready"}
    assert "no ledger" in node_allocation_state("n1", [GPUS], None)["status"]["reason"]
    assert "inventory" in node_allocation_state("n2", [GPUS], None)["status"]["reason"]
