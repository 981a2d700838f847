"""The ledger: which owner holds what on one node.

Only `topology` writes it, by compare-and-set on the bucket's revision. This module has the values.
The transitions (reserve, commit, adopt, release) are in `topobus.engine.ledger.transitions`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from topobus.values.device_sharing import HeldShare
from topobus.values.health import DeviceHealth
from topobus.values.idset import CpuSet
from topobus.values.maintenance import DeviceOperation
from topobus.values.names import Generation
from topobus.values.outcome import MemoryBlock, Placement, Refusal
from topobus.values.request import Owner, OwnerKind, PodRequest
from topobus.values.view import NodeView

__all__ = [
    "Adoption",
    "Allocation",
    "AllocationPhase",
    "Holders",
    "Holding",
    "Ledger",
    "OperationRecord",
    "PendingDecision",
    "changed_owners",
]


class AllocationPhase(StrEnum):
    """The phase of an allocation. In both phases it holds its devices."""

    RESERVED = "reserved"
    COMMITTED = "committed"


class Holding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one container (or a claim, under the empty name) of an owner holds."""

    container: str = ""
    devices: dict[str, tuple[str, ...]] = {}
    """Class to device names, sorted. CPUs are in `cpus`, not here."""
    cpus: CpuSet = CpuSet()
    memory_bytes: int = 0
    memory: tuple[MemoryBlock, ...] = ()
    """Memory by NUMA node, where the node aligns memory."""
    shared: dict[str, tuple[str, ...]] = {}
    """Those of `devices` that the owner has a share of, by class. Others may also hold a share of
    them, but none the whole."""
    shares: dict[str, dict[str, HeldShare]] = {}
    """How much the owner has of those of `shared` whose amounts are known: class to device to what
    it has."""
    groups: dict[str, CpuSet] = {}
    """Those of `cpus` that were chosen out of a group of CPUs, by the group's device name."""


class Allocation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one owner holds."""

    owner: Owner
    phase: AllocationPhase = AllocationPhase.COMMITTED
    holdings: tuple[Holding, ...] = ()
    decision_id: str = ""
    is_prepared: bool = False
    """True from the adoption of a claim until the gateway has undone it: containers may be using
    the devices, so only the gateway frees them."""
    pods: tuple[Owner, ...] = ()
    """The pods that use it, sorted, where the owner does not name them: those of a claim, and the
    pod of kubelet's Allocate, which kubelet names only afterwards, by PodResources. A pod that only
    kubelet has named has no uid. They hold nothing themselves."""
    container: str = ""
    """The one container of `pods` that uses a claim or an allocation of kubelet's; empty: not named
    yet, or several."""

    @property
    def user(self) -> Owner | None:
        """The pod for which kubelet has allocated, where it is known. None for any other owner."""
        return self.pods[0] if self.pods and self.owner.kind is OwnerKind.DEVICE_PLUGIN else None

    @property
    def shown(self) -> Owner:
        """The owner to show to people: the pod where it is known, else the owner itself."""
        return self.user or self.owner

    @property
    def cpus(self) -> CpuSet:
        """All CPUs that the owner holds."""
        held = CpuSet()
        for holding in self.holdings:
            held |= holding.cpus
        return held

    @property
    def devices(self) -> dict[str, tuple[str, ...]]:
        """Class to device names over all containers, sorted, each once. CPUs are in `cpus`."""
        by_class: dict[str, set[str]] = {}
        for holding in self.holdings:
            for device_class, names in holding.devices.items():
                by_class.setdefault(device_class, set()).update(names)
        return {device_class: tuple(sorted(names)) for device_class, names in sorted(by_class.items())}


class Adoption(Struct, frozen=True, kw_only=True):
    """What kubelet or a claim's status has decided, to be written into the ledger."""

    owner: Owner
    devices: dict[str, tuple[str, ...]]
    """Class to device names (CPUs also by their device names)."""
    is_shared: bool = False
    """True for admin access: nothing is held."""
    is_prepared: bool = False
    """True: containers may use the devices from now on, so they stay held until a `release` with
    `is_undone`."""
    shared: dict[str, tuple[str, ...]] = {}
    """Those of `devices` of which the owner has a share (consumable capacity). Others may also have
    a share, but none the whole."""
    shares: dict[str, dict[str, HeldShare]] = {}
    """How much the owner has of those of `shared`: class to device to its amounts, and the replicas
    that kubelet chose."""
    memory: tuple[MemoryBlock, ...] = ()
    """Memory by NUMA node that goes with it."""
    container: str = ""
    """The container that holds it, where that is known."""
    pods: tuple[Owner, ...] = ()
    """The pods that use the devices, where the owner does not name them; 256 at most."""
    group_cpus: dict[str, int] = {}
    """Those of `devices` that are groups of CPUs, with how many the owner has of each; which, the
    ledger's writer chooses."""


