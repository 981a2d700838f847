"""What is free on a node while a pod is being planned: hints are computed from it, and CPUs and
devices are taken from it, one container after the other.

Reuse follows kubelet: units that an init container held may be taken again by later containers of
the same pod.
Source: kubelet 1.36 cm/{cpumanager/policy_static,devicemanager/manager}.go.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from topobus.engine.alignment.cpus.cpu_assignment import assign_cpus
from topobus.engine.alignment.cpus.cpu_hints import cpu_rule
from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.engine.alignment.devices.device_choice import Choice, Neighbours, choose_devices, split_by_affinity
from topobus.engine.alignment.devices.device_hints import device_rule
from topobus.engine.alignment.devices.proximity import Site, site_of, socket_of_nodes
from topobus.engine.alignment.memory.memory_allocation import AvailableMemory
from topobus.engine.alignment.planning.demands import ContainerDemand, DeviceDemand
from topobus.engine.alignment.planning.locality_domains import LocalityTopology
from topobus.engine.alignment.planning.node_view import MEMORY
from topobus.engine.alignment.planning.resource_hints import ContainerAllocation, ResourceHints
from topobus.values.dra_names import CPU_CLASS
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.outcome import Reason
from topobus.values.request import ContainerKind
from topobus.values.view import NodeView, PlanMode

__all__ = ["NodeAvailability"]


class NodeAvailability:
    """What is free on one node during one plan. Mutable, so private to the plan.

    A search works on forks.

    Shapes: devices — class to name to device, all of them; free — class to names that are healthy
            and not held; reusable — class to names that init containers of this pod left; the same
            for CPUs.
    """

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
                if device.is_allocatable and device.name not in view.held_devices.get(name, {})
            }
            for name, devices in self.devices.items()
        }
        self.memory = AvailableMemory.of(view)
        self.reusable_cpus = CpuSet()
        self.reusable: dict[str, set[str]] = {}
        self.own: Mapping[str, Mapping[str, str]] = {}
        """What containers of this pod keep: class to device to container. Of CPUs the container
        alone, with how many."""
        self.own_cpus: Mapping[str, int] = {}
        self._sockets = socket_of_nodes(view.cores)
        self._sites: dict[str, dict[str, Site]] = {}

    def sites(self, device_class: str) -> Mapping[str, Site]:
        """Return the places of a class's devices. Empty for a class that the node does not have.

        Computed once for each plan.
        """
        if device_class not in self._sites:
            self._sites[device_class] = {
                device.name: site_of(device, self._sockets) for device in self.devices.get(device_class, {}).values()
            }
        return self._sites[device_class]

    def locality(self) -> LocalityTopology:
        """Return the places of the node's CPUs and devices: the input of
        `locality_domains.tiers`.
        """
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

    def fork(
        self, cpus: CpuSet | None = None, devices: Mapping[str, Collection[str]] | None = None
    ) -> NodeAvailability:
        """Copy what is free, reduced to the limits. None and absent classes are not limited.

        The copy changes independently of this one.
        """
        part = copy.copy(self)
        limits = devices or {}
        part.free = {
            name: names & frozenset(limits[name]) if name in limits else set(names) for name, names in self.free.items()
        }
        part.reusable = {
            name: names & frozenset(limits[name]) if name in limits else set(names)
            for name, names in self.reusable.items()
        }
        if cpus is not None:
            part.free_cpus &= cpus
            part.reusable_cpus &= cpus
        return part

    def absorb(
        self, fork: NodeAvailability, cpus: CpuSet | None, devices: Mapping[str, Collection[str]] | None
    ) -> None:
        """Apply the changes of a fork that was made with these limits."""
        self.memory, self.own, self.own_cpus = fork.memory, fork.own, fork.own_cpus
        limits = devices or {}
        for kept, taken in ((self.free, fork.free), (self.reusable, fork.reusable)):
            for name, names in taken.items():
                kept[name] = (kept.get(name, set()) - frozenset(limits[name])) | names if name in limits else set(names)
        if cpus is None:
            self.free_cpus, self.reusable_cpus = fork.free_cpus, fork.reusable_cpus
        else:
            self.free_cpus = (self.free_cpus - cpus) | fork.free_cpus
            self.reusable_cpus = (self.reusable_cpus - cpus) | fork.reusable_cpus

    def hint_lists(self, demand: ContainerDemand, *, is_pod: bool = False) -> list[ResourceHints]:
        """Collect the opinion of each resource that the demand touches, in kubelet's order: CPUs,
        devices by class, memory by kind.

        Shapes: is_pod — scope pod, which starts without anything to reuse. Named CPUs and devices
                are resources of their own.
        Errors: raises nothing for a demand without `demand_faults`.
        """
        lists: list[ResourceHints] = []
        reusable_cpus = CpuSet() if is_pod else self.reusable_cpus
        if demand.cpus:
            opinion = cpu_rule(
                self.topology.cpus_by_node(),
                self.free_cpus - demand.named_cpus,
                demand.cpus,
                reusable=reusable_cpus - demand.named_cpus,
                sockets=self.topology.sockets_by_node() if self.view.options.cpu.align_by_socket else None,
            )
            lists.append(ResourceHints(resource=CPU_CLASS, opinion=opinion if self.topology.by_numa else None))
        if demand.named_cpus:
            homes = {node: cpus & demand.named_cpus for node, cpus in self.topology.cpus_by_node().items()}
            opinion = cpu_rule(homes, demand.named_cpus, len(demand.named_cpus)) if any(homes.values()) else None
            lists.append(ResourceHints(resource=f"{CPU_CLASS} (named)", opinion=opinion))
        for device in demand.devices:
            lists += self._device_lists(
                device, reusable=set() if is_pod else self.reusable.get(device.device_class, set())
            )
        return [*lists, *self._memory_lists(demand, is_pod=is_pod)]

    def take(self, demand: ContainerDemand, hint: Hint) -> ContainerAllocation | list[Reason]:
        """Take what a container demands, inside the alignment first, or return the reasons when
        that fails.

        It updates what is free and what may be reused.

        Shapes: hint — the merged one; without nodes nothing is aligned.
        Order: memory first, since it alone may fail after a merge. Devices with links before
                others, so that these can go next to them.
        Source: kubelet 1.36
                cm/{cpumanager/policy_static,devicemanager/manager,memorymanager/policy_static}.go,
                Allocate.
        """
        nodes = hint.nodes
        blocks = self.memory.take(demand.memory, hint, demand.kind)
        if isinstance(blocks, Reason):
            return [demand.unmet(blocks.code, blocks.message, MEMORY)]
        cpus = self._choose_cpus(demand, nodes)
        if cpus is None:
            return [
                demand.unmet("not-enough-cpus", f"{demand.cpus} exclusive CPUs cannot be taken together", CPU_CLASS)
            ]
        devices: dict[str, tuple[str, ...]] = {}
        choices: dict[str, Choice] = {}
        outside: dict[str, tuple[str, ...]] = {}
        waiting = sorted(
            demand.devices,
            key=lambda device_demand: (
                not any(device.links for device in self.devices[device_demand.device_class].values()),
                device_demand.device_class,
            ),
        )
        for place, device_demand in enumerate(waiting):
            choice, strays = self._choose(
                device_demand, nodes, self._neighbours(device_demand, devices, waiting[place + 1 :], nodes)
            )
            devices[device_demand.device_class] = tuple(sorted({*choice.names, *device_demand.shared}))
            if device_demand.any_count:
                choices[device_demand.device_class] = choice
            if strays:
                outside[device_demand.device_class] = strays
            self._keep_devices(demand, device_demand, set(choice.names))
        self._keep_cpus(demand, cpus)
        memory, self.memory = blocks
        return ContainerAllocation(
            cpus=cpus,
            devices=dict(sorted(devices.items())),
            memory=memory,
            numa_nodes=self._touched(cpus, devices),
            choices=choices,
            outside=outside,
        )

    def _choose_cpus(self, demand: ContainerDemand, nodes: NodeSet | None) -> CpuSet | None:
        """Choose a container's CPUs. None when so many cannot be taken together."""
        if not demand.cpus:
            return demand.named_cpus
        assigned = assign_cpus(
            self.topology,
            (self.free_cpus | self.reusable_cpus) - demand.named_cpus,
            demand.cpus,
            nodes,
            self.view.options.cpu,
        )
        return assigned | demand.named_cpus if assigned is not None else None

    def usable(self, device_class: str) -> set[str]:
        """Names of the devices of a class that can be taken: free ones, and those that earlier
        containers left for reuse.
        """
        return self.free[device_class] | self.reusable.get(device_class, set())

    def _device_lists(self, device: DeviceDemand, *, reusable: set[str]) -> Iterable[ResourceHints]:
        devices = self.devices[device.device_class]
        nodes = self.view.numa_nodes
        if device.names:
            named = [devices[name] for name in device.names]
            yield ResourceHints(
                resource=f"{device.device_class} (named)",
                opinion=device_rule(named, device.names, len(device.names), nodes),
            )
        if device.any_count:
            asked = self.view.custom_hints.get(f"{device.device_class}/{device.any_count}")
            if asked is not None:
                yield ResourceHints(
                    resource=device.device_class, opinion=tuple(Hint(nodes, preferred) for nodes, preferred in asked)
                )
            elif device.device_class in self.view.silent_classes:
                yield ResourceHints(resource=device.device_class, opinion=None)
            else:
                free = self.free[device.device_class] - device.excluded
                opinion = device_rule(
                    list(devices.values()),
                    free,
                    device.any_count,
                    nodes,
                    reusable=reusable - device.excluded,
                    kubelet=self.view.options.kubelet,
                )
                yield ResourceHints(resource=device.device_class, opinion=opinion)

    def _memory_lists(self, demand: ContainerDemand, *, is_pod: bool) -> Iterable[ResourceHints]:
        """One list for each kind of memory, the same for all, as kubelet has it.

        When nothing fits, that is "no opinion" there, and impossible in mode corrected.
        """
        rule = self.memory.rule(demand.memory, is_pod=is_pod)
        if rule is not None:
            is_silent = rule.is_empty and self.view.options.mode is PlanMode.COMPATIBLE
            for kind in sorted(demand.memory):
                yield ResourceHints(resource=kind, opinion=None if is_silent else rule)

    def _neighbours(
        self,
        demand: DeviceDemand,
        chosen: Mapping[str, tuple[str, ...]],
        waiting: Iterable[DeviceDemand],
        nodes: NodeSet | None,
    ) -> list[Neighbours]:
        """The other classes: chosen ones as they are, later ones as the devices that could be
        chosen.
        """
        neighbours = [
            Neighbours(Counter(self.sites(name)[device] for device in devices), len(devices))
            for name, devices in sorted(chosen.items())
            if devices
        ]
        for other in waiting:
            usable = [
                self.devices[other.device_class][name]
                for name in sorted(self.usable(other.device_class) | set(other.names))
            ]
            if other.names and not other.any_count:
                usable = [device for device in usable if device.name in other.names]
            split = split_by_affinity(usable, nodes)
            names = (
                split.aligned
                if len(split.aligned) >= other.count
                else (*split.aligned, *split.unaligned, *split.no_affinity)
            )
            sites = self.sites(other.device_class)
            neighbours.append(Neighbours(Counter(sites[name] for name in names), other.count))
        return neighbours

    def _choose(
        self, device_demand: DeviceDemand, nodes: NodeSet | None, neighbours: list[Neighbours]
    ) -> tuple[Choice, tuple[str, ...]]:
        """Choose by kubelet's order: reusable ones, then aligned ones, then the rest.

        Within each group Topobus chooses.
        """
        devices, sites = self.devices[device_demand.device_class], self.sites(device_demand.device_class)
        free = [devices[name] for name in sorted(self.free[device_demand.device_class] - device_demand.excluded)]
        reuse = sorted(self.reusable.get(device_demand.device_class, set()) - device_demand.excluded)
        must = [devices[name] for name in device_demand.names]
        if reuse and device_demand.any_count:
            again = choose_devices(
                [devices[name] for name in reuse],
                sites,
                len(must) + min(device_demand.any_count, len(reuse)),
                must_include=must,
                neighbours=neighbours,
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
            choice = choose_devices(
                [devices[name] for name in bucket], sites, total, must_include=must, neighbours=neighbours, free=free
            )
            if nodes is not None and bucket is not split.aligned:
                strays = tuple(name for name in choice.names if name not in before)
            return choice, strays
        return choose_devices([], sites, total, must_include=must, neighbours=neighbours, free=free), strays

    def _keep_devices(self, demand: ContainerDemand, device_demand: DeviceDemand, names: set[str]) -> None:
        self.free[device_demand.device_class] -= names
        pool = self.reusable.setdefault(device_demand.device_class, set())
        if demand.kind is ContainerKind.INIT:
            pool |= names
            return
        pool -= names
        # New mappings: forks share the old ones.
        own = {**self.own.get(device_demand.device_class, {}), **dict.fromkeys(names, demand.name)}
        self.own = {**self.own, device_demand.device_class: own}

    def _keep_cpus(self, demand: ContainerDemand, cpus: CpuSet) -> None:
        self.free_cpus -= cpus
        if demand.kind is ContainerKind.INIT:
            self.reusable_cpus |= cpus
            return
        self.reusable_cpus -= cpus
        if cpus:
            self.own_cpus = {**self.own_cpus, demand.name: len(cpus)}

    def _touched(self, cpus: CpuSet, devices: Mapping[str, tuple[str, ...]]) -> NodeSet:
        nodes = self.topology.nodes_of(cpus)
        for device_class, names in devices.items():
            for name in names:
                nodes |= self.devices[device_class][name].numa_nodes or NodeSet()
        return nodes
