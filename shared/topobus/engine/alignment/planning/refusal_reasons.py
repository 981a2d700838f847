"""Explain why a pod does not fit, what would have to change, and whose devices would have to be
freed.

All searches are bounded. Where a bound ends one, the answer is still true, but perhaps not the
smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from msgspec import Struct, structs

from topobus.engine.alignment.merge.dispatch import Merged, merge_hints
from topobus.engine.alignment.planning.demands import ContainerDemand
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.node_view import MEMORY, without_owners
from topobus.engine.alignment.planning.resource_hints import ResourceHints
from topobus.values.device import Device
from topobus.values.dra_names import CPU_CLASS
from topobus.values.health import HEALTHY, HealthState, RecoveryAction
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.node_text import first_of, on_nodes
from topobus.values.outcome import Fact, HintList, Reason, Refusal
from topobus.values.request import PodRequest, Policy
from topobus.values.view import NodeView

__all__ = ["Conflict", "explain_conflict"]

# Plans tried to find the smallest set of owners to free. Each costs about as much as a `place`.
_FREE_BUDGET = 200
# The value of the fact `nodes` when no set of NUMA nodes is offered.
_NOWHERE = "none"
# Sets of owners beyond this size are found by leaving out one owner after the other
# instead of by trying all sets.
_FREE_SIZE = 3
# Most devices that are withheld or unhealthy of which subsets are tried for one that would be
# enough. With more of them something else is wrong.
_RECOVER_TRIES = 16


class Conflict(Struct, frozen=True, kw_only=True):
    """What stopped a plan: faults that no alignment can remove, or hints that the policy does not
    admit.
    """

    demand: ContainerDemand
    reasons: tuple[Reason, ...] = ()
    lists: tuple[ResourceHints, ...] = ()
    merged: Merged | None = None
    policy: Policy | None = None
    available: NodeAvailability | None = None
    """What was left when it stopped; None: the whole node."""
    notes: tuple[Reason, ...] = ()
    """Said after all other reasons."""


def explain_conflict(
    view: NodeView, request: PodRequest, conflict: Conflict, fits: Callable[[NodeView], bool]
) -> Refusal:
    """Turn a conflict into a Refusal with reasons and what to free.

    Shapes: fits — True when the request fits a view. It is called with this node without some
            owners.
    Order: of reasons: the policy's, each resource's by name, what to relax, the conflict's own
            notes.
    Cost: at most 440 calls of `fits`.
    """
    reasons = list(conflict.reasons)
    if conflict.merged is not None and conflict.policy is not None:
        reasons += _policy_reasons(view, conflict, conflict.merged, conflict.policy)
    reasons += conflict.notes
    return Refusal(reasons=tuple(reasons), to_free=_ways_out(view, request, fits))


def _policy_reasons(view: NodeView, conflict: Conflict, merged: Merged, policy: Policy) -> Iterable[Reason]:
    demand = conflict.demand
    who = f"container {demand.name!r}" if demand.name else "the pod"
    opinions = [record for resource_hints in conflict.lists if (record := resource_hints.record()).hints is not None]
    impossible = [opinion for opinion in opinions if not opinion.hints]
    wanted = ", ".join(f"{opinion.resource} {_offer_text(opinion, policy)}" for opinion in opinions if opinion.hints)
    if impossible:
        names = tuple(hint_list.resource for hint_list in impossible)
        message = f"{who}: no set of NUMA nodes has {' or '.join(names)} in the amount wanted"
        yield Reason(code="no-numa-node", message=message, facts={"container": demand.name, "resources": names})
    elif not merged.has_common or policy is Policy.SINGLE_NUMA_NODE:
        message = f"{who}: no NUMA node has all of it: {wanted}" if wanted else f"{who}: no NUMA node has all of it"
        yield Reason(
            code="no-common-numa-node",
            message=message,
            facts={"container": demand.name, "resources": tuple(opinion.resource for opinion in opinions)},
        )
    rule = (
        "one NUMA node that every resource prefers"
        if policy is Policy.SINGLE_NUMA_NODE
        else "one set of NUMA nodes that every resource prefers"
    )
    merged_text = str(merged.hint.nodes if merged.hint.nodes is not None else view.numa_nodes)
    yield Reason(
        code="policy-not-met",
        message=f"{who}: policy {policy.value} wants {rule}; the best common set is {merged_text}, not preferred",
        facts={"container": demand.name, "policy": policy.value, "nodes": merged_text},
    )
    available = conflict.available if conflict.available is not None else NodeAvailability(view)
    for opinion in opinions:
        yield _resource_reason(available, demand, opinion, policy)
        if not opinion.hints and (unknown := _unknown_node_reason(available, demand, opinion, policy)) is not None:
            yield unknown
    relaxed = _relax(view, conflict.lists, policy)
    if relaxed:
        message = f"{who}: would be admitted without {' and '.join(relaxed)}"
        yield Reason(code="relax", message=message, facts={"container": demand.name, "resources": relaxed})


def _nodes_text(hint_list: HintList, policy: Policy) -> str:
    hints = [hint for hint in hint_list.hints or () if hint.nodes is not None]
    single = [
        str(hint.nodes)
        for hint in hints
        if hint.preferred and (policy is not Policy.SINGLE_NUMA_NODE or (hint.nodes and len(hint.nodes) == 1))
    ]
    if single:
        return " or ".join(single[:8])
    narrow = min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0)
    nodes = [str(hint.nodes) for hint in hints if hint.nodes is not None and len(hint.nodes) == narrow]
    return f"{' or '.join(nodes[:8])} (not preferred)" if nodes else _NOWHERE


def _offer_text(hint_list: HintList, policy: Policy) -> str:
    nodes = _nodes_text(hint_list, policy)
    return f"on NUMA node {nodes}" if nodes != _NOWHERE else "on no NUMA node"


def _resource_reason(
    available: NodeAvailability, demand: ContainerDemand, hint_list: HintList, policy: Policy
) -> Reason:
    """Report how much of a resource each node has, and which node sets it offers."""
    resource = hint_list.resource.removesuffix(" (named)")
    wanted, rows = _amounts_by_node(available, demand, resource, is_by_name=hint_list.resource != resource)
    table = tuple(f"node {node}: {free} of {exists} free" for node, exists, free in rows if exists)
    without = _without_node(available, resource)
    if without is not None:
        table = (*table, f"unknown node: {len(without.free)} of {without.exists} free")
    strays = _strays(available, resource)
    if strays:
        table = (*table, f"{len(strays)} on NUMA nodes that this machine lacks: {', '.join(strays)}")
    held = available.view.held_devices.get(resource, {})
    out = [
        f"{device.name} {device.why_not}"
        for device in available.devices.get(resource, {}).values()
        if device.why_not and device.name not in held
    ]
    if out:
        table = (*table, first_of(out))
    return Reason(
        code="resource-nodes",
        message=f"{hint_list.resource}: {wanted} wanted, offered {_offer_text(hint_list, policy)} "
        f"({'; '.join(table) or 'none exists'})",
        facts={
            "container": demand.name,
            "resource": hint_list.resource,
            "wanted": wanted,
            "nodes": _nodes_text(hint_list, policy),
            "free": table,
        },
    )


class _WithoutNode(Struct, frozen=True, kw_only=True):
    """The units of a resource whose NUMA node is unknown."""

    exists: int
    free: tuple[str, ...]


def _amounts_by_node(
    available: NodeAvailability, demand: ContainerDemand, resource: str, *, is_by_name: bool
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return how much is wanted, and for each node its id, how much it has and how much is free."""
    if resource == CPU_CLASS:
        wanted = len(demand.named_cpus) if is_by_name else demand.cpus
        rows = [
            (node, len(cpus), len(cpus & available.free_cpus))
            for node, cpus in available.topology.cpus_by_node().items()
        ]
    elif resource in demand.memory:
        wanted = demand.memory[resource]
        nodes = available.memory.nodes
        rows = [
            (node.id, node.amounts[resource].allocatable, node.amounts[resource].free)
            for node in nodes
            if resource in node.amounts
        ]
    else:
        device_demand = demand.of_class(resource)
        wanted = len(device_demand.names) if is_by_name else device_demand.any_count
        devices = available.devices.get(resource, {}).values()
        rows = [
            (
                node,
                sum(1 for device in devices if device.numa_nodes and node in device.numa_nodes),
                sum(
                    1
                    for device in devices
                    if device.numa_nodes and node in device.numa_nodes and device.name in available.free[resource]
                ),
            )
            for node in available.view.numa_nodes
        ]
    return wanted, rows


