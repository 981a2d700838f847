"""Faults that make a demand impossible whatever the alignment: devices that are unknown, held or
unhealthy, or fewer than wanted.

One reason for each fault, with stable codes. Nothing is taken here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from topobus.engine.alignment.planning.demands import ContainerDemand, DeviceDemand
from topobus.engine.alignment.planning.node_availability import NodeAvailability
from topobus.engine.alignment.planning.node_view import cpu_name
from topobus.values.dra_names import CPU_CLASS
from topobus.values.names import meant_name
from topobus.values.node_text import counted, first_of
from topobus.values.outcome import Reason
from topobus.values.resource_names import CLASS_RESOURCE_PREFIX, RESOURCE_PREFIX, is_resource_name, similar_class
from topobus.values.view import NodeView

__all__ = ["demand_faults"]


def demand_faults(available: NodeAvailability, demand: ContainerDemand) -> list[Reason]:
    """List the faults that make a demand impossible whatever the alignment. Empty when there is
    none.
    """
    unheard = available.view.unheard_classes
    reasons = [_unheard(demand, name, unheard[name]) for name in sorted(_wanted(demand) & unheard.keys())]
    if CPU_CLASS not in unheard:
        reasons += _cpu_faults(available, demand)
    for device in demand.devices:
        if device.count and device.device_class in unheard:
            continue
        if is_resource_name(device.device_class):
            reasons.append(
                demand.unmet(
                    "unknown-resource", _unknown_resource(available.view, device.device_class), device.device_class
                )
            )
            continue
        if device.device_class not in available.devices:
            classes = sorted({*available.devices, CPU_CLASS})
            meant = meant_name(device.device_class, classes)
            reasons.append(
                demand.unmet(
                    "unknown-class",
                    f"no device service on this node offers class {device.device_class!r}"
                    f"; {f'did you mean {meant}? ' if meant else ''}there are {', '.join(classes)}",
                    device.device_class,
                )
            )
            continue
        named = [*_name_faults(available, demand, device)]
        reasons += named
        exists, free = available.devices[device.device_class], available.usable(device.device_class)
        if not named and device.any_count > len(free - device.excluded):
            reasons.append(_too_few(available, demand, device, len(exists), len(free)))
    return reasons


def _cpu_faults(available: NodeAvailability, demand: ContainerDemand) -> Iterable[Reason]:
    for cpu in demand.named_cpus:
        name = cpu_name(cpu)
        owner = next((key for key, cpus in sorted(available.view.held_cpus.items()) if cpu in cpus), None)
        if cpu not in available.online:
            yield demand.unmet("unknown-device", f"{name} is not an online CPU of this node", CPU_CLASS, device=name)
        elif owner is not None:
            yield demand.unmet("device-held", f"{name} is held by {owner}", CPU_CLASS, device=name, owner=owner)
        elif cpu in available.view.unhealthy_cpus:
            yield demand.unmet("device-unhealthy", f"{name} is not healthy", CPU_CLASS, device=name)
        elif cpu in available.view.reserved_cpus:
            yield demand.unmet("cpu-reserved", f"{name} is reserved for the system", CPU_CLASS, device=name)
    usable = len((available.free_cpus | available.reusable_cpus) - demand.named_cpus)
    threads = available.topology.threads_per_core
    if demand.cpus > usable:
        yield demand.unmet(
            "not-enough-cpus",
            f"wants {demand.cpus} exclusive CPUs; of {len(available.online)} online ones {usable} can be had"
            f" ({len(available.held_cpus & available.online)} held, "
            f"{len(available.view.reserved_cpus & available.online)} reserved{_own_part(available.own_cpus)})",
            CPU_CLASS,
            wanted=demand.cpus,
            free=usable,
            exists=len(available.online),
            held=len(available.held_cpus & available.online),
            reserved=len(available.view.reserved_cpus & available.online),
        )
    elif available.view.options.cpu.full_pcpus_only and demand.cpus % threads:
        yield demand.unmet(
            "smt-alignment",
            f"full-pcpus-only wants whole cores of {threads} CPUs, got {demand.cpus}",
            CPU_CLASS,
            wanted=demand.cpus,
            threads=threads,
        )
    elif available.view.options.cpu.full_pcpus_only:
        whole = (
            available.free_cpus - available.topology.siblings_of(available.view.reserved_cpus)
        ) | available.reusable_cpus
        if demand.cpus > len(whole):
            yield demand.unmet(
                "smt-alignment",
                f"full-pcpus-only leaves {len(whole)} CPUs outside the cores with reserved CPUs, wanted {demand.cpus}",
                CPU_CLASS,
                wanted=demand.cpus,
                free=len(whole),
            )


def _unknown_resource(view: NodeView, resource: str) -> str:
    """Explain that no service here has a resource, and which class has a similar one."""
    lacking = f"no device service on this node offers {resource}"
    if resource.startswith(CLASS_RESOURCE_PREFIX):
        name = resource.removeprefix(CLASS_RESOURCE_PREFIX)
        return (
            f"{lacking}: it asks for a claim of DeviceClass {name}, which the controller makes of a stored pod "
            "when there is such a class"
        )
    near = get_close_matches(resource, view.resource_names, n=1, cutoff=0.85)
    if near:
        return f"{lacking}; {near[0]} is offered by its device plugin: did you mean it?"
    alike = similar_class(resource, view.devices)
    if alike:
        drivers = sorted({device.driver for device in view.devices[alike] if device.driver})
        by = f" by {'driver' if len(drivers) == 1 else 'drivers'} {', '.join(drivers)}" if drivers else ""
        return f"{lacking}; {RESOURCE_PREFIX}{alike} is offered{by}: did you mean it?"
    resources = ", ".join(sorted({*(f"{RESOURCE_PREFIX}{name}" for name in view.devices), *view.resource_names}))
    return f"{lacking}; there are {resources or 'none'}"


def _name_faults(available: NodeAvailability, demand: ContainerDemand, device_demand: DeviceDemand) -> Iterable[Reason]:
    held = available.view.held_devices.get(device_demand.device_class, {})
    for name in (*device_demand.names, *device_demand.shared):
        device = available.devices[device_demand.device_class].get(name)
        if device is None:
            yield demand.unmet(
                "unknown-device",
                f"there is no {device_demand.device_class} named {name!r} on this node",
                device_demand.device_class,
                device=name,
            )
        elif name in device_demand.shared:
            continue
        elif name in held:
            yield demand.unmet(
                "device-held",
                f"{name} is held by {held[name]}",
                device_demand.device_class,
                device=name,
                owner=held[name],
            )
        elif device.maintenance is not None:
            yield demand.unmet(
                "device-kept-back", f"{name} is {device.why_not}", device_demand.device_class, device=name
            )
        elif not device.is_allocatable:
            state, worst = device.health.state.value, device.health.worst
            why = f": {worst.reason}" if worst is not None else ""
            yield demand.unmet(
                "device-unhealthy", f"{name} is {state}{why}", device_demand.device_class, device=name, state=state
            )
        elif name not in available.usable(device_demand.device_class):
            yield demand.unmet(
                "device-held",
                f"{name} is taken by {_user(available, device_demand.device_class, name)} of this pod",
                device_demand.device_class,
                device=name,
                owner="this pod",
            )


def _user(available: NodeAvailability, device_class: str, name: str) -> str:
    container = available.own.get(device_class, {}).get(name)
    return f"container {container!r}" if container is not None else "another container"


def _too_few(
    available: NodeAvailability, demand: ContainerDemand, device_demand: DeviceDemand, exists: int, free: int
) -> Reason:
    of_class = available.devices[device_demand.device_class]
    held_names = available.view.held_devices.get(device_demand.device_class, {}).keys() & of_class.keys()
    held = len(held_names)
    # A device that is held and unhealthy counts as held: each device is counted once.
    others = [
        device for name, device in sorted(of_class.items()) if name not in held_names and not device.is_allocatable
    ]
    withheld = sum(device.maintenance is not None for device in others)
    spares = sum(device.is_fit for device in others)
    sick = len(others) - withheld - spares
    also = f", {withheld} withheld by an operator" if withheld else ""
    also += f", {counted(spares, 'spare')}" if spares else ""
    own = Counter(available.own.get(device_demand.device_class, {}).values())
    also += _own_part(own)
    shown = first_of([f"{device.name} {device.why_not}" for device in others])
    return demand.unmet(
        "not-enough-devices",
        f"wants {device_demand.count} {device_demand.device_class}; of {exists} on this node {free} can be "
        f"had ({held} held, {sick} not healthy{also})" + (f": {shown}" if shown else ""),
        device_demand.device_class,
        wanted=device_demand.count,
        free=free,
        exists=exists,
        held=held,
        unhealthy=sick,
        own=own.total(),
    )


def _own_part(own: Mapping[str, int]) -> str:
    """List what other containers of the same pod keep, sidecars above all."""
    return "".join(f", {count} with container {name!r} of this pod" for name, count in sorted(own.items()))


def _wanted(demand: ContainerDemand) -> set[str]:
    """Return the classes of which devices are to be held.

    A class that is only accessed with admin access needs no answer of its service.
    """
    cpus = {CPU_CLASS} if demand.cpus or demand.named_cpus else set()
    return cpus | {device.device_class for device in demand.devices if device.count}


def _unheard(demand: ContainerDemand, device_class: str, since: str) -> Reason:
    message = (
        f"the {device_class} service has not answered since {since}: how its devices are is unknown, so none is "
        "handed out"
    )
    return demand.unmet("service-silent", message, device_class, since=since)
