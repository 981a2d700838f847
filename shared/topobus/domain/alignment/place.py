"""Place a pod on a node: all its containers, or none, with reasons.

Flows in: a NodeView and a PodRequest. Flows out: a Placement, or a Refusal whose reasons a machine can act on. A pure function: the same inputs give the
same answer, so a decision event replays by calling `place` again.

Containers are planned in kubelet's order (init containers and sidecars, then app containers), each with one merge (scope container) or all with one
merge of the pod's totals (scope pod); CPUs and devices are taken inside the alignment first, then, where the policy allows it, outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topobus.domain.alignment.cpus import take_cpus
from topobus.domain.alignment.devices import choose_devices
from topobus.domain.alignment.family_merge import merge_opinions
from topobus.domain.alignment.locality import pairs_by_switch
from topobus.domain.alignment.merge import Merged
from topobus.domain.alignment.refusals import Conflict, explain_conflict
from topobus.domain.alignment.room import ResourceHints, Room, Taken
from topobus.domain.alignment.view import CPU_CLASS, cpu_name, cpu_of_name
from topobus.domain.alignment.wants import Want, pod_total, read_wants
from topobus.domain.hint import Hint
from topobus.domain.idset import CpuSet
from topobus.domain.outcome import ContainerPlacement, Placement, Reason, Refusal
from topobus.domain.request import OwnerKind, PodRequest, Policy, Scope
from topobus.domain.view import NodeView

__all__ = ["place", "plan", "policy_of", "prefer"]


def place(view: NodeView, request: PodRequest) -> Placement | Refusal:
    """Place all containers of a pod, or say why not and what would have to be freed."""
    outcome = plan(view, request)
    if isinstance(outcome, Conflict):
        return explain_conflict(view, request, outcome, lambda other: isinstance(plan(other, request), Placement))
    return outcome


def plan(view: NodeView, request: PodRequest) -> Placement | Refusal | Conflict:
    """Place without looking into what would have to be freed; a Refusal is a fault of the request itself."""
    wants = read_wants(request)
    if isinstance(wants, Refusal):
        return wants
    if request.owner.key in {*view.held_cpus, *(owner for held in view.held_devices.values() for owner in held.values())}:
        message = f"{request.owner} holds devices already; release it before placing it again"
        return Refusal(reasons=(Reason(code="already-placed", message=message, facts={"owner": request.owner.key}),))
    room = Room(view)
    policy = policy_of(view, request)
    if (request.scope or view.options.scope) is Scope.POD:
        total = pod_total(wants)
        aligned = _align(room, total, policy, is_pod=True)
        if isinstance(aligned, Conflict):
            return aligned
        shared = aligned
        return _fill(room, wants, lambda want: shared)
    return _fill(room, wants, lambda want: _align(room, want, policy, is_pod=False))


def policy_of(view: NodeView, request: PodRequest) -> Policy:
    """The policy that applies: the request's, else the node's; a claim whose devices are all chosen already is only recorded, never turned away."""
    if request.policy is not None:
        return request.policy
    is_chosen = request.owner.kind is OwnerKind.CLAIM and all(
        not one.cpus and all(device.names for device in one.devices) for one in request.containers
    )
    return Policy.BEST_EFFORT if is_chosen and view.options.policy is not Policy.NONE else view.options.policy


def prefer(
    view: NodeView, device_class: str, available: Sequence[str], must_include: Sequence[str], size: int
) -> tuple[tuple[str, ...], str]:
    """Choose the best `size` of the available devices, and say why; total: keeps what must be included, never fails.

    Names that the inventory does not know are used last, by name. Fewer come back only when fewer are available.
    """
    musts = tuple(dict.fromkeys(must_include))
    pool = tuple(sorted(set(available) - set(musts)))
    if size <= len(musts) or not pool:
        return musts, "only what must be included" if musts else "nothing is available"
    if device_class == CPU_CLASS:
        return _prefer_cpus(view, pool, musts, size)
    room = Room(view)
    known = room.devices.get(device_class, {})
    spoken_for = _spoken_for(view, device_class)
    # kubelet knows neither pods placed without it nor what went sick a moment ago: such devices come after all others.
    fit = [known[name] for name in pool if name in known and known[name].health.is_allocatable and name not in spoken_for]
    kept = [known[name] for name in musts if name in known]
    strangers = len(musts) - len(kept)
    choice = choose_devices(fit, room.sites(device_class), size - strangers, must_include=kept, free=fit)
    chosen = [*musts, *(name for name in choice.names if name not in musts)]
    rest = sorted((name for name in pool if name not in chosen), key=lambda name: (name in spoken_for, name not in known, name))
    chosen += rest[: max(0, size - len(chosen))]
    why = f"widest bottleneck {choice.bottleneck.value}" if choice.bottleneck is not None else "least fragmentation"
    tied = f", {choice.tied} other choices tied and lost by name" if choice.tied else ""
    return tuple(chosen), f"{why}{tied}"


def _spoken_for(view: NodeView, device_class: str) -> set[str]:
    """Devices of live pods and claims; what kubelet's own allocations hold is free when kubelet offers it again."""
    stale = f"{OwnerKind.DEVICE_PLUGIN}/"
    if device_class == CPU_CLASS:
        return {cpu_name(cpu) for owner, cpus in view.held_cpus.items() if not owner.startswith(stale) for cpu in cpus}
    return {name for name, owner in view.held_devices.get(device_class, {}).items() if not owner.startswith(stale)}


