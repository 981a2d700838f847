"""What is free on a node while a pod is being planned: hints come out of it, CPUs and devices are taken from it, one container after the other.

Flows in: a NodeView. Flows out: hint lists a container, and what it takes inside an alignment, or the reasons why it cannot. Reuse follows kubelet:
what an init container held may be taken again by later containers of the same pod.
Source: kubelet 1.36 cm/{cpumanager/policy_static,devicemanager/manager}.go.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from topobus.domain.alignment.cpus.cpu_assignment import assign_cpus
from topobus.domain.alignment.cpus.cpu_hints import cpu_rule
from topobus.domain.alignment.cpus.cpu_topology import CpuTopology
from topobus.domain.alignment.devices.device_choice import Choice, Neighbours, choose_devices, split_by_affinity
from topobus.domain.alignment.devices.device_hints import device_rule
from topobus.domain.alignment.devices.proximity import Site, site_of, socket_of_nodes
from topobus.domain.alignment.memory.available_memory import AvailableMemory
from topobus.domain.alignment.planning.demands import ContainerDemand, DeviceDemand
from topobus.domain.alignment.planning.locality_domains import LocalityTopology
from topobus.domain.alignment.planning.node_view import CPU_CLASS, MEMORY, cpu_name
from topobus.domain.alignment.planning.resource_hints import ContainerAllocation, ResourceHints
from topobus.domain.hint import Hint
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.outcome import Reason
from topobus.domain.request import ContainerKind
from topobus.domain.resource_names import CLASS_RESOURCE_PREFIX, RESOURCE_PREFIX, is_resource_name, similar_class
from topobus.domain.view import NodeView, PlanMode

__all__ = ["NodeAvailability"]


class NodeAvailability:
    """The free part of one node during one plan. Mutable, private to a plan."""

    def __init__(self, view: NodeView) -> None:
        self.view = view
        self.topology = CpuTopology.of_cores(view.cores)
        self.online = CpuSet.from_bits(self.topology.all_bits)
        held = CpuSet()
        for cpus in view.held_cpus.values():
            held |= cpus
        self.held_cpus = held
        self.free_cpus = self.online - held - view.reserved_cpus - view.unhealthy_cpus
        self.devices = {name: {device.name: device for device in devices} for name, devices in view.devices.items()}
        self.free = {
            name: {
                device.name
                for device in devices.values()
                if device.health.is_allocatable and device.name not in view.held_devices.get(name, {})
            }
            for name, devices in self.devices.items()
        }
        self.memory = AvailableMemory.of(view)
        self.reusable_cpus = CpuSet()
        self.reusable: dict[str, set[str]] = {}
        self._sockets = socket_of_nodes(view.cores)
        self._sites: dict[str, dict[str, Site]] = {}

    def sites(self, device_class: str) -> Mapping[str, Site]:
        """Where the devices of a class sit."""
        if device_class not in self._sites:
            self._sites[device_class] = {
                device.name: site_of(device, self._sockets) for device in self.devices.get(device_class, {}).values()
            }
        return self._sites[device_class]

    def places(self) -> LocalityTopology:
        """What is where, for locality."""
        topology = self.topology
        return LocalityTopology(
            devices=self.devices,
            sites=self.sites,
            nodes=self.view.numa_nodes,
            online=self.online,
            by_numa=topology.by_numa,
            by_socket=topology.by_socket,
            by_l3=topology.by_l3,
        )

    def fork(self, cpus: CpuSet | None = None, devices: Mapping[str, Collection[str]] | None = None) -> NodeAvailability:
        """A room of its own with what is free in this one, as far as it lies within the limits; None and absent classes are not limited."""
        made = copy.copy(self)
        limits = devices or {}
        made.free = {name: names & frozenset(limits[name]) if name in limits else set(names) for name, names in self.free.items()}
        made.reusable = {name: names & frozenset(limits[name]) if name in limits else set(names) for name, names in self.reusable.items()}
        if cpus is not None:
            made.free_cpus &= cpus
            made.reusable_cpus &= cpus
        return made

    def absorb(self, fork: NodeAvailability, cpus: CpuSet | None = None, devices: Mapping[str, Collection[str]] | None = None) -> None:
        """Take over what happened in a fork that was made with these limits."""
        self.memory = fork.memory
        limits = devices or {}
        for mine, theirs in ((self.free, fork.free), (self.reusable, fork.reusable)):
            for name, names in theirs.items():
                mine[name] = (mine.get(name, set()) - frozenset(limits[name])) | names if name in limits else set(names)
        if cpus is None:
            self.free_cpus, self.reusable_cpus = fork.free_cpus, fork.reusable_cpus
        else:
            self.free_cpus = (self.free_cpus - cpus) | fork.free_cpus
            self.reusable_cpus = (self.reusable_cpus - cpus) | fork.reusable_cpus

    def faults(self, want: ContainerDemand) -> list[Reason]:
        """Say what makes a want impossible whatever the alignment: unknown things, held or sick ones, too few."""
        unheard = self.view.unheard_classes
        reasons = [_unheard(want, name, unheard[name]) for name in sorted(_wanted(want) & unheard.keys())]
        if CPU_CLASS not in unheard:
            reasons += self._cpu_faults(want)
        for device in want.devices:
            if device.count and device.device_class in unheard:
                continue
            if is_resource_name(device.device_class):
                reasons.append(_fault(want, "unknown-resource", self._nobody_offers(device.device_class), device.device_class))
                continue
            if device.device_class not in self.devices:
                known = ", ".join(sorted({*self.devices, CPU_CLASS}))
                reasons.append(
                    _fault(
                        want,
                        "unknown-class",
                        f"no device service on this node offers class {device.device_class!r}; there are {known}",
                        device.device_class,
                    )
                )
                continue
            named = [*self._name_faults(want, device)]
            reasons += named
            exists, free = self.devices[device.device_class], self._usable(device.device_class)
            if not named and device.any_count > len(free - device.spoken_for):
                reasons.append(self._too_few(want, device, len(exists), len(free)))
        return reasons

    def hint_lists(self, want: ContainerDemand, *, is_pod: bool = False) -> list[ResourceHints]:
        """Collect one hint list a resource; pod scope starts without anything to reuse."""
        lists: list[ResourceHints] = []
        reusable_cpus = CpuSet() if is_pod else self.reusable_cpus
        if want.cpus:
            opinion = cpu_rule(
                self.topology.cpus_by_node(),
                self.free_cpus - want.named_cpus,
                want.cpus,
                reusable=reusable_cpus - want.named_cpus,
                sockets=self.topology.sockets_by_node() if self.view.options.cpu.align_by_socket else None,
            )
            lists.append(ResourceHints(resource=CPU_CLASS, opinion=opinion if self.topology.by_numa else None))
        if want.named_cpus:
            homes = {node: cpus & want.named_cpus for node, cpus in self.topology.cpus_by_node().items()}
            opinion = cpu_rule(homes, want.named_cpus, len(want.named_cpus)) if any(homes.values()) else None
            lists.append(ResourceHints(resource=f"{CPU_CLASS} (named)", opinion=opinion))
        for device in want.devices:
            lists += self._device_lists(device, reusable=set() if is_pod else self.reusable.get(device.device_class, set()))
        return [*lists, *self._memory_lists(want, is_pod=is_pod)]

    def take(self, want: ContainerDemand, hint: Hint) -> ContainerAllocation | list[Reason]:
        """Take what a container wants, inside the alignment first; the reasons when that fails. Updates what is free and what may be reused."""
        nodes = hint.nodes
        blocks = self.memory.take(want.memory, hint, want.kind)
        if isinstance(blocks, Reason):
            return [_fault(want, blocks.code, blocks.message, MEMORY)]
        cpus = CpuSet()
        if want.cpus:
            assigned = assign_cpus(
                self.topology, (self.free_cpus | self.reusable_cpus) - want.named_cpus, want.cpus, nodes, self.view.options.cpu
            )
            if assigned is None:
                return [_fault(want, "not-enough-cpus", f"{want.cpus} exclusive CPUs cannot be taken together", CPU_CLASS)]
            cpus = assigned
        cpus |= want.named_cpus
        devices: dict[str, tuple[str, ...]] = {}
        choices: dict[str, Choice] = {}
        outside: dict[str, tuple[str, ...]] = {}
        waiting = sorted(
            want.devices,
            key=lambda device_demand: (
                not any(device.links for device in self.devices[device_demand.device_class].values()),
                device_demand.device_class,
            ),
        )
        for place, device_demand in enumerate(waiting):
            choice, strays = self._choose(device_demand, nodes, self._company(device_demand, devices, waiting[place + 1 :], nodes))
            devices[device_demand.device_class] = tuple(sorted({*choice.names, *device_demand.shared}))
            if device_demand.any_count:
                choices[device_demand.device_class] = choice
            if strays:
                outside[device_demand.device_class] = strays
            self._keep_devices(want.kind, device_demand, set(choice.names))
        self._keep_cpus(want.kind, cpus)
        memory, self.memory = blocks
        return ContainerAllocation(
            cpus=cpus,
            devices=dict(sorted(devices.items())),
            memory=memory,
            numa_nodes=self._touched(cpus, devices),
            choices=choices,
            outside=outside,
        )

    def _cpu_faults(self, want: ContainerDemand) -> Iterable[Reason]:
        for cpu in want.named_cpus:
            name = cpu_name(cpu)
            owner = next((key for key, cpus in sorted(self.view.held_cpus.items()) if cpu in cpus), None)
            if cpu not in self.online:
                yield _fault(want, "unknown-device", f"{name} is not an online CPU of this node", CPU_CLASS, device=name)
            elif owner is not None:
                yield _fault(want, "device-held", f"{name} is held by {owner}", CPU_CLASS, device=name, owner=owner)
            elif cpu in self.view.unhealthy_cpus:
                yield _fault(want, "device-unhealthy", f"{name} is not healthy", CPU_CLASS, device=name)
            elif cpu in self.view.reserved_cpus:
                yield _fault(want, "cpu-reserved", f"{name} is reserved for the system", CPU_CLASS, device=name)
        usable = len((self.free_cpus | self.reusable_cpus) - want.named_cpus)
        threads = self.topology.threads_per_core
        if want.cpus > usable:
            yield _fault(
                want,
                "not-enough-cpus",
                f"wants {want.cpus} exclusive CPUs; of {len(self.online)} online ones {usable} can be had"
                f" ({len(self.held_cpus & self.online)} held, {len(self.view.reserved_cpus & self.online)} reserved)",
                CPU_CLASS,
                wanted=want.cpus,
                free=usable,
                exists=len(self.online),
                held=len(self.held_cpus & self.online),
                reserved=len(self.view.reserved_cpus & self.online),
            )
        elif self.view.options.cpu.full_pcpus_only and want.cpus % threads:
            yield _fault(
                want,
                "smt-alignment",
                f"full-pcpus-only wants whole cores of {threads} CPUs, got {want.cpus}",
                CPU_CLASS,
                wanted=want.cpus,
                threads=threads,
            )
        elif self.view.options.cpu.full_pcpus_only:
            whole = (self.free_cpus - self.topology.siblings_of(self.view.reserved_cpus)) | self.reusable_cpus
            if want.cpus > len(whole):
                yield _fault(
                    want,
                    "smt-alignment",
                    f"full-pcpus-only leaves {len(whole)} CPUs outside the cores with reserved CPUs, wanted {want.cpus}",
                    CPU_CLASS,
                    wanted=want.cpus,
                    free=len(whole),
                )

    def _nobody_offers(self, resource: str) -> str:
        """Say that no service here has a resource, and who has something like it."""
        lacking = f"no device service on this node offers {resource}"
        if resource.startswith(CLASS_RESOURCE_PREFIX):
            name = resource.removeprefix(CLASS_RESOURCE_PREFIX)
            return f"{lacking}: it asks for a claim of DeviceClass {name}, which the controller makes of a stored pod when there is such a class"
        near = get_close_matches(resource, self.view.resource_names, n=1, cutoff=0.85)
        if near:
            return f"{lacking}; {near[0]} is offered by its device plugin: did you mean it?"
        alike = similar_class(resource, self.view.devices)
        if alike:
            drivers = sorted({device.driver for device in self.view.devices[alike] if device.driver})
            by = f" by {'driver' if len(drivers) == 1 else 'drivers'} {', '.join(drivers)}" if drivers else ""
            return f"{lacking}; {RESOURCE_PREFIX}{alike} is offered{by}: did you mean it?"
        known = ", ".join(sorted({*(f"{RESOURCE_PREFIX}{name}" for name in self.view.devices), *self.view.resource_names}))
        return f"{lacking}; there are {known or 'none'}"

    def _name_faults(self, want: ContainerDemand, device_demand: DeviceDemand) -> Iterable[Reason]:
        held = self.view.held_devices.get(device_demand.device_class, {})
        for name in (*device_demand.names, *device_demand.shared):
            device = self.devices[device_demand.device_class].get(name)
            if device is None:
                yield _fault(
                    want,
                    "unknown-device",
                    f"there is no {device_demand.device_class} named {name!r} on this node",
                    device_demand.device_class,
                    device=name,
                )
            elif name in device_demand.shared:
                continue
            elif name in held:
                yield _fault(
                    want, "device-held", f"{name} is held by {held[name]}", device_demand.device_class, device=name, owner=held[name]
                )
            elif not device.health.is_allocatable:
                state, worst = device.health.state.value, device.health.worst
                why = f": {worst.reason}" if worst is not None else ""
                yield _fault(want, "device-unhealthy", f"{name} is {state}{why}", device_demand.device_class, device=name, state=state)
            elif name not in self._usable(device_demand.device_class):
                yield _fault(
                    want,
                    "device-held",
                    f"{name} is taken by another container of this pod",
                    device_demand.device_class,
                    device=name,
                    owner="this pod",
                )

    def _too_few(self, want: ContainerDemand, device_demand: DeviceDemand, exists: int, free: int) -> Reason:
        held = len(self.view.held_devices.get(device_demand.device_class, {}).keys() & self.devices[device_demand.device_class].keys())
        sick = sum(not device.health.is_allocatable for device in self.devices[device_demand.device_class].values())
        return _fault(
            want,
            "not-enough-devices",
            f"wants {device_demand.count} {device_demand.device_class}; of {exists} on this node {free} can be had ({held} held, {sick} not healthy)",
            device_demand.device_class,
            wanted=device_demand.count,
            free=free,
            exists=exists,
            held=held,
            unhealthy=sick,
        )

    def _usable(self, device_class: str) -> set[str]:
        return self.free[device_class] | self.reusable.get(device_class, set())

    def _device_lists(self, device: DeviceDemand, *, reusable: set[str]) -> Iterable[ResourceHints]:
        devices = self.devices[device.device_class]
        nodes = self.view.numa_nodes
        if device.names:
            named = [devices[name] for name in device.names]
            yield ResourceHints(
                resource=f"{device.device_class} (named)", opinion=device_rule(named, device.names, len(device.names), nodes)
            )
        if device.any_count:
            asked = self.view.custom_hints.get(f"{device.device_class}/{device.any_count}")
            if asked is not None:
                yield ResourceHints(resource=device.device_class, opinion=tuple(Hint(nodes, preferred) for nodes, preferred in asked))
            elif device.device_class in self.view.silent_classes:
                yield ResourceHints(resource=device.device_class, opinion=None)
            else:
                available = self.free[device.device_class] - device.spoken_for
                opinion = device_rule(
                    list(devices.values()),
                    available,
                    device.any_count,
                    nodes,
                    reusable=reusable - device.spoken_for,
                    kubelet=self.view.options.kubelet,
                )
                yield ResourceHints(resource=device.device_class, opinion=opinion)

    def _memory_lists(self, want: ContainerDemand, *, is_pod: bool) -> Iterable[ResourceHints]:
        """One list a kind of memory, the same for all, as kubelet has it; nothing that fits is "no opinion" there, and impossible when corrected."""
        family = self.memory.rule(want.memory, is_pod=is_pod)
        if family is not None:
            is_silent = family.is_empty and self.view.options.mode is PlanMode.COMPATIBLE
            for kind in sorted(want.memory):
                yield ResourceHints(resource=kind, opinion=None if is_silent else family)

    def _company(
        self, mine: DeviceDemand, chosen: Mapping[str, tuple[str, ...]], waiting: Iterable[DeviceDemand], nodes: NodeSet | None
    ) -> list[Neighbours]:
        """The other classes: those chosen as they are, those to come as what could be chosen."""
        company = [
            Neighbours(Counter(self.sites(name)[device] for device in devices), len(devices))
            for name, devices in sorted(chosen.items())
            if devices
        ]
        for other in waiting:
            usable = [self.devices[other.device_class][name] for name in sorted(self._usable(other.device_class) | set(other.names))]
            if other.names and not other.any_count:
                usable = [device for device in usable if device.name in other.names]
            split = split_by_affinity(usable, nodes)
            names = split.aligned if len(split.aligned) >= other.count else (*split.aligned, *split.unaligned, *split.no_affinity)
            sites = self.sites(other.device_class)
            company.append(Neighbours(Counter(sites[name] for name in names), other.count))
        return company

    def _choose(self, device_demand: DeviceDemand, nodes: NodeSet | None, company: list[Neighbours]) -> tuple[Choice, tuple[str, ...]]:
        """Choose by kubelet's order: reusable ones, then aligned ones, then the rest; the choice inside each is ours."""
        devices, sites = self.devices[device_demand.device_class], self.sites(device_demand.device_class)
        free = [devices[name] for name in sorted(self.free[device_demand.device_class] - device_demand.spoken_for)]
        reuse = sorted(self.reusable.get(device_demand.device_class, set()) - device_demand.spoken_for)
        must = [devices[name] for name in device_demand.names]
        if reuse and device_demand.any_count:
            again = choose_devices(
                [devices[name] for name in reuse],
                sites,
                len(must) + min(device_demand.any_count, len(reuse)),
                must_include=must,
                company=company,
                free=free,
            )
            must = [devices[name] for name in again.names]
        split = split_by_affinity(free, nodes)
        strays: tuple[str, ...] = ()
        total = device_demand.count
        for bucket in (split.aligned, (*split.unaligned, *split.no_affinity)):
            missing = total - len(must)
            if missing <= 0:
                break
            if missing >= len(bucket):
                must += [devices[name] for name in bucket]
                strays = (*strays, *bucket) if nodes is not None and bucket is not split.aligned else strays
                continue
            before = {device.name for device in must}
            choice = choose_devices([devices[name] for name in bucket], sites, total, must_include=must, company=company, free=free)
            if nodes is not None and bucket is not split.aligned:
                strays = tuple(name for name in choice.names if name not in before)
            return choice, strays
        return choose_devices([], sites, total, must_include=must, company=company, free=free), strays

    def _keep_devices(self, kind: ContainerKind, device_demand: DeviceDemand, names: set[str]) -> None:
        self.free[device_demand.device_class] -= names
        pool = self.reusable.setdefault(device_demand.device_class, set())
        if kind is ContainerKind.INIT:
            pool |= names
        else:
            pool -= names

    def _keep_cpus(self, kind: ContainerKind, cpus: CpuSet) -> None:
        self.free_cpus -= cpus
        self.reusable_cpus = self.reusable_cpus | cpus if kind is ContainerKind.INIT else self.reusable_cpus - cpus

    def _touched(self, cpus: CpuSet, devices: Mapping[str, tuple[str, ...]]) -> NodeSet:
        nodes = self.topology.nodes_of(cpus)
        for device_class, names in devices.items():
            for name in names:
                nodes |= self.devices[device_class][name].numa_nodes or NodeSet()
        return nodes


def _fault(want: ContainerDemand, code: str, message: str, resource: str, **facts: str | int) -> Reason:
    who = f"container {want.name!r}" if want.name else "the pod"
    return Reason(code=code, message=f"{who}: {message}", facts={"container": want.name, "resource": resource, **facts})


def _wanted(want: ContainerDemand) -> set[str]:
    """Classes of which something is to be held; what is only looked at needs nobody's word."""
    cpus = {CPU_CLASS} if want.cpus or want.named_cpus else set()
    return cpus | {device.device_class for device in want.devices if device.count}


def _unheard(want: ContainerDemand, device_class: str, since: str) -> Reason:
    message = f"the {device_class} service has not answered since {since}: how its devices are is unknown, so none is handed out"
    return _fault(want, "service-silent", message, device_class, since=since)
