"""Find a placement where kubelet's order of containers and choices ends in a refusal: mode
`corrected`.

The result is a Placement that every container's policy admits, a Conflict when there is none, or
`GaveUp` when the budget was spent before either was known. It differs from kubelet in three things.
A container may take any set of NUMA nodes that its resources prefer, not only the lowest. It may
take any devices inside the set, not only the best. And units that an init container leaves may be
used again but need not be (k/k 123816, 110306).

The search decides which nodes (and which domain of locality) each container gets, and leaves units
open: whether enough is left for all is a sharing problem that `unit_sharing` solves exactly. A dead
end goes back to the latest container that had a part in it. Units are chosen last, each container's
best choice first, limited only as far as the containers after it need. All of it is deterministic.
A step is one try of one container.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec import Struct, structs

from topobus.engine.alignment.cpus.cpu_assignment import take_cpus
from topobus.engine.alignment.merge.dispatch import Merged
from topobus.engine.alignment.merge.fitness import fit_order
from topobus.engine.alignment.merge.preferred_hints import preferred_hints
from topobus.engine.alignment.planning.container_admission import Aligned, align, fill
from topobus.engine.alignment.planning.demand_faults import demand_faults
from topobus.engine.alignment.planning.demands import ContainerDemand
from topobus.engine.alignment.planning.greedy import (
    PlacementTask,
    groups_of,
    locality_reason,
    place_greedily,
    tiers_of,
    total_of,
)
from topobus.engine.alignment.planning.locality_domains import Domain
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.refusal_reasons import Conflict
from topobus.engine.alignment.planning.unit_sharing import Demand, compositions, share
from topobus.values.dra_names import CPU_CLASS
from topobus.values.errors import InvariantError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import ContainerPlacement, Fact, Placement, Reason
from topobus.values.request import ContainerKind, Policy
from topobus.values.view import NodeView

__all__ = ["GaveUp", "Steps", "search"]

# Each container takes three frames of the interpreter's stack, which holds a thousand.
_MOST_CONTAINERS = 128
_ADMITS_ANY = (Policy.NONE, Policy.BEST_EFFORT)


class Steps:
    """A budget of tries.

    Tries and not time: the same view and request give the same answer on any machine.
    """

    __slots__ = ("budget", "left")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.left = budget

    def take(self) -> bool:
        """Spend one try. False when there is none."""
        self.left -= 1
        return self.left >= 0

    @property
    def used(self) -> int:
        """How many tries were spent."""
        return self.budget - max(self.left, 0)


class GaveUp(Struct, frozen=True, kw_only=True):
    """The budget was spent: whether the pod fits is not known."""

    conflict: Conflict
    """What stopped kubelet's order."""
    reason: Reason


class _Option(Struct, frozen=True, kw_only=True):
    """One way to align a group of containers: where each resource may come from."""

    aligned: Aligned | None
    """None: the policy admits anything, so the merge is made when the units are taken."""
    domain: Domain | None
    tier: int
    allowed: Mapping[str, int]
    """Class (`cpu` among them) to units that would do, as bits."""


