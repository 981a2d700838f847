"""Place a pod on a node: all its containers, or none, with reasons.

A pure function: the same inputs give the same answer, so a decision event replays by calling
`place` again.

Containers are planned in kubelet's order (init containers and sidecars, then app containers), each
with one merge (scope container) or all with one merge of the pod's totals (scope pod). CPUs and
devices are taken inside the alignment first, then, where the policy allows it, outside. Pools are
resources of their own, as they are to kubelet (`resource_pools`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from topobus.engine.alignment.cpus.cpu_assignment import take_cpus
from topobus.engine.alignment.devices.device_choice import choose_devices
from topobus.engine.alignment.planning.backtracking import GaveUp, Steps, search
from topobus.engine.alignment.planning.claim_alignment import join_claims, leave_claims
from topobus.engine.alignment.planning.claims_only import by_count, explain_claims_only, share_faults
from topobus.engine.alignment.planning.demands import read_demands
from topobus.engine.alignment.planning.greedy import PlacementTask, place_greedily
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.node_view import cpu_name, cpu_of_name
from topobus.engine.alignment.planning.refusal_reasons import Conflict, explain_conflict
from topobus.engine.alignment.planning.resource_pools import (
    has_pools,
    named_by_class,
    placed_by_class,
    request_by_resource,
    view_by_resource,
)
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.outcome import Placement, Reason, Refusal, refuse
from topobus.values.request import OwnerKind, PodRequest, Policy, Scope
from topobus.values.view import NodeView, PlanMode

__all__ = ["place", "plan", "policy_of", "prefer"]

# Steps spent on finding out whether a pod that mode compatible refuses would fit
# otherwise, for the hint in the refusal.
_HINT_STEPS = 200


def place(view: NodeView, request: PodRequest) -> Placement | Refusal:
    """Place all containers of a pod, or explain why not and what would have to be freed.

    Shapes: view — by class, with the devices of the pod's claims held by the claims; request — as
            it came. The Placement has one entry for each container, in its order.
    Errors: raises nothing for any request. A Refusal has a reason for each fault, and `to_free` is
            proved by planning without these owners.
    Cost: one merge and one choice of devices for each container. A refusal up to 200 further plans,
            in mode corrected up to `search_steps` tries.
    Source: kubelet 1.36 cm/topologymanager/scope_{container,pod}.go; mode corrected:
    docs/adr/0009-upstreams-order-by-default.md.
    """
    request = named_by_class(view, request)
    if faults := share_faults(view, request):
        return Refusal(reasons=tuple(faults))
    if request.claims:
        outcome = place(*join_claims(view, request))
        return leave_claims(view, request, outcome) if isinstance(outcome, Placement) else outcome
    counted = by_count(view, request)
    if not has_pools(view):
        outcome = _place(counted, request)
    else:
        outcome = _place(view_by_resource(counted), request_by_resource(counted, request))
        outcome = placed_by_class(view, outcome) if isinstance(outcome, Placement) else outcome
    return outcome if isinstance(outcome, Placement) or counted is view else explain_claims_only(view, request, outcome)


def plan(view: NodeView, request: PodRequest, steps: Steps | None = None) -> Placement | Refusal | Conflict | GaveUp:
    """Place without searching for what would have to be freed, for a caller that tries many
    requests.

    Shapes: view, request — as for `place`; steps — the budget of the search in mode corrected,
            instead of the node's own.
    Result: a Refusal is a fault of the request itself, a Conflict is the reason of the first
            container that failed, GaveUp means that the budget was spent.
    Errors: raises nothing.
    Cost: as `place` without a refusal's plans.
    """
    request = named_by_class(view, request)
    if faults := share_faults(view, request):
        return Refusal(reasons=tuple(faults))
    if request.claims:
        joined = plan(*join_claims(view, request), steps)
        return leave_claims(view, request, joined) if isinstance(joined, Placement) else joined
    view = by_count(view, request)
    if not has_pools(view):
        return _plan(view, request, steps)
    outcome = _plan(view_by_resource(view), request_by_resource(view, request), steps)
    return placed_by_class(view, outcome) if isinstance(outcome, Placement) else outcome


def _place(view: NodeView, request: PodRequest) -> Placement | Refusal:
    outcome = _plan(view, request)
    if isinstance(outcome, Placement | Refusal):
        return outcome
    is_corrected = view.options.mode is PlanMode.CORRECTED
    # One budget for all that is tried to find out what to free: the answer must not take a
    # hundred times as long as the plan.
    spare = Steps(view.options.search_steps if is_corrected else 0)
    if isinstance(outcome, GaveUp):
        spare = Steps(0)
    refusal = explain_conflict(
        view,
        request,
        outcome if isinstance(outcome, Conflict) else outcome.conflict,
        lambda other: isinstance(_plan(other, request, spare), Placement),
    )
    if isinstance(outcome, GaveUp):
        return structs.replace(refusal, reasons=(outcome.reason,))
    if not is_corrected and _would_fit_otherwise(view, request):
        message = (
            "another order or choice of hints and devices would fit: mode corrected finds it (alignment.mode of "
            "the topology service)"
        )
        return structs.replace(
            refusal, reasons=(*refusal.reasons, Reason(code="fits-in-corrected-mode", message=message))
        )
    return refusal


def _plan(view: NodeView, request: PodRequest, steps: Steps | None = None) -> Placement | Refusal | Conflict | GaveUp:
    demands = read_demands(request)
    if isinstance(demands, Refusal):
        return demands
    if request.owner.key in {
        *view.held_cpus,
        *view.held_memory,
        *(owner for held in view.held_devices.values() for owner in held.values()),
    }:
        message = f"{request.owner} is placed already; release it before placing it again"
        return refuse("already-placed", message, owner=request.owner.key)
    forbidden = _forbidden(view, request) or _too_many_nodes(view, policy_of(view, request))
    if forbidden:
        return Refusal(reasons=tuple(forbidden))
    task = PlacementTask(
        demands=demands,
        policy=policy_of(view, request),
        is_pod=(request.scope or view.options.scope) is Scope.POD,
        locality=request.locality,
    )
    greedy = place_greedily(NodeAvailability(view), task)
    if isinstance(greedy, Placement) or view.options.mode is PlanMode.COMPATIBLE:
        return greedy
    return search(view, task, greedy, steps or Steps(view.options.search_steps))


def _would_fit_otherwise(view: NodeView, request: PodRequest) -> bool:
    if len(request.containers) < 2:
        return False
    corrected = structs.replace(view, options=structs.replace(view.options, mode=PlanMode.CORRECTED))
    return isinstance(_plan(corrected, request, Steps(min(_HINT_STEPS, view.options.search_steps))), Placement)


def _forbidden(view: NodeView, request: PodRequest) -> list[Reason]:
    """List what the pod asks for itself and the node does not allow.

    Policy none is never forbidden to a claim: its devices are chosen already, and a claim that asks
    for no alignment comes with this policy.
    """
    options = view.options
    if options.allow_request_policy:
        return []
    is_plain_claim = request.owner.kind is OwnerKind.CLAIM and request.policy is Policy.NONE
    asked = [
        ("policy", None if is_plain_claim else request.policy, options.policy),
        ("scope", request.scope, options.scope),
        ("locality", ",".join(str(locality) for locality in request.locality) or None, ""),
    ]
    return [
        Reason(
            code="policy-forbidden",
            message=f"{request.owner} asks for {what} {wanted}, and this node allows no {what} but its "
            f"own{f', {own}' if own else ''}",
            facts={"what": what, "wanted": str(wanted), "node": str(own)},
        )
        for what, wanted, own in asked
        if wanted is not None and wanted != own
    ]


def _too_many_nodes(view: NodeView, policy: Policy) -> list[Reason]:
    """Refuse pods on a machine with more NUMA nodes than the operator allows.

    kubelet does not start on such a machine.
    """
    limit, nodes = view.options.max_allowable_numa_nodes, len(view.numa_nodes)
    if not limit or nodes <= limit or policy is Policy.NONE:
        return []
    message = (
        f"this machine has {nodes} NUMA nodes and max-allowable-numa-nodes is {limit}: raise it, set it to 0, or "
        "use policy none"
    )
    return [Reason(code="too-many-numa-nodes", message=message, facts={"nodes": nodes, "limit": limit})]


def policy_of(view: NodeView, request: PodRequest) -> Policy:
    """Return the policy that applies: the request's, else the node's.

    A claim whose devices are all chosen already is aligned as well as possible and never refused,
    because its allocation is made.
    """
    if request.policy is not None:
        return request.policy
    is_chosen = request.owner.kind is OwnerKind.CLAIM and all(
        not container.cpus and all(device.names for device in container.devices) for container in request.containers
    )
    return Policy.BEST_EFFORT if is_chosen and view.options.policy is not Policy.NONE else view.options.policy


def prefer(
    view: NodeView,
    device_class: str,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    *,
    withheld: Collection[str] = (),
    is_from_end: bool = False,
) -> tuple[tuple[str, ...], str]:
    """Choose the best `size` of the available devices, and explain why: the answer to
    GetPreferredAllocation.

    Shapes: available, must_include — device names of the class, in any order; withheld — free
            devices that are about to be another owner's, taken after all others; is_from_end — of
            equally aligned devices the largest names, for a caller beside one that takes the
            smallest.
    Result: `size` names, those of `must_include` first. Fewer only when fewer are available. Names
            that the inventory does not know come last.
    Errors: raises nothing and never fails: kubelet would refuse the pod.
    Cost: one choice of devices (`choose_devices`).
    """
    musts = tuple(dict.fromkeys(must_include))
    pool = tuple(sorted(set(available) - set(musts)))
    if size <= len(musts) or not pool:
        return musts, "only what must be included" if musts else "nothing is available"
    if device_class == CPU_CLASS:
        return _prefer_cpus(view, pool, musts, size, withheld, is_from_end=is_from_end)
    node = NodeAvailability(view)
    devices = node.devices.get(device_class, {})
    held_names = _held_by_live_owners(view, device_class)
    # kubelet does not know of pods placed without it, nor of devices that became unhealthy a moment
    # ago: such devices come after all others.
    free = [
        devices[name] for name in pool if name in devices and devices[name].is_allocatable and name not in held_names
    ]
    fit = [device for device in free if device.name not in withheld]
    kept = [devices[name] for name in musts if name in devices]
    strangers = len(musts) - len(kept)
    choice = choose_devices(
        fit, node.sites(device_class), size - strangers, must_include=kept, free=free, is_from_end=is_from_end
    )
    chosen = [*musts, *(name for name in choice.names if name not in musts)]
    rest = sorted((name for name in pool if name not in chosen), reverse=is_from_end)
    rest.sort(key=lambda name: (name in held_names, name not in devices, name in withheld))
    chosen += rest[: max(0, size - len(chosen))]
    why = f"widest bottleneck {choice.bottleneck.value}" if choice.bottleneck is not None else "least fragmentation"
    if is_from_end and len(choice.names) == 1:
        return tuple(chosen), "the last by name, since claims are given the first"
    tied = f", {choice.tied} other choices tied and lost by name" if choice.tied else ""
    return tuple(chosen), f"{why}{tied}"


def _held_by_live_owners(view: NodeView, device_class: str) -> set[str]:
    """Return the devices of live pods and claims.

    Devices of kubelet's own allocations are free when kubelet offers them again.
    """
    stale = (f"{OwnerKind.DEVICE_PLUGIN}/", f"{OwnerKind.CONTAINER}/")
    if device_class == CPU_CLASS:
        return {cpu_name(cpu) for owner, cpus in view.held_cpus.items() if not owner.startswith(stale) for cpu in cpus}
    return {name for name, owner in view.held_devices.get(device_class, {}).items() if not owner.startswith(stale)}


def _prefer_cpus(
    view: NodeView,
    pool: Sequence[str],
    musts: tuple[str, ...],
    size: int,
    withheld: Collection[str],
    *,
    is_from_end: bool,
) -> tuple[tuple[str, ...], str]:
    """Choose whole free cores first, as the static policy packs."""
    node = NodeAvailability(view)
    held_names = _held_by_live_owners(view, CPU_CLASS)
    wanted = size - len(musts)
    ids = {
        name: cpu
        for name in pool
        if (cpu := cpu_of_name(name)) is not None and cpu in node.online and name not in held_names
    }
    free = CpuSet.of(ids.values())
    offered = CpuSet.of(cpu for name, cpu in ids.items() if name not in withheld)
    if len(offered) < min(wanted, len(free)):
        offered = free
    topology = node.topology.mirrored() if is_from_end else node.topology
    seen = node.topology.mirrored_cpus(offered) if is_from_end else offered
    taken = take_cpus(topology, seen, min(wanted, len(seen)), view.options.cpu) or CpuSet()
    taken = node.topology.mirrored_cpus(taken) if is_from_end else taken
    chosen = [*musts, *(cpu_name(cpu) for cpu in taken)]
    taken_names = set(chosen)
    rest = sorted(
        (name for name in pool if name not in taken_names),
        key=lambda name: (name in held_names, name in withheld, name),
    )
    chosen += rest[: max(0, size - len(chosen))]
    return tuple(chosen), "whole free cores first"
