"""Laws of hand-out with partitions and shares: whatever comes through whichever door, no counter is
overdrawn and no shared device is somebody's whole.

The doors are those of a node: claims that the allocator chose (and that the ledger places), claims
that a scheduler chose badly, kubelet's device plugin, pods by count and by name, classic claims,
and dry runs of all of them. What decides is the real code; the history is hypothesis'.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from support.classic_choice import Wanted, choose_on
from support.laws import examples
from support.partitioned_cards import SHARED_NIC, SLICES, card, counters_of
from topobus.controller.state.inventory_slices import devices_of_class, holders_from_ledger, slices_of_pool
from topobus.engine.alignment.planning.node_view import node_view, with_devices, with_ledger
from topobus.engine.alignment.planning.placement import place
from topobus.engine.allocation.pools import gather_pools
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import (
    ALL_GATES,
    Allocated,
    AllocationInput,
    ClaimToAllocate,
    DeviceId,
    Node,
    Usage,
)
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.lifecycle import placement_request
from topobus.engine.ledger import transitions
from topobus.engine.ledger.adoption_faults import fault_of_adoption, shares_of
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.formats.kubernetes.built_in_classes import built_in_class
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import AdoptRequest, ApiObject
from topobus.gateway.device_plugins.rules.lists import holders_of, plugin_lists
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.ledger import Adoption, Ledger
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.outcome import Placement, Refusal
from topobus.values.partitions import partitioned
from topobus.values.quantity import Quantity
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy
from topobus.values.view import AlignmentOptions

NODE = "n1"
COMPILER = CelCompiler()
MACHINE = Machine(
    node=NODE, numa_nodes=(NumaNode(id=0, cpus=CpuSet(0), memory_bytes=1 << 30),), cpus=(Cpu(id=0, online=True),)
)
FUNCTION = Device(name="nic-1", device_class="nic")
_NICS, _NIC_SETS, _ = partitioned(
    (
        SHARED_NIC,
        FUNCTION,
        *(Device(name=f"nic-1-vf{number}", device_class="nic", partition_of="nic-1") for number in range(3)),
    ),
    (),
)
# A card with partitions that exclude each other, one whose partitions always fit, and one without.
GPUS = (*card("gpu-0"), *card("gpu-1", (3, 4))[1:], Device(name="gpu-2", device_class="gpu"))
INVENTORIES = {
    "gpu": Inventory(
        node=NODE, device_class="gpu", generation=1, devices=GPUS, counter_sets=counters_of("gpu-0", "gpu-1")
    ),
    "nic": Inventory(node=NODE, device_class="nic", generation=1, devices=_NICS, counter_sets=_NIC_SETS),
}
EMPTY = node_view(MACHINE, INVENTORIES, None, AlignmentOptions(), CpuSet())
BY_NAME = {device.name: device for inventory in INVENTORIES.values() for device in inventory.devices}
TOTALS = {
    (counter_set.name, counter): total
    for inventory in INVENTORIES.values()
    for counter_set in inventory.counter_sets
    for counter, total in counter_set.counters.items()
}

classes = st.sampled_from(["gpu", "nic"])
names = {
    name: st.sets(st.sampled_from([device.name for device in inventory.devices]), min_size=1, max_size=3)
    for name, inventory in INVENTORIES.items()
}
named = classes.flatmap(lambda name: st.tuples(st.just(name), names[name]))
steps = st.one_of(
    st.tuples(st.just("claim"), classes, st.integers(1, 2), st.sampled_from([0, 3, 4, SLICES]), st.integers(1, 8)),
    st.tuples(st.just("forged"), named, st.booleans()),
    st.tuples(st.just("kubelet"), classes, st.integers(0, 7), st.integers(1, 3)),
    st.tuples(st.just("pod"), classes, st.integers(1, 3)),
    st.tuples(st.just("named pod"), named, st.booleans()),
    st.tuples(st.just("classic"), classes, st.integers(1, 3)),
    st.tuples(st.just("release"), st.integers(0, 7)),
)


class Plane:
    """A node's ledger, and the doors to it."""

    def __init__(self) -> None:
        self.ledger = Ledger(node=NODE)
        self.consumed: dict[str, dict[str, int]] = {}
        """Claim to device to the bandwidth of its shares, as claims' statuses tell it."""
        self.turn = 0

    def owner(self, kind: OwnerKind) -> Owner:
        """Somebody new."""
        self.turn += 1
        name = "topobus.dev/x" if kind is OwnerKind.DEVICE_PLUGIN else f"o{self.turn}"
        return Owner(kind=kind, name=name, uid=f"u{self.turn}")

    def usage(self) -> Usage:
        """What the allocator hears of the ledger and of the claims."""
        consumed: dict[DeviceId, dict[str, Quantity]] = {}
        for owner, shares in self.consumed.items():
            for device, amount in shares.items() if owner in self.ledger.allocations else ():
                used = consumed.setdefault(DeviceId("topobus.dev", NODE, device), {"bandwidth": Quantity(0)})
                used["bandwidth"] = used["bandwidth"] + Quantity.of(amount)
        return Usage({device: str(owner) for device, owner in holders_from_ledger(self.ledger).items()}, consumed)

    def place(self, request: PodRequest, *, is_dry_run: bool = False) -> Placement | Refusal:
        """Place as topology does, in a dry run first: both say the same."""
        view = with_ledger(EMPTY, self.ledger)
        outcome = place(view, request)
        dry = place(with_devices(view, "claim/x/y/-", {}), request)
        assert isinstance(dry, Placement) == isinstance(outcome, Placement)
        if isinstance(outcome, Placement) and not is_dry_run:
            self.ledger = transitions.reserve(
                self.ledger, op_id=f"op-{self.turn}", request=request, placement=outcome, decision_id=f"d-{self.turn}"
            ).ledger
        return outcome

    def adopt(
        self, owner: Owner, device_class: str, wanted: tuple[str, ...], *, by_share: bool = False
    ) -> Refusal | None:
        """Adopt as topology does."""
        asked = AdoptRequest(
            op_id=f"op-{self.turn}",
            owner=owner,
            devices={device_class: wanted},
            shared={device_class: wanted} if by_share else {},
        )
        fault = fault_of_adoption(EMPTY, self.ledger, asked)
        step = fault or transitions.adopt(
            self.ledger,
            Adoption(owner=owner, devices=asked.devices, shared=shares_of(EMPTY, asked)),
            op_id=asked.op_id,
            decision_id="d",
        )
        if isinstance(step, Refusal):
            return step
        self.ledger = step.ledger
        return None

    def claim(self, device_class: str, count: int, slices: int, bandwidth: int) -> None:
        """Allocate a claim as the controller does, then hold it."""
        exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count}
        if device_class == "gpu" and slices:
            attributes = 'device.attributes["topobus.dev"]'
            exactly["selectors"] = [
                {"cel": {"expression": f'"slices" in {attributes} && {attributes}.slices == {slices}'}}
            ]
        if device_class == "nic" and bandwidth > 2:
            exactly["capacity"] = {"requests": {"bandwidth": f"{bandwidth}k"}}
        spec = read_as({"devices": {"requests": [{"name": "r", "exactly": exactly}]}}, ClaimSpec, where="claim")
        given_input = AllocationInput(
            node=Node(NODE),
            claims=(ClaimToAllocate("d/c", spec),),
            classes={name: built_in_class(name) for name in INVENTORIES},
            slices=slices_of_pool(NODE, [devices_of_class(inventory) for inventory in INVENTORIES.values()]),
            usage=self.usage(),
        )
        outcome = allocate(given_input, COMPILER)
        if not isinstance(outcome, Allocated):
            return
        (result,) = outcome.results
        owner = self.owner(OwnerKind.CLAIM)
        claim_object = ApiObject(
            api_version="resource.k8s.io/v1",
            kind="ResourceClaim",
            metadata={"name": owner.name, "namespace": "default", "uid": owner.uid},
            spec={},
        )
        request = placement_request(claim_object, result, NODE)
        assert request is not None
        placed = self.place(request)
        # The allocator knows all that the ledger knows, so what it chooses is never refused.
        assert isinstance(placed, Placement), placed
        for granted in result.devices.results:
            if granted.share_id is not None:
                shares = self.consumed.setdefault(request.owner.key, {})
                shares[granted.device] = (
                    shares.get(granted.device, 0) + Quantity.parse(granted.consumed_capacity["bandwidth"]).units
                )

    def kubelet(self, device_class: str, start: int, count: int) -> None:
        """Choose as kubelet may: any of those listed as healthy."""
        own = f"topobus.dev/{device_class}"
        lists = plugin_lists(device_class, own, INVENTORIES[device_class], holders_of(self.ledger, device_class))
        healthy = [entry.id for entry in lists[own] if entry.is_healthy and not entry.is_held]
        chosen = tuple((healthy[start % len(healthy) :] + healthy)[:count]) if healthy else ()
        if chosen:
            refusal = self.adopt(
                structs.replace(self.owner(OwnerKind.DEVICE_PLUGIN), name=own),
                device_class,
                tuple(dict.fromkeys(chosen)),
            )
            # kubelet takes a refused Allocate for a failed pod: nothing that
            # it may choose is ever refused.
            assert refusal is None, refusal

    def classic(self, device_class: str, count: int) -> None:
        """Choose as the built-in classic driver does."""
        pools = gather_pools(slices_of_pool(NODE, [devices_of_class(INVENTORIES[device_class])]), Node(NODE), ALL_GATES)
        chosen = choose_on(Node(NODE), device_class, [Wanted(count)], pools, self.usage())
        if not isinstance(chosen, Refusal):
            devices = (DeviceRequest(device_class=device_class, count=count, names=chosen[0]),)
            request = PodRequest(
                owner=self.owner(OwnerKind.CLAIM),
                containers=(ContainerRequest(name="", devices=devices),),
                policy=Policy.NONE,
            )
            outcome = self.place(request)
            assert isinstance(outcome, Placement), outcome

    def check(self) -> None:
        """The law."""
        check_holders(self.ledger)
        holders: dict[str, list[bool]] = {}
        for allocation in self.ledger.allocations.values():
            for holding in allocation.holdings:
                for device_class, devices in holding.devices.items():
                    for device in devices:
                        holders.setdefault(device, []).append(device in holding.shared.get(device_class, ()))
        used: Counter[tuple[str, str]] = Counter()
        for device in holders:
            used.update({(use.counter_set, use.counter): use.amount for use in BY_NAME[device].consumes})
        assert {key: amount for key, amount in used.items() if amount > TOTALS[key]} == {}
        assert not [device for device, shares in holders.items() if BY_NAME[device].partition_of in holders]
        assert not [
            device
            for device, shares in holders.items()
            if len(shares) > 1 and not (all(shares) and BY_NAME[device].allows_multiple)
        ]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(steps, min_size=1, max_size=14))
