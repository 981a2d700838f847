"""Decides about pods of this node that wait for claims: which devices to withhold for them, what
the obstacle is, and when kubelet should retry.

Pods and claims are in Kubernetes' wire shape. Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.claims.rules.claim_allocation import allocation_of
from topobus.values.device import Inventory
from topobus.values.health import HealthState
from topobus.values.names import ClaimUid, PodUid
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind

__all__ = [
    "NodePod",
    "PodWait",
    "WaitingClaim",
    "due_at",
    "in_the_way",
    "obstacle_of",
    "pod_of",
    "waiting_claim",
    "withheld_devices",
]

_OVER = ("Succeeded", "Failed")
# In seconds. kubelet prepares a pod's claims within moments of the binding. A pod for which it has
# not after this time (it called a gateway that is gone) is annotated.
_UNASKED_S = 1.5
# Seconds between the next tries after a failure whose cause is not visible here (a driver's own),
# and how many of them there are before they become rarer.
_STEADY_S, _STEADY_TRIES = 2.0, 10
_LONGEST_S = 30.0
# In seconds: kubelet has to record its own failure first.
_AFTER_FAILURE_S = 0.2


class NodePod(Struct, frozen=True, kw_only=True):
    """One pod that is bound to this node and has not ended."""

    namespace: str
    name: str
    uid: PodUid
    claims: tuple[str, ...]
    """Names of its claims, as far as they are known yet."""
    resource_claim: str = ""
    """The one of `claims` that the scheduler made for the pod's resources. Empty: the pod names
    no resource that claims serve."""
    has_controller: bool = False
    """Whether a controller recreates the pod when it is gone."""


class WaitingClaim(Struct, frozen=True, kw_only=True):
    """A claim that is allocated on this node and not prepared yet."""

    owner: Owner
    held: dict[str, tuple[str, ...]]
    """Class to devices that it will hold, without those with admin access."""
    by_share: dict[str, tuple[str, ...]] = {}
    classes: tuple[str, ...] = ()
    """Of our drivers that have to prepare it."""
    tolerated: frozenset[str] = frozenset()
    """Class and device that the claim takes even when they are unhealthy."""

    @property
    def uid(self) -> ClaimUid:
        """The uid of the claim."""
        return ClaimUid(self.owner.uid)


class PodWait(Struct, frozen=True, kw_only=True):
    """How long a pod has waited and what was tried, in seconds of one clock."""

    since_s: float
    """When it was seen first, or when this gateway could first have served it."""
    failed_s: float | None = None
    """End of the last try that failed. None: kubelet has not called this process for it."""
    nudged_s: float | None = None
    tries: int = 0
    """How often kubelet was made to process it since the last obstacle."""


def pod_of(pod: ApiObject) -> NodePod | None:
    """Read a pod. None when it has ended, is being deleted, or has no claim."""
    metadata, status = pod.metadata, pod.status
    if status.get("phase") in _OVER or metadata.get("deletionTimestamp"):
        return None
    made = {
        entry.get("name"): entry.get("resourceClaimName") for entry in _mappings(status.get("resourceClaimStatuses"))
    }
    names = [
        entry.get("resourceClaimName") or made.get(entry.get("name"))
        for entry in _mappings(pod.spec.get("resourceClaims"))
    ]
    extended = status.get("extendedResourceClaimStatus")
    resource_claim = extended.get("resourceClaimName") if isinstance(extended, Mapping) else None
    names.append(resource_claim)
    claims = tuple(sorted({name for name in names if isinstance(name, str) and name}))
    if not claims:
        return None
    return NodePod(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=PodUid(str(metadata.get("uid", ""))),
        claims=claims,
        resource_claim=resource_claim if isinstance(resource_claim, str) else "",
        has_controller=any(entry.get("controller") is True for entry in _mappings(metadata.get("ownerReferences"))),
    )


def waiting_claim(
    claim: ApiObject | None,
    node: str,
    parts: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    cpus: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> WaitingClaim | None:
    """Read which devices of this node a claim is about to have.

    Shapes: parts — shape of this node to its devices; cpus — shape to how many CPUs it has of which of them.
    None when there are none of ours, or the claim cannot be read (its preparation will report why).
    """
    if claim is None:
        return None
    name, namespace, uid = (str(claim.metadata.get(key, "")) for key in ("name", "namespace", "uid"))
    read = allocation_of(claim, namespace=namespace, name=name, uid=ClaimUid(uid), node=node, parts=parts, cpus=cpus)
    if isinstance(read, Refusal):
        return None
    return WaitingClaim(
        owner=Owner(kind=OwnerKind.CLAIM, namespace=namespace, name=name, uid=uid),
        held=read.held,
        by_share=read.by_share,
        classes=read.classes,
        tolerated=frozenset(read.tolerated),
    )


def withheld_devices(claims: Iterable[WaitingClaim]) -> dict[str, dict[str, Owner]]:
    """List what claims are about to hold: class to device to claim.

    When two claims want a device, the first by key gets it.
    """
    owners: dict[str, dict[str, Owner]] = {}
    for claim in sorted(claims, key=lambda claim: claim.owner.key):
        for device_class, names in claim.held.items():
            for name in names:
                owners.setdefault(device_class, {}).setdefault(name, claim.owner)
    return owners


def in_the_way(claim: WaitingClaim, holders: Mapping[str, Mapping[str, Owner]]) -> dict[str, Owner]:
    """List the devices of a claim that another owner holds, sorted, with the owner.

    Shapes: holders — class to device to owner.
    """
    owners: dict[str, Owner] = {}
    for device_class, names in sorted(claim.held.items()):
        for name in names:
            holder = holders.get(device_class, {}).get(name)
            is_share = name in claim.by_share.get(device_class, ())
            if (
                holder is not None
                and holder.key != claim.owner.key
                and not (is_share and holder.kind is OwnerKind.CLAIM)
            ):
                owners[name] = holder
    return owners


def obstacle_of(
    claim: WaitingClaim,
    *,
    holders: Mapping[str, Mapping[str, Owner]],
    inventories: Mapping[str, Inventory],
    silent: Collection[str],
    is_connected: bool,
) -> str:
    """Return what prevents a claim's preparation, as far as it is known here.

    Empty when there is no obstacle.

    Shapes: holders — class to device to owner; silent — classes whose service does not answer.
    """
    if not is_connected:
        return "NATS is not connected"
    for device_class in claim.classes:
        if device_class in silent:
            return f"the {device_class} service does not answer"
    for name, holder in in_the_way(claim, holders).items():
        return f"{holder} holds {name}"
    for device_class, names in sorted(claim.held.items()):
        inventory = inventories.get(device_class)
        for name in names:
            device = inventory.device(name) if inventory is not None else None
            if device is None:
                return f"{name} is not in the inventory"
            is_sick = device.health.state is HealthState.UNHEALTHY
            if is_sick and name not in claim.tolerated:
                return f"{name} is {device.health.state}"
            if device.maintenance is not None:
                return f"{name} is {device.why_not}"
    return ""


def due_at(wait: PodWait) -> float:
    """Return when kubelet should process a pod without an obstacle again, in seconds of the same
    clock.

    Soon after the first failure, then at regular intervals, because the end of a driver's own
    problem is not visible here. A pod that keeps failing is tried at growing intervals.
    """
    if wait.nudged_s is None:
        return wait.since_s + _UNASKED_S if wait.failed_s is None else wait.failed_s + _AFTER_FAILURE_S
    beyond = max(0, wait.tries - _STEADY_TRIES)
    pause_s = min(_STEADY_S * 2.0 ** min(beyond, 10), _LONGEST_S)
    return max(wait.nudged_s, wait.failed_s or 0.0) + pause_s


def _mappings(entries: object) -> list[Mapping[str, object]]:
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list | tuple) else []