class PendingDecision(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a decision event still needs.

    Kept with the effect until the event is out, so that a crash in between loses nothing of it.
    """

    owner: Owner
    time: str
    """RFC 3339, UTC: when it was decided."""
    ledger_sequence: int
    request: PodRequest | None = None
    view: NodeView | None = None
    user: Owner | None = None
    """The pod that used what is released, where the owner does not name it."""
    operation: DeviceOperation | None = None
    """What an operator wants of one device."""
    health: DeviceHealth | None = None
    """That device's health at the time."""


class OperationRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored answer of one operation, returned again when the same operation is requested
    again.
    """

    verb: str
    """`place`, `adopt`, `commit` or `release`, or what an operator does with a device."""
    owner_key: str
    decision_id: str = ""
    outcome: Placement | Refusal | None = None
    """The answer; None for an adoption that went well and for a release. Old records drop it: what
    was placed is in the allocation."""
    devices: dict[str, tuple[str, ...]] = {}
    """What a release freed: class to device names, CPUs by device name."""
    displaced: tuple[Owner, ...] = ()
    """Owners whose holding gave way to an adoption."""
    pending: PendingDecision | None = None
    number: int = 0
    """The ledger's sequence that the operation made: its age among the others."""
    is_announced: bool = False
    """True once the decision event is known to be in its stream; a start emits what is missing,
    once."""


class Holders(Struct, frozen=True, kw_only=True):
    """The owners and what they hold on one node: all of a ledger that its readers need.

    `epoch` changes when the store was lost and the ledger rebuilt. `sequence` grows with every
    write.
    """

    node: str
    format: Literal[1] = 1
    """Raised when an earlier release would misread this or drop what must be kept. It refuses the
    whole ledger then, and writes nothing."""
    epoch: Generation = 1
    sequence: Generation = 0
    allocations: dict[str, Allocation] = {}
    """Owner key to allocation."""


class Ledger(Holders, frozen=True, kw_only=True):
    """One node's ledger, as its writer keeps it.

    The stored answers are most of its size, so a service that only follows it reads it as
    `Holders`.
    """

    operations: dict[str, OperationRecord] = {}
    """Operation id to stored answer; the newest 256 (by `number`) are kept."""
    disbelieved: tuple[int, ...] = ()
    """Newest revisions of the bucket that somebody else wrote and that were put back, so that a
    later start does not begin with one of them."""


def changed_owners(before: Holders, after: Holders) -> frozenset[str]:
    """List the owners whose allocation is not the same object in both, including owners that only
    one of the two has.

    A transition, and a decoder of a ledger, keep the allocations that they do not change. So a
    result that depends only on those need not be computed again.
    Shapes: result — keys. An allocation that is equal but another object counts as changed, which
            costs time and nothing else.
    Cost: O(owners), without a look into an allocation.
    """
    old, new = before.allocations, after.allocations
    return frozenset(
        [
            *(key for key, allocation in new.items() if old.get(key) is not allocation),
            *(key for key in old if key not in new),
        ]
    )
