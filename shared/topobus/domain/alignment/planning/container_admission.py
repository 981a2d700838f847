"""Admit one container (or a pod's totals) into what is free: hints, their merge by the policy, and what is taken, with the reasons for each.

Flows in: the room that is left, a want, the policy. Flows out: an `Aligned` and then a ContainerPlacement, or the Conflict that says why not.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.domain.alignment.devices.proximity import pairs_by_switch
from topobus.domain.alignment.merge.dispatch import Merged, merge_hints
from topobus.domain.alignment.planning.demands import ContainerDemand
from topobus.domain.alignment.planning.node_availability import NodeAvailability
from topobus.domain.alignment.planning.node_view import CPU_CLASS
from topobus.domain.alignment.planning.refusal_reasons import Conflict
from topobus.domain.alignment.planning.resource_hints import ContainerAllocation, ResourceHints
from topobus.domain.hint import Hint
from topobus.domain.outcome import ContainerPlacement, HintList, Reason
from topobus.domain.request import Policy

__all__ = ["Aligned", "align", "fill"]


class Aligned:
    """A merge and the hints that went into it."""

    __slots__ = ("_lists", "_records", "merged", "policy")

    def __init__(self, lists: Sequence[ResourceHints], merged: Merged, policy: Policy) -> None:
        self._lists = lists
        self._records: tuple[HintList, ...] | None = None
        self.merged = merged
        self.policy = policy

    @property
    def records(self) -> tuple[HintList, ...]:
        """The hints for the record; made when first asked for, since a search tries many that come to nothing."""
        if self._records is None:
            self._records = tuple(resource_hints.record() for resource_hints in self._lists)
        return self._records


def align(room: NodeAvailability, want: ContainerDemand, policy: Policy, *, is_pod: bool) -> Aligned | Conflict:
    """Merge what all resources of a want say about NUMA nodes, or say why it cannot be had."""
    faults = room.faults(want)
    if faults:
        return Conflict(want=want, reasons=tuple(faults))
    lists = [] if policy is Policy.NONE else room.hint_lists(want, is_pod=is_pod)
    options = room.view.options
    merged = merge_hints(
        [resource_hints.opinion for resource_hints in lists],
        room.view.numa_nodes,
        policy,
        distances=room.view.distances,
        prefer_closest=options.prefer_closest_numa_nodes,
    )
    if not merged.is_admitted:
        return Conflict(want=want, lists=tuple(lists), merged=merged, policy=policy, room=room)
    return Aligned(lists, merged, policy)


def fill(room: NodeAvailability, want: ContainerDemand, aligned: Aligned) -> ContainerPlacement | Conflict:
    """Take what a container wants, inside the alignment first. Updates the room."""
    faults = room.faults(want)
    if faults:
        return Conflict(want=want, reasons=tuple(faults))
    hint = aligned.merged.hint
    taken = room.take(want, hint)
    if isinstance(taken, list):
        return Conflict(want=want, reasons=tuple(taken))
    return ContainerPlacement(
        name=want.name,
        alignment=hint,
        cpus=taken.cpus,
        numa_nodes=taken.numa_nodes,
        devices=taken.devices,
        memory=taken.memory,
        hints=aligned.records,
        reasons=tuple(_why(room, want, aligned, taken)),
    )


def _why(room: NodeAvailability, want: ContainerDemand, aligned: Aligned, taken: ContainerAllocation) -> list[Reason]:
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
    reasons += [
        Reason(
            code="memory-taken",
            message=f"{block.kind} on NUMA node {block.nodes}: {', '.join(f'{size} bytes of node {node}' for node, size in block.shares) or 'reused'}",
            facts={"resource": block.kind, "numa_nodes": str(block.nodes), "size_bytes": block.size_bytes},
        )
        for block in taken.memory
    ]
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
            message=f"{device.device_class}: its service has hints of its own and did not answer in time; it was left out of the merge",
            facts={"resource": device.device_class},
        )
        for device in want.devices
        if device.device_class in room.view.silent_classes
    ]
    return reasons


def _why_aligned(room: NodeAvailability, aligned: Aligned) -> Reason:
    hint, merged = aligned.merged.hint, aligned.merged
    decider = _decider(aligned)
    facts: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "policy": aligned.policy.value,
        "nodes": str(hint.nodes) if hint.nodes is not None else "",
        "preferred": hint.preferred,
        "decided_by": decider,
        "tied": tuple(str(node_set) for node_set in merged.tied),
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
        tie = f"; NUMA node {' and '.join(str(node_set) for node_set in merged.tied)} would do as well and lost by {by}"
    return Reason(code="aligned", message=f"all resources prefer NUMA node {hint.nodes}, {decider} decides{tie}", facts=facts)


def _decider(aligned: Aligned) -> str:
    """The resource that leaves the fewest node sets to choose from, by name on a tie."""
    hint: Hint = aligned.merged.hint
    sizes = [
        (sum(1 for other_hint in resource.hints if other_hint.preferred or not hint.preferred) + resource.omitted, resource.resource)
        for resource in aligned.records
        if resource.hints and any(each_hint.nodes is not None for each_hint in resource.hints)
    ]
    return min(sizes)[1] if sizes else ""


def _why_near(room: NodeAvailability, taken: ContainerAllocation) -> list[Reason]:
    """Name the devices of different classes that share a PCIe switch."""
    reasons: list[Reason] = []
    classes = [name for name in taken.devices if taken.devices[name]]
    for place, device_class in enumerate(classes):
        for other in classes[place + 1 :]:
            ours = [(name, room.sites(device_class)[name]) for name in taken.devices[device_class]]
            theirs = [(name, room.sites(other)[name]) for name in taken.devices[other]]
            pairs = pairs_by_switch(ours, theirs)
            if pairs:
                listed = tuple(f"{mine} and {peer} under {switch}" for mine, peer, switch in pairs)
                reasons.append(
                    Reason(
                        code="same-switch",
                        message=f"{len(pairs)} of {len(theirs)} {other} share a PCIe switch with a {device_class}: {'; '.join(listed)}",
                        facts={"resource": device_class, "other": other, "pairs": listed, "count": len(pairs)},
                    )
                )
    return reasons
