"""Answers about a cluster, as the controller's engine gives them from a snapshot and the command line
shows them: why a pod has no node, what is free, what would have to move, what would be otherwise.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from topobus.values.outcome import Reason

__all__ = [
    "Change",
    "Edit",
    "Evictions",
    "FitCount",
    "FreeAnswer",
    "FreeRow",
    "Holder",
    "Move",
    "MovePlan",
    "NodeGroup",
    "PodChange",
    "PodState",
    "Verdict",
]


class Edit(Struct, frozen=True, kw_only=True):
    """One object that a change touches."""

    kind: str
    namespace: str = ""
    name: str
    patch: dict[str, Any] | None = None
    """A merge patch (RFC 7386), by name for the containers of a pod: what `kubectl patch` takes. None
    deletes the object."""


class Change(Struct, frozen=True, kw_only=True):
    """A change with which the pod fits, as a search with it has shown."""

    code: str
    """What is changed: `class-name`, `claim-name`, `attribute-name`, `count`, `selector`,
    `constraint`, `device-toleration`, `toleration`, `node-label`, `node-affinity`, `node-uncordon`,
    `requests`, `remove-holders`."""
    message: str
    node: str
    """Where the pod fits then."""
    edits: tuple[Edit, ...]


class Holder(Struct, frozen=True, kw_only=True):
    """Who has devices that the pod could have had."""

    claim: str
    """`default/fast`."""
    pods: tuple[str, ...] = ()
    """Pods that have reserved the claim: `default/train`."""
    node: str
    devices: tuple[str, ...]


class NodeGroup(Struct, frozen=True, kw_only=True):
    """Nodes that the same reasons keep the pod off."""

    message: str
    count: int
    nodes: tuple[str, ...]
    """The first of them, by name."""
    reasons: tuple[Reason, ...]
    """Of the first node."""
    holders: tuple[Holder, ...] = ()
    """On the first node, for those that lack devices."""

    @property
    def lacks_devices(self) -> bool:
        """Whether only devices are missing: no rule keeps the pod off these nodes."""
        return "device_class" in self.reasons[0].facts


class Verdict(Struct, frozen=True, kw_only=True):
    """Why a pod has no node, or that it has one."""

    subject: str
    """`Pod default/train`."""
    code: str
    """`scheduled`, `ended`, `deleting`, `gated`, `not-ready`, `invalid`, `no-nodes`, `no-node-fits`,
    `fits`, or for a claim `allocated`, `unused`."""
    message: str
    node: str = ""
    """Where it is, or the first node on which it fits."""
    reasons: tuple[Reason, ...] = ()
    """What keeps it off every node."""
    groups: tuple[NodeGroup, ...] = ()
    """The nearest miss first."""
    changes: tuple[Change, ...] = ()
    """The smallest first."""
    remarks: tuple[Reason, ...] = ()
    """What the answer rests on: gates, what could not be read, what the scheduler says."""


class FreeRow(Struct, frozen=True, kw_only=True):
    """Devices that are alike."""

    group: dict[str, str]
    """What they have in common, by the groupings asked for."""
    nodes: int
    such_as: tuple[str, ...]
    devices: int
    free: int
    held: int
    tainted: int
    other: int
    on_one_node: int
    """The most free ones on one node; likewise on one NUMA node and under one PCIe root."""
    on_one_numa_node: int
    under_one_root: int
    capacity: dict[str, tuple[str, str]] = {}
    """Of devices that are shared: what is left and what there is, by name."""
    spares: int = 0
    """Withheld to replace a sick one."""
    drawing: str = ""
    """Of the devices of one node: a sign for each, in brackets those under one PCIe root, `|` between
    NUMA nodes. `□` is free, `■` held, `▨` tainted, `·` another."""

    @property
    def others_text(self) -> str:
        """Say what the devices are that are not free."""
        counts = (
            (self.held, "held"),
            (self.spares, "spare"),
            (self.tainted, "tainted"),
            (self.other, "used up or withheld"),
        )
        return ", ".join(f"{count} {word}" for count, word in counts if count) or "-"

    @property
    def together_text(self) -> str:
        """Say how many free devices lie together, and what is left of those that are shared.

        >>> row = FreeRow(
        ...     group={}, nodes=1, such_as=("n1",), devices=8, free=5, held=3, tainted=0, other=0,
        ...     on_one_node=5, on_one_numa_node=3, under_one_root=1,
        ... )
        >>> row.together_text
        '5 on a node, 3 on a NUMA node, no pair under a PCIe root'
        """
        words = [f"{self.on_one_node} on a node"] if self.free else []
        for count, place in ((self.on_one_numa_node, "on a NUMA node"), (self.under_one_root, "under a PCIe root")):
            if count == 1 and self.free > 1:
                words.append(f"no pair {place}")
            elif count:
                words.append(f"{count} {place}")
        words += [f"{name} {left} of {whole} left" for name, (left, whole) in self.capacity.items()]
        return ", ".join(words) or "-"


class FitCount(Struct, frozen=True, kw_only=True):
    """Nodes that take equally many more pods."""

    count: int
    """Pods, one after the other, as kube-scheduler would place them."""
    nodes: int
    such_as: tuple[str, ...]


class FreeAnswer(Struct, frozen=True, kw_only=True):
    """What is free, and how many more of a pod fit."""

    rows: tuple[FreeRow, ...] = ()
    fits: tuple[FitCount, ...] = ()
    verdict: Verdict | None = None
    """Why none fits, where pods were counted and none does."""


class Move(Struct, frozen=True, kw_only=True):
    """A pod that would go, and where its successor fits."""

    namespace: str
    name: str
    uid: str
    owner: str
    """`ReplicaSet/web`."""
    priority: int
    to: str


class MovePlan(Struct, frozen=True, kw_only=True):
    """What it takes for one more pod to fit."""

    node: str = ""
    """Where it fits then. Empty: no moves help."""
    moves: tuple[Move, ...] = ()
    """Empty with a node: it fits there already."""
    kept: dict[str, int] = {}
    """Why pods may not move, to how many."""
    why: str = ""
    """Why the pod fits nowhere, where no moves help."""
    is_complete: bool = True
    """False: on some node there were more sets of pods than are tried, and a smaller one may exist."""


class Evictions(Struct, frozen=True, kw_only=True):
    """What was done."""

    plan: MovePlan
    """As it was at first."""
    evicted: tuple[Move, ...] = ()
    stopped: str = ""
    """Why not all were evicted. Empty when the pod fits now."""


class PodState(Struct, frozen=True, kw_only=True):
    """How a pod is, or would be."""

    code: str
    """As a verdict has it; `fits` where it would be placed, `scheduled` where it is."""
    node: str = ""
    """Where it is; for one that would be placed the first node on which it fits, which need not be the
    one that kube-scheduler would choose."""
    message: str = ""


class PodChange(Struct, frozen=True, kw_only=True):
    """A pod that would be otherwise."""

    namespace: str
    name: str
    before: PodState
    after: PodState
