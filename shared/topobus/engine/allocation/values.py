"""The values of one allocation: its input and its four possible outcomes.

Frozen. `search` computes one from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    DeviceClassSpec,
    GrantedDevice,
)
from topobus.values.idset import CpuSet
from topobus.values.outcome import Reason
from topobus.values.quantity import Quantity
from topobus.values.view import CoreView, CpuOptions

if TYPE_CHECKING:
    from topobus.engine.allocation.pools import Pool, Slice

__all__ = [
    "ALL_GATES",
    "Allocated",
    "AllocationInput",
    "ClaimToAllocate",
    "CpuPolicy",
    "DeviceId",
    "Fault",
    "Gate",
    "GaveUp",
    "Mode",
    "NoFit",
    "Node",
    "Outcome",
    "PoolId",
    "Usage",
    "node_of",
]


class Gate(StrEnum):
    """Feature gates of Kubernetes that change what an allocation may use.

    With a gate off the field is an error or ignored, as upstream has it.
    """

    ADMIN_ACCESS = "DRAAdminAccess"
    PRIORITIZED_LIST = "DRAPrioritizedList"
    PARTITIONABLE_DEVICES = "DRAPartitionableDevices"
    DEVICE_TAINTS = "DRADeviceTaints"
    BINDING_CONDITIONS = "DRADeviceBindingConditions+DRAResourceClaimDeviceStatus"
    CONSUMABLE_CAPACITY = "DRAConsumableCapacity"
    LIST_ATTRIBUTES = "DRAListTypeAttributes"


ALL_GATES = frozenset(Gate)


class Mode(StrEnum):
    """Whether to answer as upstream does where upstream has a defect, or as it should."""

    COMPATIBLE = "compatible"
    CORRECTED = "corrected"


class PoolId(NamedTuple):
    """A pool by its driver and name, because two drivers may use one name."""

    driver: str
    pool: str

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}"


class DeviceId(NamedTuple):
    """A device in its pool."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return f"{self.driver}/{self.pool}/{self.device}"

    @classmethod
    def of(cls, granted: GrantedDevice) -> DeviceId:
        """Name the device that an allocation gives."""
        return cls(granted.driver, granted.pool, granted.device)


@dataclass(frozen=True)
class CpuPolicy:
    """How a node takes exclusive CPUs: where they are, the static policy's options, and those
    reserved for the system.
    """

    cores: tuple[CoreView, ...]
    options: CpuOptions
    reserved: CpuSet


@dataclass(frozen=True)
class Node:
    """The node to allocate for."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: CpuPolicy | None = None
    """None when the node has published no machine: then its CPUs are given in the order in which
    they are published."""


@dataclass(frozen=True)
class ClaimToAllocate:
    """A claim, named for messages (`default/fast`)."""

    name: str
    spec: ClaimSpec
    is_one_of_several: bool = False
    """Whether messages must name the claim."""
    outside: Mapping[DeviceId, str] = field(default_factory=dict)
    """Devices that lie outside of where this claim wishes to be, and where that is."""


@dataclass(frozen=True)
class Usage:
    """The devices in use: whole devices with their holder, and amounts of devices that are shared
    by capacity.
    """

    holders: Mapping[DeviceId, str] = field(default_factory=dict)
    """Device to a name for people: `claim default/fast`."""
    consumed: Mapping[DeviceId, Mapping[str, Quantity]] = field(default_factory=dict)
    excluded: Mapping[DeviceId, str] = field(default_factory=dict)
    """Devices that these claims must not get for another reason, and that reason."""


@dataclass(frozen=True)
class AllocationInput:
    """All that an allocation on one node depends on. The same input gives the same outcome."""

    node: Node
    claims: tuple[ClaimToAllocate, ...]
    classes: Mapping[str, DeviceClassSpec]
    slices: tuple[Slice, ...] = ()
    pools: tuple[Pool, ...] | None = None
    """What `gather_pools` makes of the slices for this node and these gates, when the caller has it
    already."""
    usage: Usage = Usage()
    gates: frozenset[Gate] = ALL_GATES
    mode: Mode = Mode.COMPATIBLE
    keeps_counters: bool = True
    """Whether mode `compatible` keeps the counters of refused and undone devices, as upstream does before
    1.36.3 (kubernetes/kubernetes#140663)."""


@dataclass(frozen=True)
class Allocated:
    """Every claim got its devices: one result for each claim, in order.

    Share ids are numbered `SHARE-0`, because a pure function invents no UUID.
    """

    results: tuple[AllocationResult, ...]
    steps: int


@dataclass(frozen=True)
class NoFit:
    """This node cannot serve the claims now, with the reasons."""

    reasons: tuple[Reason, ...]
    steps: int


@dataclass(frozen=True)
class Fault:
    """The claims, classes or slices are wrong: the same allocation fails again until an object is
    changed.

    `is_local` means that only this node is affected (an invalid pool). Otherwise no other node
    needs to be tried.
    """

    reason: Reason
    steps: int
    is_local: bool = False


@dataclass(frozen=True)
class GaveUp:
    """The budget of steps ran out: neither a fit nor a refusal is known."""

    steps: int


Outcome = Allocated | NoFit | Fault | GaveUp


def node_of(name: str) -> Node:
    """Describe a node as node selectors see it when nothing but its name is known."""
    return Node(name, {"kubernetes.io/hostname": name})