def _without_node(available: NodeAvailability, resource: str) -> _WithoutNode | None:
    """Find the units that are in no hint, as in kubelet, because their NUMA node is unknown.

    None when there are no such units.
    """
    if resource == CPU_CLASS:
        cpus = available.online
        for at_home in available.topology.cpus_by_node().values():
            cpus -= at_home
        return _WithoutNode(exists=len(cpus), free=tuple(map(str, cpus & available.free_cpus))) if cpus else None
    devices = [device for device in available.devices.get(resource, {}).values() if device.numa_nodes is None]
    free = available.free.get(resource, set())
    return (
        _WithoutNode(exists=len(devices), free=tuple(sorted(device.name for device in devices if device.name in free)))
        if devices
        else None
    )


def _unknown_node_reason(
    available: NodeAvailability, demand: ContainerDemand, hint_list: HintList, policy: Policy
) -> Reason | None:
    """Report that enough is there, but that the NUMA node of a part of it is unknown.

    Only the policies none and best-effort accept such units.
    """
    resource = hint_list.resource
    if resource in demand.memory or resource.endswith(" (named)"):
        return None
    wanted = demand.cpus if resource == CPU_CLASS else demand.of_class(resource).any_count
    without = _without_node(available, resource)
    free = len(available.free_cpus) if resource == CPU_CLASS else len(available.free[resource])
    if without is None or not free - len(without.free) < wanted <= free:
        return None
    names = (
        f"CPUs {CpuSet.of(map(int, without.free))}" if resource == CPU_CLASS else f"{resource} {first_of(without.free)}"
    )
    verb, which = (
        ("does not report its NUMA node", "it")
        if len(without.free) == 1 and resource != CPU_CLASS
        else ("do not report their NUMA node", "they")
    )
    return Reason(
        code="numa-node-unknown",
        message=f"{names} {verb}, so {which} cannot be aligned: only policies none and best-effort place {wanted} "
        f"{resource} here",
        facts={
            "container": demand.name,
            "resource": resource,
            "wanted": wanted,
            "policy": policy.value,
            "devices": without.free,
        },
    )