def search(view: NodeView, task: PlacementTask, conflict: Conflict, steps: Steps) -> Placement | Conflict | GaveUp:
    """Look for another way to place what greedy planning refused with `conflict`."""
    available = NodeAvailability(view)
    for group in () if task.is_pod else groups_of(task):
        alone = place_greedily(available.fork(), structs.replace(task, demands=group))
        if isinstance(alone, Conflict):
            # A container that cannot be placed alone cannot be placed with others.
            return alone
    if len(task.demands) < 2:
        return conflict
    if len(task.demands) > _MOST_CONTAINERS:
        message = (
            f"a pod of {len(task.demands)} containers is not searched (at most {_MOST_CONTAINERS} are): whether "
            "there is another way is not known"
        )
        return GaveUp(
            conflict=conflict,
            reason=Reason(code="gave-up", message=message, facts={"steps": 0, "budget": steps.budget}),
        )
    attempt = _Search(available, task, steps)
    placed = attempt.run()
    who = f"container {conflict.demand.name!r}" if conflict.demand.name else "the pod"
    facts: dict[str, Fact] = {
        "steps": steps.used,
        "container": conflict.demand.name,
    }
    if placed is not None:
        message = f"kubelet's order leaves no room for {who}; this way was found in {steps.used} steps"
        reason = Reason(code="searched", message=message, facts=facts)
        containers = tuple(
            structs.replace(container_placement, reasons=(*container_placement.reasons, reason))
            for container_placement in placed
        )
        return Placement(containers=containers)
    if attempt.is_complete:
        message = f"no other order and no other choice of hints and devices makes room for {who} ({steps.used} steps)"
        return structs.replace(
            conflict, notes=(*conflict.notes, Reason(code="no-other-way", message=message, facts=facts))
        )
    message = (
        f"the search for a way to place all containers together stopped after {steps.used} of {steps.budget} "
        "steps: whether there is one is not known;"
        f" kubelet's order leaves no room for {who}"
    )
    return GaveUp(
        conflict=conflict, reason=Reason(code="gave-up", message=message, facts={**facts, "budget": steps.budget})
    )