def test_no_history_hands_out_what_overlaps(history: list[tuple[Any, ...]]) -> None:
    """Whoever asks, in whatever order: a part and its whole are never held at once, no counter is
    overdrawn, and shares have no whole beside them.
    """
    plane = Plane()
    for verb, *given_arguments in history:
        arguments: list[Any] = given_arguments
        if verb == "claim":
            plane.claim(*arguments)
        elif verb == "forged":
            (device_class, wanted), by_share = arguments
            plane.adopt(plane.owner(OwnerKind.CLAIM), device_class, tuple(sorted(wanted)), by_share=by_share)
        elif verb == "kubelet":
            plane.kubelet(*arguments)
        elif verb == "pod":
            device_class, count = arguments
            devices = (DeviceRequest(device_class=device_class, count=count),)
            plane.place(
                PodRequest(owner=plane.owner(OwnerKind.POD), containers=(ContainerRequest(name="c", devices=devices),))
            )
        elif verb == "named pod":
            (device_class, wanted), by_share = arguments
            devices = (
                DeviceRequest(
                    device_class=device_class, count=len(wanted), names=tuple(sorted(wanted)), by_share=by_share
                ),
            )
            plane.place(
                PodRequest(owner=plane.owner(OwnerKind.POD), containers=(ContainerRequest(name="c", devices=devices),))
            )
        elif verb == "classic":
            plane.classic(*arguments)
        elif plane.ledger.allocations:
            owners = sorted(plane.ledger.allocations)
            owner = plane.ledger.allocations[owners[arguments[0] % len(owners)]].owner
            plane.turn += 1
            step = transitions.release(plane.ledger, op_id=f"op-{plane.turn}", owner=owner, decision_id="d")
            assert not isinstance(step, Refusal)
            plane.ledger = step.ledger
        plane.check()


def test_claims_hold_shares_side_by_side_until_the_capacity_is_spent() -> None:
    """Three claims of 3 of 10 Gbit/s hold the NIC in the ledger, each by share.

    The fourth waits, and has it when one is released.
    """
    plane = Plane()
    for _ in range(4):
        plane.claim("nic", 1, 0, 3)
    shares = [
        key
        for key, allocation in plane.ledger.allocations.items()
        if allocation.holdings[0].shared == {"nic": ("nic-0",)}
    ]
    assert len(shares) == 3

    step = transitions.release(
        plane.ledger, op_id="r", owner=plane.ledger.allocations[shares[0]].owner, decision_id="d"
    )
    assert not isinstance(step, Refusal)
    plane.ledger = step.ledger
    plane.claim("nic", 1, 0, 3)

    assert len(plane.ledger.allocations) == 3