def _strays(available: NodeAvailability, resource: str) -> tuple[str, ...]:
    """Return the devices that name only NUMA nodes which the machine does not have: they are in no
    hint, as in kubelet.
    """
    return tuple(
        f"{device.name} ({device.numa_nodes})"
        for device in available.devices.get(resource, {}).values()
        if device.numa_nodes and device.numa_nodes.isdisjoint(available.view.numa_nodes)
    )


def _relax(view: NodeView, lists: Sequence[ResourceHints], policy: Policy) -> tuple[str, ...]:
    """The smallest set of resources without which the policy would admit the rest.

    By name on a tie.
    """
    places = sorted(range(len(lists)), key=lambda place: lists[place].resource)
    for size in range(1, len(lists)):
        for dropped in combinations(places, size):
            kept = [resource_hints.opinion for place, resource_hints in enumerate(lists) if place not in dropped]
            merged = merge_hints(
                kept,
                view.numa_nodes,
                policy,
                distances=view.distances,
                prefer_closest=view.options.prefer_closest_numa_nodes,
            )
            if merged.is_admitted:
                return tuple(lists[place].resource for place in dropped)
    return ()


def _ways_out(view: NodeView, request: PodRequest, fits: Callable[[NodeView], bool]) -> tuple[Reason, ...]:
    """Name the owners whose devices would have to be released, or the devices that would have to
    come back.

    Where neither helps alone, both: a device may be held and out.
    """
    ways = (*_to_free(view, request, fits), *_to_recover(view, request, fits))
    if ways:
        return ways
    out = [device for devices in view.devices.values() for device in devices if not device.is_allocatable]
    free = tuple(_to_free(_with_devices_well(view, out), request, fits)) if out else ()
    owners = frozenset(str(reason.facts["owner"]) for reason in free)
    return (*free, *_to_recover(without_owners(view, owners), request, fits)) if owners else ()