def _prefer_cpus(view: NodeView, pool: Sequence[str], musts: tuple[str, ...], size: int) -> tuple[tuple[str, ...], str]:
    """Whole free cores first, as the static policy packs."""
    room = Room(view)
    spoken_for = _spoken_for(view, CPU_CLASS)
    offered = CpuSet.of(cpu for name in pool if (cpu := cpu_of_name(name)) is not None and cpu in room.online and name not in spoken_for)
    taken = take_cpus(room.topology, offered, min(size - len(musts), len(offered)), view.options.cpu) or CpuSet()
    chosen = [*musts, *(cpu_name(cpu) for cpu in taken)]
    taken_names = set(chosen)
    rest = sorted((name for name in pool if name not in taken_names), key=lambda name: (name in spoken_for, name))
    chosen += rest[: max(0, size - len(chosen))]
    return tuple(chosen), "whole free cores first"


class _Aligned:
    """A merge and the hints that went into it."""

    __slots__ = ("merged", "policy", "records")

    def __init__(self, lists: Sequence[ResourceHints], merged: Merged, policy: Policy) -> None:
        self.records = tuple(one.record() for one in lists)
        self.merged = merged
        self.policy = policy


def _align(room: Room, want: Want, policy: Policy, *, is_pod: bool) -> _Aligned | Conflict:
    faults = room.faults(want)
    if faults:
        return Conflict(want=want, reasons=tuple(faults))
    lists = [] if policy is Policy.NONE else room.hint_lists(want, is_pod=is_pod)
    options = room.view.options
    merged = merge_opinions(
        [one.opinion for one in lists],
        room.view.numa_nodes,
        policy,
        distances=room.view.distances,
        prefer_closest=options.prefer_closest_numa_nodes,
    )
    if not merged.is_admitted:
        return Conflict(want=want, lists=tuple(lists), merged=merged, policy=policy)
    return _Aligned(lists, merged, policy)


def _fill(room: Room, wants: Sequence[Want], align: Callable[[Want], _Aligned | Conflict]) -> Placement | Conflict:
    placed: dict[int, ContainerPlacement] = {}
    for want in wants:
        aligned = align(want)
        if isinstance(aligned, Conflict):
            return aligned
        faults = room.faults(want)
        if faults:
            return Conflict(want=want, reasons=tuple(faults))
        hint = aligned.merged.hint
        taken = room.take(want, hint.nodes)
        if isinstance(taken, list):
            return Conflict(want=want, reasons=tuple(taken))
        placed[want.place] = ContainerPlacement(
            name=want.name,
            alignment=hint,
            cpus=taken.cpus,
            numa_nodes=taken.numa_nodes,
            devices=taken.devices,
            hints=aligned.records,
            reasons=tuple(_why(room, want, aligned, taken)),
        )
    return Placement(containers=tuple(placed[key] for key in sorted(placed)))


