"""Admit one container (or a pod's totals) into what is free: hints, their merge by the policy, and
the units taken, with the reasons for each.

`align` returns an `Aligned` and `fill` a ContainerPlacement. Either may return the Conflict that
explains why not.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.engine.alignment.devices.proximity import pairs_by_switch
from topobus.engine.alignment.merge.dispatch import Merged, merge_hints
from topobus.engine.alignment.planning.demand_faults import demand_faults
from topobus.engine.alignment.planning.demands import ContainerDemand
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.engine.alignment.planning.resource_hints import ContainerAllocation, ResourceHints
from topobus.values.dra_names import CPU_CLASS
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet
from topobus.values.node_text import on_nodes
from topobus.values.outcome import ContainerPlacement, Fact, HintList, Reason
from topobus.values.request import Policy

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
        """The hints for the record.

        Made when first asked for, since a search tries many alignments that fail.
        """
        if self._records is None:
            self._records = tuple(resource_hints.record() for resource_hints in self._lists)
        return self._records


def align(available: NodeAvailability, demand: ContainerDemand, policy: Policy, *, is_pod: bool) -> Aligned | Conflict:
    """Merge the opinions of all resources of a demand about NUMA nodes, or explain why it cannot be
    met.
    """
    faults = demand_faults(available, demand)
    if faults:
        return Conflict(demand=demand, reasons=tuple(faults))
    lists = [] if policy is Policy.NONE else available.hint_lists(demand, is_pod=is_pod)
    options = available.view.options
    merged = merge_hints(
        [resource_hints.opinion for resource_hints in lists],
        available.view.numa_nodes,
        policy,
        distances=available.view.distances,
        prefer_closest=options.prefer_closest_numa_nodes,
    )
    if not merged.is_admitted:
        return Conflict(demand=demand, lists=tuple(lists), merged=merged, policy=policy, available=available)
    return Aligned(lists, merged, policy)


def fill(available: NodeAvailability, demand: ContainerDemand, aligned: Aligned) -> ContainerPlacement | Conflict:
    """Take what a container demands, inside the alignment first.

    It updates `available`.
    """
    faults = demand_faults(available, demand)
    if faults:
        return Conflict(demand=demand, reasons=tuple(faults))
    hint = aligned.merged.hint
    taken = available.take(demand, hint)
    if isinstance(taken, list):
        return Conflict(demand=demand, reasons=tuple(taken))
    return ContainerPlacement(
        name=demand.name,
        alignment=hint,
        cpus=taken.cpus,
        numa_nodes=taken.numa_nodes,
        devices=taken.devices,
        memory=taken.memory,
        hints=aligned.records,
        reasons=tuple(_why(available, demand, aligned, taken)),
    )


def _why(
    available: NodeAvailability, demand: ContainerDemand, aligned: Aligned, taken: ContainerAllocation
) -> list[Reason]:
    reasons = [_why_aligned(available, aligned)]
    if taken.cpus:
        reasons.append(_why_cpus(available, taken.cpus))
    reasons += [
        Reason(
            code="memory-taken",
            message=f"{block.kind} on NUMA node {block.nodes}: "
            f"{', '.join(f'{size} bytes of node {node}' for node, size in block.shares) or 'reused'}",
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
            message=f"{device_class} {_why_outside(available, device_class, names, aligned.merged.hint)}",
            facts={"resource": device_class, "devices": names, "alignment": str(aligned.merged.hint.nodes)},
        )
        for device_class, names in sorted(taken.outside.items())
    ]
    reasons += _why_near(available, taken)
    reasons += [
        Reason(
            code="no-opinion",
            message=f"{device.device_class}: its service has hints of its own and did not answer in time; it was left "
            "out of the merge",
            facts={"resource": device.device_class},
        )
        for device in demand.devices
        if device.device_class in available.view.silent_classes
    ]
    return reasons


def _why_cpus(available: NodeAvailability, taken: CpuSet) -> Reason:
    """Say where the CPUs are, and how many whole cores they make."""
    cores = sum(1 for core in available.view.cores if core.cpus <= taken)
    nodes = available.topology.nodes_of(taken)
    at_home = sum(len(cpus & taken) for cpus in available.topology.cpus_by_node().values())
    where = on_nodes(nodes, has_unknown=at_home < len(taken))
    return Reason(
        code="cpus-taken",
        message=f"CPUs {taken} {where}: {cores} whole core{'' if cores == 1 else 's'}, the most used units first",
        facts={"resource": CPU_CLASS, "cpus": str(taken), "whole_cores": cores, "numa_nodes": str(nodes)},
    )


def _why_outside(available: NodeAvailability, device_class: str, names: Sequence[str], hint: Hint) -> str:
    """Explain why devices are outside the alignment: their NUMA node is unknown, or too few are
    inside.
    """
    devices = available.devices[device_class]
    unknown = [name for name in names if devices[name].numa_nodes is None]
    placed = [name for name in names if devices[name].numa_nodes is not None]
    parts = [f"{', '.join(placed)}: not enough inside NUMA node {hint.nodes}"] if placed else []
    if unknown:
        verb = "does not report its NUMA node" if len(unknown) == 1 else "do not report their NUMA nodes"
        parts.append(f"{', '.join(unknown)} {verb}, and not enough that do are inside NUMA node {hint.nodes}")
    return "; ".join(parts)


def _why_aligned(available: NodeAvailability, aligned: Aligned) -> Reason:
    hint, merged = aligned.merged.hint, aligned.merged
    decider = _decider(aligned)
    facts: dict[str, Fact] = {
        "policy": aligned.policy.value,
        "nodes": str(hint.nodes) if hint.nodes is not None else "",
        "preferred": hint.preferred,
        "decided_by": decider,
        "tied": tuple(str(node_set) for node_set in merged.tied),
    }
    if aligned.policy is Policy.NONE:
        return Reason(code="no-alignment", message="policy none: nothing is aligned", facts=facts)
    if hint.nodes is None or not decider:
        # Then the merge gives the whole machine, as kubelet does.
        whole = f", so the merged hint is all there are: {hint.nodes}" if hint.nodes is not None else ""
        return Reason(code="no-affinity", message=f"no resource has an opinion on NUMA nodes{whole}", facts=facts)
    if not hint.preferred:
        message = (
            f"no NUMA node set suits all resources best; {aligned.policy.value} takes NUMA node {hint.nodes} "
            f"(widest need: {merged.width})"
        )
        return Reason(code="aligned-not-preferred", message=message, facts=facts)
    if not merged.is_exact:
        facts["is_exact"] = False
    tie = ""
    if merged.tied:
        by = "distance, then lowest ids" if available.view.options.prefer_closest_numa_nodes else "lowest ids"
        facts["tie_break"] = by
        tie = f"; NUMA node {' and '.join(str(node_set) for node_set in merged.tied)} would do as well and lost by {by}"
    return Reason(
        code="aligned", message=f"all resources prefer NUMA node {hint.nodes}, {decider} decides{tie}", facts=facts
    )


def _decider(aligned: Aligned) -> str:
    """The resource that leaves the fewest node sets to choose from, by name on a tie."""
    hint: Hint = aligned.merged.hint
    sizes = [
        (
            sum(1 for other_hint in resource.hints if other_hint.preferred or not hint.preferred) + resource.omitted,
            resource.resource,
        )
        for resource in aligned.records
        if resource.hints and any(each_hint.nodes is not None for each_hint in resource.hints)
    ]
    return min(sizes)[1] if sizes else ""


def _why_near(available: NodeAvailability, taken: ContainerAllocation) -> list[Reason]:
    """Name the devices of different classes that share a PCIe switch."""
    reasons: list[Reason] = []
    classes = [name for name in taken.devices if taken.devices[name]]
    for place, device_class in enumerate(classes):
        for other in classes[place + 1 :]:
            devices = [(name, available.sites(device_class)[name]) for name in taken.devices[device_class]]
            others = [(name, available.sites(other)[name]) for name in taken.devices[other]]
            pairs = pairs_by_switch(devices, others)
            if pairs:
                listed = tuple(f"{device} and {peer} under {switch}" for device, peer, switch in pairs)
                reasons.append(
                    Reason(
                        code="same-switch",
                        message=f"{len(pairs)} of {len(others)} {other} share a PCIe switch with a {device_class}: "
                        f"{'; '.join(listed)}",
                        facts={"resource": device_class, "other": other, "pairs": listed, "count": len(pairs)},
                    )
                )
    return reasons
