"""Place a pod as kubelet would: container after container in its order, the best for each, without
backtracking.

kubelet has no locality below NUMA nodes. Where a pod asks for some, each container (with scope pod:
the pod) is tried in every domain of that level, and the one with the best hint wins, then the one
left with least free.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from topobus.engine.alignment.planning.container_admission import align, fill
from topobus.engine.alignment.planning.demands import ContainerDemand, pod_total
from topobus.engine.alignment.planning.locality_domains import Domain, tiers
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.values.dra_names import CPU_CLASS
from topobus.values.outcome import ContainerPlacement, Fact, Placement, Reason
from topobus.values.request import Locality, Policy

__all__ = ["PlacementTask", "groups_of", "locality_reason", "place_greedily", "tiers_of", "total_of"]


class PlacementTask(Struct, frozen=True, kw_only=True):
    """A checked request with the settings that apply to it."""

    demands: tuple[ContainerDemand, ...]
    """In the order of admission."""
    policy: Policy
    is_pod: bool
    """Whether the pod is aligned as a whole."""
    locality: tuple[Locality, ...] = ()


def place_greedily(available: NodeAvailability, task: PlacementTask) -> Placement | Conflict:
    """Place all containers, or return the conflict of the first that fails.

    It updates `available`.

    Order: containers in the order of the task. Nothing is undone.
    Cost: one merge and one choice for each container. With a locality one of each for every domain
            of the tier.
    Source: kubelet 1.36 cm/topologymanager/scope_{container,pod}.go.
    """
    placed: dict[int, ContainerPlacement] = {}
    for group in groups_of(task):
        placements = (
            _admit_local(available, task, group)
            if task.locality and _wants_places(group)
            else _admit(available, task, group)
        )
        if isinstance(placements, Conflict):
            return placements
        placed.update(zip((demand.place for demand in group), placements, strict=True))
    return Placement(containers=tuple(placed[key] for key in sorted(placed)))


def groups_of(task: PlacementTask) -> list[tuple[ContainerDemand, ...]]:
    """List the containers that are aligned together: all of them in scope pod, else each by
    itself.
    """
    return [task.demands] if task.is_pod else [(demand,) for demand in task.demands]


def total_of(task: PlacementTask, group: Sequence[ContainerDemand]) -> ContainerDemand:
    """Return what a group demands in total."""
    return pod_total(group) if task.is_pod else group[0]


def tiers_of(
    available: NodeAvailability, task: PlacementTask, group: Sequence[ContainerDemand]
) -> list[list[Domain | None]]:
    """List the domains to plan a group within, the most local tier first."""
    if not task.locality or not _wants_places(group):
        return [[None]]
    return tiers(available.locality(), total_of(task, group), task.locality)


def locality_reason(task: PlacementTask, domain: Domain | None, tier: int) -> Reason | None:
    """Report which locality was met, and which soft one was not."""
    if not task.locality or (domain is None and tier == 0):
        return None
    soft = [locality for locality in task.locality if not locality.is_hard]
    missed = tuple(str(locality) for locality in soft[len(soft) - tier :])
    where = domain.key if domain is not None else ""
    met = tuple(str(locality) for locality in task.locality if str(locality) not in missed)
    within = f"all within {where} ({', '.join(met)})" if where else "no locality kept"
    message = f"{within}{f'; {chr(32).join(missed)} could not be had' if missed else ''}"
    return Reason(
        code="locality-missed" if missed else "locality-met",
        message=message,
        facts={"domain": where, "met": met, "missed": missed},
    )


def _admit(
    available: NodeAvailability, task: PlacementTask, group: Sequence[ContainerDemand]
) -> list[ContainerPlacement] | Conflict:
    aligned = align(available, total_of(task, group), task.policy, is_pod=task.is_pod)
    if isinstance(aligned, Conflict):
        return aligned
    container_placements: list[ContainerPlacement] = []
    for demand in group:
        placed = fill(available, demand, aligned)
        if isinstance(placed, Conflict):
            return placed
        container_placements.append(placed)
    return container_placements


def _admit_local(
    available: NodeAvailability, task: PlacementTask, group: Sequence[ContainerDemand]
) -> list[ContainerPlacement] | Conflict:
    tier_domains = tiers_of(available, task, group)
    for tier, domains in enumerate(tier_domains):
        tried: list[tuple[tuple[object, ...], Domain | None, NodeAvailability, list[ContainerPlacement]]] = []
        for place, domain in enumerate(domains):
            fork = _within(available, domain)
            placed = _admit(fork, task, group)
            if not isinstance(placed, Conflict):
                tried.append(((*_rank(fork, group, placed), place), domain, fork, placed))
        if tried:
            _, domain, fork, placed = min(tried, key=lambda attempt: attempt[0])
            available.absorb(
                fork, domain.cpus if domain is not None else None, domain.devices if domain is not None else None
            )
            reason = locality_reason(task, domain, tier)
            return [
                structs.replace(container_placement, reasons=(*container_placement.reasons, reason))
                if reason is not None
                else container_placement
                for container_placement in placed
            ]
    # Without the locality it may not fit either; that is the better reason then.
    plain = _admit(available.fork(), task, group)
    if isinstance(plain, Conflict):
        return plain
    return Conflict(demand=total_of(task, group), reasons=(_unmet_locality(available, task, group, tier_domains[-1]),))


def _wants_places(group: Sequence[ContainerDemand]) -> bool:
    return any(demand.cpus or demand.named_cpus or any(device.count for device in demand.devices) for demand in group)


def _within(available: NodeAvailability, domain: Domain | None) -> NodeAvailability:
    return available.fork() if domain is None else available.fork(domain.cpus, domain.devices)


def _rank(
    fork: NodeAvailability, group: Sequence[ContainerDemand], placed: Sequence[ContainerPlacement]
) -> tuple[object, ...]:
    """Rank by the better hint, then the fuller domain, so that other domains stay whole for later
    requests.
    """
    hint = placed[0].alignment
    nodes = hint.nodes
    left = sum(
        len(fork.free[device_class])
        for device_class in {device.device_class for demand in group for device in demand.devices}
    )
    cpus = len(fork.free_cpus) if any(demand.cpus for demand in group) else 0
    return (
        not hint.preferred,
        len(nodes) if nodes is not None else 0,
        nodes.bits if nodes is not None else 0,
        left,
        cpus,
    )


def _unmet_locality(
    available: NodeAvailability, task: PlacementTask, group: Sequence[ContainerDemand], domains: Sequence[Domain | None]
) -> Reason:
    """Name the domain that comes closest, and what it lacks."""
    total = total_of(task, group)
    who = f"container {total.name!r}" if total.name else "the pod"
    asked = ", ".join(str(locality) for locality in task.locality if locality.is_hard)
    rows = [(_missing(available, total, domain), domain.key) for domain in domains if domain is not None]
    if not rows:
        message = f"{who}: {asked} cannot be kept: this node reports no such domain"
        return Reason(code="locality-not-met", message=message, facts={"container": total.name, "locality": asked})
    missing, key = min(rows, key=lambda row: (sum(row[0].values()), len(row[0])))
    lacks = tuple(f"{count} {resource}" for resource, count in sorted(missing.items()))
    text = f"{' and '.join(lacks)} missing there" if lacks else f"policy {task.policy.value} admits nothing there"
    message = f"{who}: nothing holds all of it by {asked}; {key} comes closest: {text}"
    facts: dict[str, Fact] = {
        "container": total.name,
        "locality": asked,
        "domain": key,
        "missing": lacks,
    }
    return Reason(code="locality-not-met", message=message, facts=facts)


def _missing(available: NodeAvailability, total: ContainerDemand, domain: Domain) -> dict[str, int]:
    fork = _within(available, domain)
    lacks: dict[str, int] = {}
    cpus = len((fork.free_cpus | fork.reusable_cpus) - total.named_cpus) - total.cpus
    outside = len(total.named_cpus - (fork.free_cpus | fork.reusable_cpus))
    if min(cpus, 0) - outside:
        lacks[CPU_CLASS] = outside - min(cpus, 0)
    for device in total.devices:
        usable = fork.free[device.device_class] | fork.reusable.get(device.device_class, set())
        short = max(device.any_count - len(usable - set(device.names)), 0) + len(set(device.names) - usable)
        if short:
            lacks[device.device_class] = short
    return lacks