def _why(room: Room, want: Want, aligned: _Aligned, taken: Taken) -> list[Reason]:
    reasons = [_why_aligned(room, aligned)]
    if taken.cpus:
        cores = sum(1 for core in room.view.cores if core.cpus <= taken.cpus)
        nodes = room.topology.nodes_of(taken.cpus)
        reasons.append(
            Reason(
                code="cpus-taken",
                message=f"CPUs {taken.cpus} on NUMA node {nodes}: {cores} whole cores, the most used units first",
                facts={"resource": CPU_CLASS, "cpus": str(taken.cpus), "whole_cores": cores, "numa_nodes": str(nodes)},
            )
        )
    for device_class, choice in sorted(taken.choices.items()):
        link = choice.bottleneck.value if choice.bottleneck is not None else ""
        what = f"widest bottleneck link {link}" if link else "least fragmentation"
        speed = f", {choice.bandwidth_gbps:g} Gbit/s in total" if choice.bandwidth_gbps else ""
        tie = f"; {choice.tied} other choices tied and lost by name" if choice.tied else ""
        reasons.append(
            Reason(
                code="devices-chosen",
                message=f"{device_class} {', '.join(choice.names)}: {what}{speed}{tie}",
                facts={
                    "resource": device_class,
                    "devices": choice.names,
                    "bottleneck": link,
                    "bandwidth_gbps": choice.bandwidth_gbps,
                    "tied": choice.tied,
                    "is_exact": choice.is_exact,
                },
            )
        )
    reasons += [
        Reason(
            code="outside-alignment",
            message=f"{device_class} {', '.join(names)}: not enough inside NUMA node {aligned.merged.hint.nodes}",
            facts={"resource": device_class, "devices": names, "alignment": str(aligned.merged.hint.nodes)},
        )
        for device_class, names in sorted(taken.outside.items())
    ]
    reasons += _why_near(room, taken)
    reasons += [
        Reason(
            code="no-opinion",
            message=f"{one.device_class}: its service has hints of its own and did not answer in time; it was left out of the merge",
            facts={"resource": one.device_class},
        )
        for one in want.devices
        if one.device_class in room.view.silent_classes
    ]
    return reasons


def _why_aligned(room: Room, aligned: _Aligned) -> Reason:
    hint, merged = aligned.merged.hint, aligned.merged
    decider = _decider(aligned)
    facts: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "policy": aligned.policy.value,
        "nodes": str(hint.nodes) if hint.nodes is not None else "",
        "preferred": hint.preferred,
        "decided_by": decider,
        "tied": tuple(str(one) for one in merged.tied),
    }
    if aligned.policy is Policy.NONE:
        return Reason(code="no-alignment", message="policy none: nothing is aligned", facts=facts)
    if hint.nodes is None or not decider:
        return Reason(code="no-affinity", message="no resource has an opinion on NUMA nodes", facts=facts)
    if not hint.preferred:
        message = (
            f"no NUMA node set suits all resources best; {aligned.policy.value} takes NUMA node {hint.nodes} (widest need: {merged.width})"
        )
        return Reason(code="aligned-not-preferred", message=message, facts=facts)
    if not merged.is_exact:
        facts["is_exact"] = False
    tie = ""
    if merged.tied:
        by = "distance, then lowest ids" if room.view.options.prefer_closest_numa_nodes else "lowest ids"
        facts["tie_break"] = by
        tie = f"; NUMA node {' and '.join(str(one) for one in merged.tied)} would do as well and lost by {by}"
    return Reason(code="aligned", message=f"all resources prefer NUMA node {hint.nodes}, {decider} decides{tie}", facts=facts)


def _decider(aligned: _Aligned) -> str:
    """The resource that leaves the fewest node sets to choose from, by name on a tie."""
    hint: Hint = aligned.merged.hint
    sizes = [
        (sum(1 for one in resource.hints if one.preferred or not hint.preferred) + resource.omitted, resource.resource)
        for resource in aligned.records
        if resource.hints and any(one.nodes is not None for one in resource.hints)
    ]
    return min(sizes)[1] if sizes else ""


def _why_near(room: Room, taken: Taken) -> list[Reason]:
    """Name the devices of different classes that share a PCIe switch."""
    reasons: list[Reason] = []
    classes = [name for name in taken.devices if taken.devices[name]]
    for place, one in enumerate(classes):
        for other in classes[place + 1 :]:
            ours = [(name, room.sites(one)[name]) for name in taken.devices[one]]
            theirs = [(name, room.sites(other)[name]) for name in taken.devices[other]]
            pairs = pairs_by_switch(ours, theirs)
            if pairs:
                listed = tuple(f"{mine} and {peer} under {switch}" for mine, peer, switch in pairs)
                reasons.append(
                    Reason(
                        code="same-switch",
                        message=f"{len(pairs)} of {len(theirs)} {other} share a PCIe switch with a {one}: {'; '.join(listed)}",
                        facts={"resource": one, "other": other, "pairs": listed, "count": len(pairs)},
                    )
                )
    return reasons