class _Search:
    """One search: options of each group, the choices so far, and the budget."""

    def __init__(self, available: NodeAvailability, task: PlacementTask, steps: Steps) -> None:
        self.available = available
        self.task = task
        self.steps = steps
        self.is_complete = True
        """False once anything was cut off: then "not found" does not mean "there is none"."""
        self.names = {name: sorted(devices) for name, devices in available.devices.items()}
        self.bits = {
            name: {each_name: 1 << place for place, each_name in enumerate(names)} for name, names in self.names.items()
        }
        self.groups = groups_of(task)
        self.group_of = {demand.place: number for number, group in enumerate(self.groups) for demand in group}
        self.options = [self._options(group) for group in self.groups]
        self.order = sorted(range(len(self.groups)), key=lambda number: (len(self.options[number]), number))
        self.twins = [self._twin(depth) for depth in range(len(self.order))]
        self.chosen: dict[int, int] = {}
        self.found: list[ContainerPlacement] | None = None
        self.cliques = _cliques(task.demands)
        self.start = {name: self._available(available, name) for name in (*self.names, CPU_CLASS)}

    def run(self) -> list[ContainerPlacement] | None:
        """Search. None when nothing was found."""
        self._descend(0)
        return self.found

    def _descend(self, depth: int) -> set[int]:
        """Choose for the group at this depth and below.

        Return the groups that had a part in the failure.
        """
        if depth == len(self.order):
            self._take_all()
            return set(self.order)
        group, twin = self.order[depth], self.twins[depth]
        blamed: set[int] = set()
        first = self.chosen[twin] if twin is not None else 0
        if twin is not None and first:
            # Two containers that want the same may change places: what the earlier one passed
            # over the later one need not try.
            blamed.add(twin)
        for number in range(first, len(self.options[group])):
            if not self._step():
                return blamed
            self.chosen[group] = number
            clash = self._clash(group)
            if clash is not None:
                blamed |= clash
                continue
            below = self._descend(depth + 1)
            if self.found is not None or self.steps.left < 0:
                return blamed
            if group not in below:
                del self.chosen[group]
                return below
            blamed |= below
        self.chosen.pop(group, None)
        return blamed - {group}

    def _step(self) -> bool:
        if self.steps.take():
            return True
        self.is_complete = False
        return False

    def _options(self, group: Sequence[ContainerDemand]) -> list[_Option]:
        """All ways to align a group, the most local and then the fittest first."""
        total = total_of(self.task, group)
        view, policy = self.available.view, self.task.policy
        fit = fit_order(view.numa_nodes, view.distances if view.options.prefer_closest_numa_nodes else ())
        options: list[_Option] = []
        for tier, domains in enumerate(tiers_of(self.available, self.task, group)):
            for domain in domains:
                fork = self.available.fork(domain.cpus, domain.devices) if domain is not None else self.available.fork()
                if demand_faults(fork, total):
                    continue
                if policy in _ADMITS_ANY:
                    aligned = align(fork, total, policy, is_pod=True) if self.task.is_pod else None
                    if isinstance(aligned, Conflict):
                        raise InvariantError(
                            f"policy {policy.value} admits anything, and turned away what has no fault"
                        )
                    options.append(
                        _Option(aligned=aligned, domain=domain, tier=tier, allowed=self._allowed(total, domain, None))
                    )
                    continue
                lists = fork.hint_lists(total, is_pod=True)
                hints, is_all = preferred_hints(
                    [resource_hints.opinion for resource_hints in lists], view.numa_nodes, policy, fit
                )
                self.is_complete &= is_all
                for hint in hints:
                    aligned = Aligned(lists, Merged(hint=hint, is_admitted=True), policy)
                    bound = {resource_hints.resource for resource_hints in lists if resource_hints.opinion is not None}
                    allowed = self._allowed(total, domain, hint.nodes, bound)
                    options.append(_Option(aligned=aligned, domain=domain, tier=tier, allowed=allowed))
        return options

    def _allowed(
        self, total: ContainerDemand, domain: Domain | None, nodes: NodeSet | None, bound: set[str] | None = None
    ) -> dict[str, int]:
        """Units of each class inside the domain and, for classes with an opinion, inside the node
        set.
        """
        topology = self.available.topology
        cpus = self.available.online.bits
        if nodes is not None and bound and CPU_CLASS in bound:
            near = (
                topology.cpus_of_sockets_of(nodes)
                if self.available.view.options.cpu.align_by_socket
                else topology.cpus_of_nodes(nodes)
            )
            cpus &= near
        if domain is not None and domain.cpus is not None:
            cpus &= domain.cpus.bits
        allowed = {CPU_CLASS: cpus}
        for device_demand in total.devices:
            devices, inside = (
                self.available.devices[device_demand.device_class],
                None if domain is None else domain.devices.get(device_demand.device_class),
            )
            # A service with hints of its own means its masks in its own way: what is
            # outside may be taken, as in kubelet.
            is_bound = (
                nodes is not None
                and bound is not None
                and device_demand.device_class in bound
                and not self._has_own_hints(device_demand.device_class)
            )
            allowed[device_demand.device_class] = sum(
                self.bits[device_demand.device_class][name]
                for name, device in devices.items()
                if (inside is None or name in inside)
                and not (
                    is_bound
                    and nodes is not None
                    and (device.numa_nodes is None or device.numa_nodes.isdisjoint(nodes))
                )
            )
        return allowed

    def _has_own_hints(self, device_class: str) -> bool:
        return any(key.startswith(f"{device_class}/") for key in self.available.view.custom_hints)

    def _twin(self, depth: int) -> int | None:
        """The earlier group that wants exactly the same."""
        if depth == 0:
            return None
        (demand, *more), other = self.groups[self.order[depth]], self.groups[self.order[depth - 1]]
        if (
            more
            or demand.kind is not ContainerKind.APP
            or demand.named_cpus
            or any(device.names for device in demand.devices)
        ):
            return None
        is_same = structs.replace(demand, name="", place=0) == structs.replace(other[0], name="", place=0)
        return self.order[depth - 1] if is_same else None

    def _option(self, demand: ContainerDemand) -> _Option | None:
        group = self.group_of[demand.place]
        return self.options[group][self.chosen[group]] if group in self.chosen else None

    def _demands(self, demand: ContainerDemand, resource: str) -> list[Demand]:
        option = self._option(demand)
        if option is None:
            return []
        if resource == CPU_CLASS:
            named = demand.named_cpus.bits
            return [(option.allowed[CPU_CLASS] & ~named, demand.cpus), (named, named.bit_count())]
        device_demand = demand.of_class(resource)
        named = sum(self.bits[resource][name] for name in device_demand.names)
        apart = sum(self.bits[resource][name] for name in device_demand.excluded)
        return [(option.allowed.get(resource, 0) & ~apart, device_demand.any_count), (named, len(device_demand.names))]

    def _clash(self, group: int) -> set[int] | None:
        """Return the groups that cannot have enough together with this group.

        None when all groups chosen so far can.
        """
        places = {demand.place for demand in self.groups[group]}
        for clique in self.cliques:
            if not any(demand.place in places for demand in clique):
                continue
            for resource in _resources([demand for demand in clique if demand.place in places]):
                if share(self.start[resource], self._all_demands(clique, resource)) is None:
                    others = {self.group_of[demand.place] for demand in clique if resource in _resources([demand])}
                    return (others & self.chosen.keys()) - {group}
        return None

    def _all_demands(self, demands: Sequence[ContainerDemand], resource: str) -> list[Demand]:
        return [unit_demand for demand in demands for unit_demand in self._demands(demand, resource) if unit_demand[1]]

    def _available(self, available: NodeAvailability, resource: str) -> int:
        if resource == CPU_CLASS:
            return (available.free_cpus | available.reusable_cpus).bits
        bits = self.bits[resource]
        return sum(bits[name] for name in available.free[resource] | available.reusable.get(resource, set()))

    def _take_all(self) -> None:
        """Choose the units for all containers by the options chosen."""
        placed = self._take_from(0, self.available.fork())
        if placed is not None:
            self.found = [placed[place] for place in sorted(placed)]

    def _take_from(self, position: int, available: NodeAvailability) -> dict[int, ContainerPlacement] | None:
        if position == len(self.task.demands):
            return {}
        demand = self.task.demands[position]
        group = self.group_of[demand.place]
        option = self.options[group][self.chosen[group]]
        placed, short = self._try(position, available, option, dict(option.allowed))
        if placed is not None or demand.kind is ContainerKind.INIT:
            return placed
        for narrowed in (short, set(_resources([demand]))) if short else ():
            placed, _ = self._try(position, available, option, self._shared_out(position, available, option, narrowed))
            if placed is not None:
                return placed
        if demand.kind is ContainerKind.SIDECAR and any(
            container_demand.kind is ContainerKind.INIT for container_demand in self.task.demands[position + 1 :]
        ):
            for limits in self._all_shares(position, available, option):
                placed, _ = self._try(position, available, option, limits)
                if placed is not None or self.steps.left < 0:
                    return placed
        return None

    def _try(
        self, position: int, available: NodeAvailability, option: _Option, limits: Mapping[str, int]
    ) -> tuple[dict[int, ContainerPlacement] | None, set[str]]:
        """Take one container's units within limits, and then those of all containers after it.

        Shapes: result — the placements, None when that fails; and the resources of which too little
                would be left for the containers after it.
        """
        demand = self.task.demands[position]
        if not self._step():
            return None, set()
        cpus = CpuSet.from_bits(limits[CPU_CLASS] | demand.named_cpus.bits)
        devices = {
            resource: {name for name, bit in self.bits[resource].items() if bit & bits}
            | set(demand.of_class(resource).names)
            for resource, bits in limits.items()
            if resource != CPU_CLASS
        }
        fork = available.fork(cpus, devices)
        aligned = option.aligned or align(fork, demand, self.task.policy, is_pod=False)
        if isinstance(aligned, Conflict):
            return None, set()
        placed = fill(fork, demand, aligned)
        if isinstance(placed, Conflict):
            return None, set()
        after = available.fork()
        after.absorb(fork, cpus, devices)
        short = self._short(position + 1, after)
        if short:
            return None, short
        rest = self._take_from(position + 1, after)
        if rest is None:
            return None, set()
        reason = locality_reason(self.task, option.domain, option.tier)
        return {
            demand.place: structs.replace(placed, reasons=(*placed.reasons, reason)) if reason is not None else placed,
            **rest,
        }, set()

    def _short(self, position: int, available: NodeAvailability) -> set[str]:
        """Resources of which the containers from here on cannot all have enough."""
        coming = {demand.place for demand in self.task.demands[position:]}
        short: set[str] = set()
        for clique in self.cliques:
            left = [demand for demand in clique if demand.place in coming]
            if clique[-1].place not in coming:
                continue
            for resource in _resources(left):
                if (
                    resource not in short
                    and share(self._available(available, resource), self._all_demands(left, resource)) is None
                ):
                    short.add(resource)
        return short

    def _shared_out(
        self, position: int, available: NodeAvailability, option: _Option, resources: set[str]
    ) -> dict[str, int]:
        """Limit these resources to units that leave enough for all that run together with the
        container.

        Such units always exist: for the first container `_clash` has found that all can have
        enough, and for each later one `_short` has, when those before it were taken.
        """
        demand = self.task.demands[position]
        limits = dict(option.allowed)
        coming = {container_demand.place for container_demand in self.task.demands[position + 1 :]}
        others = [clique for clique in self.cliques[0] if clique.place in coming]
        for resource in sorted(resources & set(_resources([demand]))):
            unit_demands = self._demands(demand, resource)
            shares = share(self._available(available, resource), [*unit_demands, *self._all_demands(others, resource)])
            if shares is None:
                raise InvariantError(
                    f"{resource} cannot be shared among containers for which it was found to be enough"
                )
            limits[resource] = self._pick(available, resource, shares[0])
        return limits

    def _all_shares(self, position: int, available: NodeAvailability, option: _Option) -> Iterator[dict[str, int]]:
        """Every way to take a container's units by kind. A kind is the units that the same
        containers may use.
        """
        demand = self.task.demands[position]
        resources = sorted(_resources([demand]))
        ways: list[list[int]] = []
        for resource in resources:
            allowed, count = self._demands(demand, resource)[0]
            kinds = [self._available(available, resource) & allowed]
            for other, _ in self._all_demands(list(self.task.demands[position + 1 :]), resource):
                kinds = [part for kind in kinds for part in (kind & other, kind & ~other) if part]
            ways.append([self._pick(available, resource, parts) for parts in compositions(kinds, count)])
        for chosen in product(*ways):
            yield {**option.allowed, **dict(zip(resources, chosen, strict=True))}

    def _pick(self, available: NodeAvailability, resource: str, parts: Mapping[int, int]) -> int:
        """Pick the given number of units of each kind: first those that can be used again, then
        whole cores, then the first by name.
        """
        bits = 0
        for kind, count in sorted(parts.items()):
            if resource == CPU_CLASS:
                taken = (
                    take_cpus(available.topology, CpuSet.from_bits(kind), count, available.view.options.cpu) or CpuSet()
                )
                bits |= taken.bits
                continue
            again = available.reusable.get(resource, set())
            names = [name for name in self.names[resource] if self.bits[resource][name] & kind]
            bits |= sum(
                self.bits[resource][name] for name in sorted(names, key=lambda name: (name not in again, name))[:count]
            )
        return bits


def _resources(demands: Sequence[ContainerDemand]) -> list[str]:
    device_classes = {device.device_class for demand in demands for device in demand.devices if device.count}
    if any(demand.cpus or demand.named_cpus for demand in demands):
        device_classes.add(CPU_CLASS)
    return sorted(device_classes)


def _cliques(demands: Sequence[ContainerDemand]) -> list[list[ContainerDemand]]:
    """Containers that hold units at the same time: all sidecars and app containers, and each init
    container with the sidecars before it (itself last).
    """
    staying = [demand for demand in demands if demand.kind is not ContainerKind.INIT]
    cliques = [staying] if staying else []
    for position, demand in enumerate(demands):
        if demand.kind is ContainerKind.INIT:
            cliques.append(
                [
                    *(
                        container_demand
                        for container_demand in demands[:position]
                        if container_demand.kind is ContainerKind.SIDECAR
                    ),
                    demand,
                ]
            )
    return cliques
