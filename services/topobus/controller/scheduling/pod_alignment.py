"""A pod and its claims as one alignment: which claims take part, and what the node's engine says to devices that they might get.

Flows in: a stored pod that wishes for policy, scope or locality in its annotations, and its claims. Flows out: the pod's request with its claims named in it, which
the controller judges candidates with and the node places the pod by: both ask the same engine the same question. A pod without wishes is no business of this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.miss_reasons import summarize
from topobus.domain.alignment.planning.claim_alignment import with_claim_held
from topobus.domain.alignment.planning.node_view import CPU_CLASS, cpu_of_name
from topobus.domain.alignment.planning.placement import place, plan
from topobus.domain.alignment.planning.resource_pools import offered_part
from topobus.domain.device import class_of_driver
from topobus.domain.idset import CpuSet
from topobus.domain.outcome import Placement, Refusal
from topobus.domain.request import ClaimUse, PodRequest, Scope
from topobus.domain.view import NodeView
from topobus.kubernetes.api.objects import metadata_of, name_of
from topobus.kubernetes.api.pod import PodSpec, pod_request
from topobus.kubernetes.api.resource import AllocationResult
from topobus.kubernetes.api.shape import read_as

__all__ = ["claim_uses", "groups_of", "objection_of_pod", "own_request", "wished_request", "with_claims"]


def own_request(pod: ApiObject) -> PodRequest | None:
    """Read what a pod asks of the node's topology besides its claims; None when that is nothing.

    Errors: raises ContractError.
    """
    request = pod_request(pod, uid=metadata_of(pod).uid)
    asks = any(container.cpus or container.devices or container.memory_bytes or container.hugepages for container in request.containers)
    return request if asks else None


def wished_request(pod: ApiObject, owners: Mapping[str, str]) -> PodRequest | None:
    """Read what a pod wishes, with its claims named; None when it has no claim, or says nothing of its alignment.

    Shapes: owners — names of the pod's `resourceClaims` entries to their claims' owner keys.
    Errors: raises ContractError for a pod that nobody can read.
    """
    if not owners:
        return None
    request = pod_request(pod, uid=metadata_of(pod).uid)
    if request.policy is None and request.scope is None and not request.locality:
        return None
    return structs.replace(request, claims=claim_uses(pod, owners))


def with_claims(wanted: PodRequest | None, pod: ApiObject, owners: Mapping[str, str]) -> PodRequest | None:
    """Have the node place what the pod itself asks beside what its claims hold already, when the pod wishes for its alignment.

    Shapes: owners — as in `wished_request`, of the claims that are allocated.
    Errors: raises ContractError.
    """
    wished = wished_request(pod, owners) if wanted is not None else None
    return structs.replace(wanted, claims=wished.claims) if wanted is not None and wished is not None else wanted


def claim_uses(pod: ApiObject, owners: Mapping[str, str]) -> tuple[ClaimUse, ...]:
    """Say which containers use which claim, in the pod's order.

    Errors: raises ContractError.
    """
    spec = read_as(pod.spec, PodSpec, where=f"{name_of(pod)}: spec")
    users: dict[str, list[str]] = {entry: [] for entry in owners}
    for container in (*spec.init_containers, *spec.containers):
        for use in container.resources.claims:
            if use.name in users and container.name not in users[use.name]:
                users[use.name].append(container.name)
    return tuple(ClaimUse(owner_key=owners[entry], containers=tuple(found)) for entry, found in users.items())


def groups_of(pod: PodRequest, owner_keys: Sequence[str], scope: Scope) -> tuple[frozenset[int], ...]:
    """Say which claims lie in one place together: all of a pod that is aligned as a whole, else those that share a container.

    Shapes: owner_keys — the claims to allocate; result — positions in it, the group with the first one first.
    """
    if scope is Scope.POD:
        return (frozenset(range(len(owner_keys))),)
    users = {use.owner_key: frozenset(use.containers) for use in pod.claims}
    groups: list[tuple[frozenset[int], frozenset[str]]] = []
    for place_, key in enumerate(owner_keys):
        mine, containers = frozenset({place_}), users.get(key, frozenset())
        if not containers:
            continue
        for other, theirs in [group for group in groups if not group[1].isdisjoint(containers)]:
            groups.remove((other, theirs))
            mine, containers = mine | other, containers | theirs
        groups.append((mine, containers))
    return tuple(sorted((members for members, _ in groups), key=min))


def objection_of_pod(view: NodeView, pod: PodRequest, owner_keys: Sequence[str], results: Sequence[AllocationResult]) -> str | None:
    """Say what the engine has against a pod whose claims get this; None when it admits it all: devices, CPUs and memory together."""
    for key, result in zip(owner_keys, results, strict=True):
        devices, cpus = _held_by(result, view.node)
        view = with_claim_held(view, key, devices, cpus)
    pod = offered_part(view, pod)
    if isinstance(plan(view, pod), Placement):
        return None
    judged = place(view, pod)  # the same, with its reasons
    return summarize(judged.reasons) if isinstance(judged, Refusal) else None


def _held_by(result: AllocationResult, node: str) -> tuple[dict[str, tuple[str, ...]], CpuSet]:
    devices: dict[str, tuple[str, ...]] = {}
    cpus: Collection[int] = []
    for granted_device in result.devices.results:
        device_class = class_of_driver(granted_device.driver)
        if device_class is None or granted_device.pool != node or granted_device.admin_access:
            continue
        cpu = cpu_of_name(granted_device.device) if device_class == CPU_CLASS else None
        if cpu is not None:
            cpus = [*cpus, cpu]
        else:
            devices[device_class] = (*devices.get(device_class, ()), granted_device.device)
    return devices, CpuSet.of(cpus)
