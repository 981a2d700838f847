"""Judge a placement, and find one by trying everything: written from kubelet's rules alone, sharing
no code with the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations

from topobus.values.outcome import Placement
from topobus.values.request import ContainerKind, ContainerRequest, LocalityLevel, PodRequest, Policy, Scope
from topobus.values.view import NodeView

__all__ = ["fits", "mistakes"]

Unit = tuple[str, str]
"""Class and name; CPUs by number."""


def mistakes(view: NodeView, request: PodRequest, placement: Placement) -> list[str]:
    """Say what is wrong with a placement; nothing when every promise is kept."""
    wrong: list[str] = []
    scope = request.scope or view.options.scope
    got = {
        container.name: {(cls, name) for cls, names in container.devices.items() for name in names}
        for container in placement.containers
    }
    for container in placement.containers:
        got[container.name] |= {("cpu", str(cpu)) for cpu in container.cpus}
    free = _free(view)
    for want in request.containers:
        units = got[want.name]
        for resource, count in _wanted(want).items():
            if sum(1 for unit in units if unit[0] == resource) != count:
                wrong.append(f"{want.name} has not {count} {resource}: {sorted(units)}")
        if len(units) != sum(_wanted(want).values()):
            wrong.append(f"{want.name} has what it did not ask for: {sorted(units)}")
        wrong += [f"{want.name} has {unit}, which is not free" for unit in sorted(units - free)]
        if scope is Scope.CONTAINER and not any(units <= usable for usable in _places(view, request, _wanted(want))):
            wrong.append(f"{want.name}: nothing that policy and locality admit holds {sorted(units)}")
    if scope is Scope.POD:
        everything = set().union(*got.values())
        if not any(everything <= usable for usable in _places(view, request, _total(request))):
            wrong.append("nothing that policy and locality admit holds the pod")
    staying: set[Unit] = set()
    for want in _ordered(request):
        units = got[want.name]
        wrong += [
            f"{want.name} has {unit}, which another container of the pod holds" for unit in sorted(units & staying)
        ]
        if want.kind is not ContainerKind.INIT:
            staying |= units
    return wrong


def fits(view: NodeView, request: PodRequest) -> bool:
    """Say whether any placement at all is right, by trying all of them."""
    if (request.scope or view.options.scope) is Scope.POD:
        return any(
            _fits_in(view, request, {want.name: [usable] for want in request.containers})
            for usable in _places(view, request, _total(request))
        )
    return _fits_in(view, request, {want.name: _places(view, request, _wanted(want)) for want in request.containers})


def _fits_in(view: NodeView, request: PodRequest, places: Mapping[str, list[set[Unit]]]) -> bool:
    wants = _ordered(request)
    free = _free(view)

    @cache
    def rest_fits(position: int, staying: frozenset[Unit]) -> bool:
        if position == len(wants):
            return True
        want = wants[position]
        wanted = _wanted(want)
        tried: set[frozenset[Unit]] = set()
        for place in places[want.name]:
            for chosen in _choices((free - staying) & place, wanted):
                if want.kind is ContainerKind.INIT:
                    return rest_fits(position + 1, staying)
                if chosen not in tried:
                    tried.add(chosen)
                    if rest_fits(position + 1, staying | chosen):
                        return True
        return False

    return rest_fits(0, frozenset())


def _places(view: NodeView, request: PodRequest, wanted: Mapping[str, int]) -> list[set[Unit]]:
    """Sets of units that policy and hard localities admit for these amounts: all of them must come
    out of one such set.
    """
    policy = request.policy or view.options.policy
    admitted = [_units_in(view, mask, set(wanted)) for mask in _masks(view, wanted, policy)]
    for locality in request.locality:
        if locality.is_hard and any(wanted.values()):
            admitted = [usable & domain for usable in admitted for domain in _domains(view, locality.level)]
    return admitted


def _domains(view: NodeView, level: LocalityLevel) -> list[set[Unit]]:
    """What lies within one NUMA node, or under one switch (CPUs: on the NUMA nodes of what is under
    it).
    """
    homes = {resource: _homes(view, resource) for resource in ("cpu", *view.devices)}
    if level is LocalityLevel.NUMA:
        return [
            {(name, unit) for name, units in homes.items() for unit, where in units.items() if where and node in where}
            for node in view.numa_nodes
        ]
    assert level is LocalityLevel.SWITCH
    switches = {
        device.pcie_switch for devices in view.devices.values() for device in devices if device.pcie_switch is not None
    }
    domains: list[set[Unit]] = []
    for switch in switches:
        under = {
            (name, device.name)
            for name, devices in view.devices.items()
            for device in devices
            if device.pcie_switch == switch
        }
        near = {node for name, unit in under for node in homes[name][unit] or ()}
        domains.append(under | {("cpu", cpu) for cpu, where in homes["cpu"].items() if where and where & near})
    return domains


def _choices(usable: set[Unit], wanted: Mapping[str, int]) -> Iterator[frozenset[Unit]]:
    chosen: list[frozenset[Unit]] = [frozenset()]
    for resource, count in sorted(wanted.items()):
        units = sorted(unit for unit in usable if unit[0] == resource)
        chosen = [old | frozenset(new) for old in chosen for new in combinations(units, count)]
    yield from chosen


def _ordered(request: PodRequest) -> list[ContainerRequest]:
    return sorted(request.containers, key=lambda container: container.kind is ContainerKind.APP)


def _wanted(want: ContainerRequest) -> dict[str, int]:
    wanted = {device.device_class: device.count for device in want.devices}
    return {**wanted, "cpu": want.cpus} if want.cpus else wanted


def _total(request: PodRequest) -> dict[str, int]:
    total: dict[str, int] = {}
    wants = _ordered(request)
    for resource in {name for want in wants for name in _wanted(want)}:
        staying = peak = 0
        for want in wants:
            count = _wanted(want).get(resource, 0)
            if want.kind is ContainerKind.INIT:
                peak = max(peak, staying + count)
            else:
                staying += count
        total[resource] = max(peak, staying)
    return total


def _homes(view: NodeView, resource: str) -> dict[str, frozenset[int] | None]:
    """Every unit of a resource, busy and sick ones too, and its NUMA nodes."""
    if resource == "cpu":
        return {
            str(cpu): None if core.numa_node is None else frozenset([core.numa_node])
            for core in view.cores
            for cpu in core.cpus
        }
    return {
        device.name: None if not device.numa_nodes else frozenset(device.numa_nodes)
        for device in view.devices[resource]
    }


def _free(view: NodeView) -> set[Unit]:
    held = (
        {cpu for cpus in view.held_cpus.values() for cpu in cpus} | set(view.reserved_cpus) | set(view.unhealthy_cpus)
    )
    free = {("cpu", str(cpu)) for core in view.cores for cpu in core.cpus if cpu not in held}
    for name, devices in view.devices.items():
        free |= {
            (name, device.name)
            for device in devices
            if device.health.is_allocatable and device.name not in view.held_devices.get(name, {})
        }
    return free


def _units_in(view: NodeView, mask: frozenset[int] | None, classes: set[str]) -> set[Unit]:
    """Units inside a node set. A class without known nodes is inside everything."""
    units: set[Unit] = set()
    for resource in {"cpu", *view.devices}:
        homes = _homes(view, resource)
        is_bound = mask is not None and resource in classes and any(homes.values())
        units |= {
            (resource, name)
            for name, nodes in homes.items()
            if not is_bound or (nodes is not None and mask is not None and nodes & mask)
        }
    return units


def _masks(view: NodeView, wanted: Mapping[str, int], policy: Policy) -> list[frozenset[int] | None]:
    """Node sets that the policy admits for these amounts on the node as it is.

    None is "anywhere".
    """
    free = _free(view)
    if policy in (Policy.NONE, Policy.BEST_EFFORT):
        return [None]
    common: set[frozenset[int]] | None = None
    for resource, count in wanted.items():
        homes = _homes(view, resource)
        if count and any(homes.values()):
            nodes = sorted({node for where in homes.values() if where for node in where})
            masks = [
                frozenset(combination) for size in range(1, len(nodes) + 1) for combination in combinations(nodes, size)
            ]
            touching = {mask: [name for name, where in homes.items() if where and where & mask] for mask in masks}
            widths = [len(mask) for mask in masks if len(touching[mask]) >= count]
            admitted = {
                mask
                for mask in masks
                if widths
                and len(mask) == min(widths)
                and sum((resource, name) in free for name in touching[mask]) >= count
            }
            common = admitted if common is None else common & admitted
    if common is None:
        return [None]
    return [mask for mask in sorted(common, key=sorted) if policy is Policy.RESTRICTED or len(mask) == 1]
