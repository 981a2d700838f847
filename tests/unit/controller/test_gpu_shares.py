"""Shares of GPUs from an operator's setting to an allocation: four quarters fit, the fifth is
refused with the numbers.
"""

from __future__ import annotations

import pytest

from support.shared_devices import GIB, shared_gpus
from topobus.controller.state.inventory_slices import consumed_by_pods, devices_of_class, slices_of_pool
from topobus.engine.allocation.values import Allocated, AllocationInput, DeviceId, Node, NoFit, Outcome, Usage
from topobus.engine.claims.lifecycle import placement_request
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.limits import check_slice
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.quantity import Quantity
from topobus.values.request import DeviceRequest, Owner, OwnerKind
from unit.controller.allocation import claim, request, solve

NODE = "n1"
GPUS = Inventory(node=NODE, device_class="gpu", generation=1, devices=shared_gpus("gpu-0"))
SLICES = slices_of_pool(NODE, [devices_of_class(GPUS)])
DEVICE = DeviceId("topobus.dev", NODE, "gpu-0")


def wants(name: str, memory: str = "") -> object:
    """A claim for one GPU, with so much memory where it names an amount."""
    capacity = {"capacity": {"requests": {"memory": memory}}} if memory else {}
    return claim(request(device_class="gpu", **capacity), name=f"d/{name}")


def allocate(*claims: object, usage: Usage | None = None) -> Outcome:
    """Allocate claims on a node with one shared GPU."""
    return solve(
        AllocationInput(
            node=Node(NODE),
            claims=claims,  # type: ignore[arg-type]  # claims of the builders
            classes={"gpu": built_in_class("gpu")},
            slices=SLICES,
            usage=usage or Usage(),
        )
    )


def test_slices_of_a_shared_gpu_keep_every_limit() -> None:
    """A server takes them."""
    assert [problem for resource_slice in SLICES for problem in check_slice(resource_slice.spec)] == []


def test_four_claims_have_a_quarter_each_when_they_name_no_amount() -> None:
    """Each has a share of its own with one share and a quarter of the memory."""
    outcome = allocate(*(wants(name) for name in "abcd"))

    assert isinstance(outcome, Allocated)
    granted = [device for result in outcome.results for device in result.devices.results]
    assert [(device.device, device.consumed_capacity) for device in granted] == [
        ("gpu-0", {"memory": "20Gi", "shares": "1"})
    ] * 4
    assert len({device.share_id for device in granted}) == 4


@pytest.mark.parametrize(
    ("memory", "used", "words"),
    [
        ("", "80Gi", "memory: 20Gi wanted, 0 left of 80Gi"),
        ("40Gi", "60Gi", "memory: 40Gi wanted, 20Gi left of 80Gi"),
        ("90Gi", "0", "memory: 90Gi wanted, 80Gi left of 80Gi"),
    ],
)
def test_a_claim_is_refused_with_what_is_wanted_and_what_is_left(memory: str, used: str, words: str) -> None:
    """Who is refused reads which GPU is short, of what, and by how much."""
    outcome = allocate(wants("e", memory), usage=Usage(consumed={DEVICE: {"memory": Quantity.parse(used)}}))

    assert isinstance(outcome, NoFit)
    text = "; ".join(reason.message for reason in outcome.reasons)
    assert words in text
    assert "gpu-0" in text


def test_what_pods_have_by_replicas_is_not_left_for_claims() -> None:
    """The ledger tells what no claim tells."""
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu-shared", uid="x")
    share = HeldShare(amounts={"memory": 60 * GIB, "shares": 3}, replicas=(0, 1, 2))
    holding = Holding(devices={"gpu": ("gpu-0",)}, shared={"gpu": ("gpu-0",)}, shares={"gpu": {"gpu-0": share}})
    claimed = Owner(kind=OwnerKind.CLAIM, name="c", uid="c")
    ledger = Ledger(
        node=NODE, allocations={who.key: Allocation(owner=who, holdings=(holding,)) for who in (owner, claimed)}
    )

    consumed = consumed_by_pods(ledger)

    assert consumed == {DEVICE: {"memory": Quantity.of(60 * GIB), "shares": Quantity.of(3)}}
    assert isinstance(allocate(wants("a"), usage=Usage(consumed=consumed)), Allocated)
    assert isinstance(allocate(wants("a"), wants("b"), usage=Usage(consumed=consumed)), NoFit)


def test_placement_request_tells_the_node_how_much_of_a_device_a_claim_has() -> None:
    """Two shares of one device in a claim are added up."""
    outcome = allocate(claim(request(device_class="gpu"), request("more", device_class="gpu"), name="d/a"))
    assert isinstance(outcome, Allocated)
    stored = ApiObject(
        api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "a", "namespace": "d", "uid": "u"}
    )

    placed = placement_request(stored, outcome.results[0], NODE)

    assert placed is not None
    amounts = {"gpu-0": {"memory": 40 * GIB, "shares": 2}}
    assert placed.containers[0].devices == (
        DeviceRequest(device_class="gpu", count=1, names=("gpu-0",), by_share=True, amounts=amounts),
    )