def _to_free(view: NodeView, request: PodRequest, fits: Callable[[NodeView], bool]) -> Iterable[Reason]:
    """Name the owners whose release would make the pod fit: as few as possible, then those that
    hold least.
    """
    classes = {device.device_class for container in request.containers for device in container.devices}
    wants_cpus = any(container.cpus for container in request.containers) or CPU_CLASS in classes
    wants_memory = any(container.memory_bytes or container.hugepages for container in request.containers)
    holdings = _holdings(view, classes, wants_cpus=wants_cpus, wants_memory=wants_memory)
    if not holdings or not fits(without_owners(view, frozenset(holdings))):
        return ()
    chosen = _smallest(view, holdings, fits)
    return tuple(_free_reason(view, owner, holdings[owner]) for owner in sorted(chosen))


def _to_recover(view: NodeView, request: PodRequest, fits: Callable[[NodeView], bool]) -> Iterable[Reason]:
    """Name the devices that are not allocatable now and with which the pod would fit: as few as
    possible, those that come back by themselves first.
    """
    classes = sorted({device.device_class for container in request.containers for device in container.devices})
    out = [
        device
        for device_class in classes
        for device in view.devices.get(device_class, ())
        if not device.is_allocatable and device.name not in view.held_devices.get(device_class, {})
    ]
    # Left out in turn as long as it fits without them: first broken ones, then withheld ones.
    out.sort(key=lambda device: (_recovery(device), device.name))
    if not out or len(out) > _RECOVER_TRIES or not fits(_with_devices_well(view, out)):
        return ()
    left = list(out)
    for device in reversed(out):
        fewer = [other for other in left if other is not device]
        if fewer and fits(_with_devices_well(view, fewer)):
            left = fewer
    return tuple(map(_recovery_reason, left))


def _recovery(device: Device) -> int:
    """Rank what brings a device back: time, then the operator, then a repair."""
    if device.maintenance is not None or device.is_spare:
        return 1
    return 0 if device.health.state is HealthState.RECOVERING else 2


def _with_devices_well(view: NodeView, devices: Sequence[Device]) -> NodeView:
    names = {(device.device_class, device.name) for device in devices}
    return structs.replace(
        view,
        devices={
            resource: tuple(
                structs.replace(device, health=HEALTHY, maintenance=None, is_spare=False)
                if (device.device_class, device.name) in names
                else device
                for device in resource_devices
            )
            for resource, resource_devices in view.devices.items()
        },
    )


def _recovery_reason(device: Device) -> Reason:
    facts: dict[str, Fact] = {
        "device": device.name,
        "device_class": device.device_class,
    }
    if device.maintenance is not None:
        message = f"{device.name} is {device.why_not}; it would fit with it: `topobus device return {device.name}`"
        return Reason(code="return", message=message, facts=facts)
    if device.is_spare:
        message = (
            f"{device.name} is {device.why_not}; it would fit with it: set a smaller `spares.count` of the "
            f"{device.device_class} service"
        )
        return Reason(code="device-is-spare", message=message, facts=facts)
    worst = device.health.worst
    if device.health.state is HealthState.RECOVERING and worst is not None:
        end = f", and is given out again at {worst.until} unless it gets sick before" if worst.until else ""
        message = (
            f"{device.name} is recovering ({worst.reason}) since {worst.since or 'lately'}{end}; it would fit with it"
        )
        return Reason(code="wait", message=message, facts={**facts, "until": worst.until})
    action = f": {worst.action.value}" if worst is not None and worst.action is not RecoveryAction.NONE else ""
    return Reason(
        code="repair", message=f"{device.name} is {device.why_not}; it would fit with it{action}", facts=facts
    )


