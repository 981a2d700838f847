"""Aligns a pod together with its claims: which claims take part, and what the node's alignment
engine objects to in a candidate allocation.

The controller checks candidates with a request that names the pod's claims, and the node places the
pod by the same request, so both ask the same engine the same question. Pods without policy, scope
or locality in their annotations do not reach this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from topobus.engine.alignment.planning.claim_alignment import with_claim_held
from topobus.engine.alignment.planning.node_view import cpu_of_name
from topobus.engine.alignment.planning.placement import place, plan
from topobus.engine.alignment.planning.resource_pools import offered_part
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.claims.objects import Pod
from topobus.formats.kubernetes.resource import AllocationResult
from topobus.values.dra_names import CPU_CLASS, class_of_device, node_of_pool
from topobus.values.idset import CpuSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ClaimUse, PodRequest, Scope
from topobus.values.view import NodeView

__all__ = ["aligned_pod_request", "claim_uses", "groups_of", "objection_of_pod", "own_request", "with_claims"]


def own_request(pod: Pod) -> PodRequest | None:
    """Read a pod's request to the node's topology besides its claims. None when there is none.

    Errors: raises ContractError.
    """
    request = pod.request
    asks = any(
        container.cpus or container.devices or container.memory_bytes or container.hugepages
        for container in request.containers
    )
    return request if asks else None


def aligned_pod_request(pod: Pod, owners: Mapping[str, str]) -> PodRequest | None:
    """Read a pod's alignment request with its claims named.

    None when it has no claim, or no such request.

    Shapes: owners — names of the pod's `resourceClaims` entries to their claims' owner keys.
    Errors: raises ContractError for a pod that cannot be read.
    """
    if not owners:
        return None
    request = pod.request
    if request.policy is None and request.scope is None and not request.locality:
        return None
    return structs.replace(request, claims=claim_uses(pod, owners))


def with_claims(wanted: PodRequest | None, pod: Pod, owners: Mapping[str, str]) -> PodRequest | None:
    """Add the pod's claims to the pod's own request, so that the node places it beside their
    devices, when the pod wishes for its alignment.

    Shapes: owners — as in `aligned_pod_request`, of the claims that are allocated.
    Errors: raises ContractError.
    """
    wished = aligned_pod_request(pod, owners) if wanted is not None else None
    return structs.replace(wanted, claims=wished.claims) if wanted is not None and wished is not None else wanted


def claim_uses(pod: Pod, owners: Mapping[str, str]) -> tuple[ClaimUse, ...]:
    """List which containers use which claim, in the pod's order.

    Errors: raises ContractError.
    """
    spec = pod.spec
    users: dict[str, list[str]] = {entry: [] for entry in owners}
    for container in (*spec.init_containers, *spec.containers):
        for use in container.resources.claims:
            if use.name in users and container.name not in users[use.name]:
                users[use.name].append(container.name)
    return tuple(ClaimUse(owner_key=owners[entry], containers=tuple(containers)) for entry, containers in users.items())


def groups_of(pod: PodRequest, owner_keys: Sequence[str], scope: Scope) -> tuple[frozenset[int], ...]:
    """Group the claims that must lie in one place together: all of a pod that is aligned as a
    whole, else those that share a container.

    Shapes: owner_keys — the claims to allocate; result — positions in it, the group with the first
            one first.
    """
    if scope is Scope.POD:
        return (frozenset(range(len(owner_keys))),)
    users = {use.owner_key: frozenset(use.containers) for use in pod.claims}
    groups: list[tuple[frozenset[int], frozenset[str]]] = []
    for place_, key in enumerate(owner_keys):
        members, containers = frozenset({place_}), users.get(key, frozenset())
        if not containers:
            continue
        for other, other_containers in [group for group in groups if not group[1].isdisjoint(containers)]:
            groups.remove((other, other_containers))
            members, containers = members | other, containers | other_containers
        groups.append((members, containers))
    return tuple(sorted((members for members, _ in groups), key=min))


def objection_of_pod(
    view: NodeView, pod: PodRequest, owner_keys: Sequence[str], results: Sequence[AllocationResult]
) -> str | None:
    """Return the engine's objection to a pod whose claims get these allocations.

    None when it admits all of it: devices, CPUs and memory together.
    """
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
        device_class = class_of_device(granted_device.driver, granted_device.device)
        if device_class is None or node_of_pool(granted_device.pool) != node or granted_device.admin_access:
            continue
        cpu = cpu_of_name(granted_device.device) if device_class == CPU_CLASS else None
        if cpu is not None:
            cpus = [*cpus, cpu]
        else:
            devices[device_class] = (*devices.get(device_class, ()), granted_device.device)
    return devices, CpuSet.of(cpus)