def _smallest(
    view: NodeView, holdings: Mapping[str, Mapping[str, tuple[str, ...]]], fits: Callable[[NodeView], bool]
) -> frozenset[str]:
    weight = {owner: sum(len(names) for names in held.values()) for owner, held in holdings.items()}
    budget = _FREE_BUDGET
    for size in range(1, min(_FREE_SIZE, len(holdings)) + 1):
        sets = sorted(
            combinations(sorted(holdings), size), key=lambda owners: (sum(weight[owner] for owner in owners), owners)
        )
        for owners in sets:
            budget -= 1
            if budget < 0:
                break
            if fits(without_owners(view, frozenset(owners))):
                return frozenset(owners)
    left = set(holdings)
    for owner in sorted(holdings, key=lambda owner: (-weight[owner], owner)):
        if len(left) > 1 and fits(without_owners(view, frozenset(left - {owner}))):
            left.discard(owner)
    return frozenset(left)


def _holdings(
    view: NodeView, classes: set[str], *, wants_cpus: bool, wants_memory: bool
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return who holds anything of the classes wanted: owner to class to names (CPUs by id, memory
    by amount).
    """
    holdings: dict[str, dict[str, list[str]]] = {}
    for device_class in sorted(classes):
        for name, owner in sorted(view.held_devices.get(device_class, {}).items()):
            holdings.setdefault(owner, {}).setdefault(device_class, []).append(name)
    if wants_cpus:
        for owner, cpus in ((owner, cpus) for owner, cpus in sorted(view.held_cpus.items()) if cpus):
            holdings.setdefault(owner, {}).setdefault(CPU_CLASS, []).extend(str(cpu) for cpu in cpus)
    if wants_memory:
        for owner, blocks in sorted(view.held_memory.items()):
            holdings.setdefault(owner, {}).setdefault(MEMORY, []).extend(
                f"{block.size_bytes} bytes of {block.kind}" for block in blocks
            )
    return {owner: {name: tuple(held) for name, held in rows.items()} for owner, rows in holdings.items()}


def _free_reason(view: NodeView, owner: str, held: Mapping[str, tuple[str, ...]]) -> Reason:
    parts: list[str] = []
    nodes = NodeSet()
    for device_class, names in sorted(held.items()):
        if device_class == CPU_CLASS:
            cpus = CpuSet.of(int(name) for name in names)
            nodes |= NodeSet.of(
                core.numa_node for core in view.cores if core.numa_node is not None and not core.cpus.isdisjoint(cpus)
            )
            parts.append(f"CPUs {cpus}")
        elif device_class == MEMORY:
            for block in view.held_memory.get(owner, ()):
                nodes |= block.nodes
            parts.append(", ".join(names))
        else:
            devices = {device.name: device for device in view.devices.get(device_class, ())}
            for name in names:
                nodes |= devices[name].numa_nodes or NodeSet() if name in devices else NodeSet()
            parts.append(", ".join(names))
    kind, namespace, name, *_ = (*owner.split("/"), "", "", "")
    return Reason(
        code="free-owner",
        message=f"{kind} {namespace}/{name} holds {' and '.join(parts)} {on_nodes(nodes)}; it would fit without them",
        facts={
            "owner": owner,
            "classes": tuple(sorted(held)),
            "devices": tuple(
                device
                for device_class in sorted(held)
                if device_class not in (CPU_CLASS, MEMORY)
                for device in held[device_class]
            ),
            "cpus": str(CpuSet.of(int(cpu) for cpu in held.get(CPU_CLASS, ()))),
            "numa_nodes": str(nodes),
        },
    )
