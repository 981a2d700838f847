"""Logical CPUs as devices: one for every CPU that Linux has online, or one for each NUMA node, socket
or level-3 cache, or one for the machine.

A CPU is named `cpu-<id>` and has core, socket, L3 and NUMA node. A CPU that went offline is
reported as removed. A group is named `cpu-<unit>-<id>` and has a capacity `cpus`, of which claims
take shares; the node's ledger chooses the CPUs of a claim, not this service. A CPU whose unit is not
known is in no group of that kind. The edits of a prepared CPU hold a cpuset of that CPU and of its
NUMA node's memory. The gateway has the container runtime set it on nodes whose CPUs it manages. On
other nodes a container only gets the list of its CPUs.

Selectors can use isolation, frequencies that do not change, and the PCIe roots near the CPU's
memory. A value that the kernel does not publish is absent.
Source: Documentation/ABI/stable/sysfs-devices-system-cpu, Documentation/core-api/cpu_hotplug.rst,
Documentation/ABI/testing/sysfs-devices-system-cpu,
Documentation/admin-guide/pm/{cpufreq,intel_pstate}.rst.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from topobus.cpu.plugins.cpu_health import lost_pages, memory_errors, throttling
from topobus.cpu.plugins.cpu_parameters import read_cpu_parameters
from topobus.devicekit.counter_rises import CounterRises
from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.devicekit.edits_text import own_variable
from topobus.devicekit.settings import CpuGroupSettings, Grouping
from topobus.sysfs.idsets import read_ids
from topobus.sysfs.tree import Tree
from topobus.values.counters import CapacityPolicy
from topobus.values.cpu_groups import GROUP_CAPACITY, cpus_of, is_cpu_group
from topobus.values.device import AttributeValue, Device
from topobus.values.edits import ContainerEdits, Cpuset
from topobus.values.health import Observation, RecoveryAction
from topobus.values.health_reasons import sign
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine
from topobus.values.outcome import Reason, Refusal, refuse

__all__ = ["LinuxCpuDriver"]

_ONLINE = "sys/devices/system/cpu/online"
# NUMA nodes with memory; the kernel refuses any other in cpuset.mems (EINVAL).
_HAS_MEMORY = "sys/devices/system/node/has_memory"
# A DRA string attribute holds at most 64 characters; only a machine with more than 16
# threads a core could exceed it.
_MAX_ATTRIBUTE = 64
_Value = TypeVar("_Value")
_UNITS: Mapping[Grouping, Callable[[Cpu], int | None]] = {
    "numa": lambda cpu: cpu.numa_node,
    "socket": lambda cpu: cpu.socket,
    "l3": lambda cpu: cpu.l3,
    "machine": lambda _: 0,
}
_Place = tuple[int | None, int | None]
_CPU_FOLDER = "sys/devices/system/cpu"
# The kernel counts in kHz.
_FREQUENCIES = {"baseFrequencyMhz": "base_frequency", "maxFrequencyMhz": "cpuinfo_max_freq"}


class LinuxCpuDriver(DeviceDriver):
    """Finds the online CPUs of any Linux machine."""

    name = "linux-cpu"
    device_class = "cpu"

    def __init__(self) -> None:
        self._counters = CounterRises()
        self._places: Mapping[int, _Place] = {}
        """Core and socket of each CPU, as the last `discover` found them. The device of a group has
        neither for its CPUs."""
        self._layout: _Layout | None = None

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List one device for each online CPU, or for each group of them.

        Cost: two file reads per CPU, for its frequencies; none for groups.
        """
        online = [cpu for cpu in machine.cpus if cpu.online]
        self._places = {cpu.id: (cpu.core, cpu.socket) for cpu in online}
        facts = _CpuFacts(tree.for_scan(), machine)
        if self.host.cpus.groups != "cpu":
            return Discovery(devices=_group_devices(online, self.host.cpus, self.name, facts))
        siblings: dict[int, list[int]] = {}
        for cpu in online:
            if cpu.core is not None:
                siblings.setdefault(cpu.core, []).append(cpu.id)
        names = {core: str(CpuSet.of(ids)) for core, ids in siblings.items()}
        return Discovery(
            devices=tuple(self._device(cpu, names, facts) for cpu in sorted(online, key=lambda cpu: cpu.id))
        )

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Report the CPUs that went offline, and the faults that the kernel counts for the others.

        Cost: one read of the kernel's list of online CPUs, and one per core and NUMA node.
        """
        tree = tree.for_scan()
        online = _online(tree)
        if online is None:
            return {}
        layout = self._layout
        if layout is None or not layout.is_of(devices, online, self._places):
            layout = self._layout = _Layout(devices, online, self._places)
        heat = throttling(tree, layout.cores, self._counters)
        by_socket = memory_errors(tree, layout.sockets, self._counters)
        by_node = lost_pages(tree, layout.nodes, self._counters)
        seen: dict[str, Sequence[Observation]] = {
            name: (_offline(cpu, online),) for name, cpu in layout.offline.items()
        }
        if not (heat or by_socket or by_node):
            return seen
        for device in devices:
            if device.name in seen:
                continue
            cpus = layout.present[device.name]
            hot = next((heat[cpu] for cpu in cpus if cpu in heat), None)
            homes = sorted({socket for cpu in cpus if (socket := layout.places[cpu][1]) is not None})
            worn = next((by_socket[socket] for socket in homes if socket in by_socket), None)
            lost = next((by_node[node] for node in device.numa_nodes or () if node in by_node), None)
            if signs := tuple(each for each in (hot, worn, lost) if each is not None):
                seen[device.name] = signs
        return seen

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Give each CPU as a cpuset, and its container the list of its CPUs.

        `TOPOBUS_CPUS` lists all of them, and one more variable per CPU names it.
        """
        online = _online(tree)
        unchosen = [device.name for device in devices if is_cpu_group(device) and not context.cpus.get(device.name)]
        if unchosen:
            message = (
                f"which CPUs of {', '.join(unchosen)} the claim has was not decided: only claims have shares of "
                "groups, and the gateway must be as new as this service"
            )
            return refuse("cpus-not-chosen", message, devices=tuple(unchosen))
        chosen = {
            device.name: context.cpus.get(device.name, CpuSet()) if is_cpu_group(device) else cpus_of(device)
            for device in devices
        }
        wanted = CpuSet()
        for cpus in chosen.values():
            wanted |= cpus
        if online is not None and wanted - online:
            missing = wanted - online
            reason = Reason(
                code="cpu-offline",
                message=f"CPUs {missing} are offline; bring them online or ask for others",
                facts={"cpus": str(missing), "online": str(online)},
            )
            return Refusal(reasons=(reason,))
        with_memory = read_ids(tree, _HAS_MEMORY, NodeSet) or NodeSet()
        homes = _homes(tree, with_memory) if any(map(is_cpu_group, devices)) else {}
        edits: dict[str, ContainerEdits] = {}
        for device in devices:
            parameters = read_cpu_parameters(context.config_of(device.name))
            if isinstance(parameters, Refusal):
                return parameters
            cpuset = _cpuset(device, chosen[device.name], with_memory, homes)
            edits[device.name] = ContainerEdits(
                env={own_variable(device): str(chosen[device.name]) if is_cpu_group(device) else "1"},
                cpuset=replace(cpuset, with_shared=parameters.with_shared) if cpuset is not None else None,
            )
        return {**edits, "": ContainerEdits(env={"TOPOBUS_CPUS": str(wanted)})}

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return True: CPUs are set only when the runtime makes a container."""
        return True

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Do nothing: this service changes nothing on the machine.

        The gateway returns the CPU to the shared pool.
        """

    def _device(self, cpu: Cpu, siblings: Mapping[int, str], found_facts: _CpuFacts) -> Device:
        facts: dict[str, AttributeValue | None] = {
            **found_facts.of(cpu),
            "core": cpu.core,
            "socket": cpu.socket,
            "die": cpu.die,
            "l3": cpu.l3,
            "numaNode": cpu.numa_node,
            "kind": cpu.kind or None,
            "siblings": siblings.get(cpu.core, "")[:_MAX_ATTRIBUTE] if cpu.core is not None else None,
        }
        return Device(
            name=f"cpu-{cpu.id}",
            device_class=self.device_class,
            driver=self.name,
            numa_nodes=None if cpu.numa_node is None else NodeSet(cpu.numa_node),
            cpu=cpu.id,
            core=cpu.core,
            socket=cpu.socket,
            l3=cpu.l3,
            pcie_roots=found_facts.pcie_roots(cpu.numa_node),
            attributes={key: value for key, value in facts.items() if value is not None},
        )


class _Layout:
    """What a look reads, and for which devices. Looks without a change between them share it."""

    def __init__(self, devices: Sequence[Device], online: CpuSet, discovered: Mapping[int, _Place]) -> None:
        self._devices, self._online, self._discovered = devices, online, discovered
        self.offline = {
            device.name: device.cpu for device in devices if device.cpu is not None and device.cpu not in online
        }
        self.present = {device.name: _present(device, online) for device in devices}
        own = {device.cpu: (device.core, device.socket) for device in devices if device.cpu is not None}
        self.places = {
            cpu: own.get(cpu) or discovered.get(cpu, (None, None)) for cpus in self.present.values() for cpu in cpus
        }
        leaders: dict[int | None, int] = {}
        for cpu in sorted(self.places):
            leaders.setdefault(self.places[cpu][0], cpu)
        self.cores = {cpu: cpu if core is None else leaders[core] for cpu, (core, _) in self.places.items()}
        self.sockets = {socket for _, socket in (*self.places.values(), *discovered.values()) if socket is not None}
        self.nodes = {node for device in devices for node in device.numa_nodes or ()}

    def is_of(self, devices: Sequence[Device], online: CpuSet, discovered: Mapping[int, _Place]) -> bool:
        """Return whether it was made of these."""
        return self._devices is devices and self._discovered is discovered and self._online == online


def _cpuset(device: Device, cpus: CpuSet, with_memory: NodeSet, homes: Mapping[int, CpuSet]) -> Cpuset | None:
    """Return a device's cpuset. Memory comes from its CPUs' nodes, and from any node when these
    have no memory or are not known.
    """
    if not cpus:
        return None
    if not is_cpu_group(device):
        return Cpuset(cpus=cpus, mems=(device.numa_nodes or NodeSet()) & with_memory)
    at_home = CpuSet()
    for node_cpus in homes.values():
        at_home |= node_cpus
    # A CPU whose node has no memory uses memory of any node, and so does its container.
    mems = NodeSet.of(node for node, node_cpus in homes.items() if node_cpus & cpus) if cpus <= at_home else NodeSet()
    return Cpuset(cpus=cpus, mems=mems)


def _homes(tree: Tree, nodes: NodeSet) -> Mapping[int, CpuSet]:
    """Read which CPUs each of these NUMA nodes has."""
    return {node: read_ids(tree, f"sys/devices/system/node/node{node}/cpulist", CpuSet) or CpuSet() for node in nodes}


def _present(device: Device, online: CpuSet) -> Collection[int]:
    if device.cpu is None:
        return cpus_of(device) & online
    return (device.cpu,) if device.cpu in online else ()


def _offline(cpu: int, online: CpuSet) -> Observation:
    # The host gives the same reason once the machine no longer has the CPU online: one fault, one
    # event.
    return sign("device-gone", f"CPU {cpu} is offline", _ONLINE, online, action=RecoveryAction.WAIT)


def _online(tree: Tree) -> CpuSet | None:
    """Read the CPUs that are online now.

    None on a tree without the file (old recordings), which then is no evidence.
    """
    return read_ids(tree, _ONLINE, CpuSet)


def _group_devices(cpus: Sequence[Cpu], settings: CpuGroupSettings, driver: str, near: _CpuFacts) -> tuple[Device, ...]:
    """List the groups of online CPUs, or none where CPUs are offered one by one.

    Order: by the units' ids.
    """
    unit_of = _UNITS.get(settings.groups)
    members: dict[int, list[Cpu]] = {}
    for cpu in cpus if unit_of is not None else ():
        unit = unit_of(cpu) if unit_of is not None else None
        if cpu.online and unit is not None:
            members.setdefault(unit, []).append(cpu)
    return tuple(_group_device(settings, driver, unit, group, near) for unit, group in sorted(members.items()))


def _only(values: Iterable[_Value | None]) -> _Value | None:
    """Return the one value that all have, or None when they differ or one of them is None."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _group_device(settings: CpuGroupSettings, driver: str, unit: int, group: Sequence[Cpu], near: _CpuFacts) -> Device:
    name = "cpu-machine" if settings.groups == "machine" else f"cpu-{settings.groups}-{unit}"
    cores = {cpu.core if cpu.core is not None else cpu.id for cpu in group}
    threads = max(1, len(group) // len(cores))
    step = threads if settings.whole_cores else 1
    nodes = {cpu.numa_node for cpu in group}
    shared: dict[str, AttributeValue | None] = {
        "socket": _only(cpu.socket for cpu in group),
        "die": _only(cpu.die for cpu in group),
        "l3": _only(cpu.l3 for cpu in group),
        "kind": _only(cpu.kind or None for cpu in group),
    }
    facts: dict[str, AttributeValue] = {key: value for key, value in shared.items() if value is not None}
    facts |= {"group": settings.groups, "cores": len(cores), "threadsPerCore": threads, "smtEnabled": threads > 1}
    return Device(
        name=name,
        device_class="cpu",
        driver=driver,
        numa_nodes=None if None in nodes else NodeSet.of(node for node in nodes if node is not None),
        socket=_only(cpu.socket for cpu in group),
        pcie_roots=tuple(sorted({root for node in nodes for root in near.pcie_roots(node)})),
        near_cpus=CpuSet.of(cpu.id for cpu in group),
        allows_multiple=True,
        capacity={GROUP_CAPACITY: len(group)},
        capacity_policies={GROUP_CAPACITY: CapacityPolicy(default=step, minimum=step, step=step)},
        attributes=facts,
    )


class _CpuFacts:
    """The facts of all CPUs of one machine, read once for a discovery."""

    def __init__(self, tree: Tree, machine: Machine) -> None:
        """Read what concerns all CPUs. Frequencies are read later, CPU by CPU."""
        self._tree = tree
        self._isolated = _cpu_list(tree, f"{_CPU_FOLDER}/isolated")
        self._tickless = _cpu_list(tree, f"{_CPU_FOLDER}/nohz_full")
        self._smt = (tree.read(f"{_CPU_FOLDER}/smt/active") or "").strip()
        roots: dict[int | None, set[str]] = {}
        for function in machine.pci_devices:
            if function.root:
                roots.setdefault(function.numa_node, set()).add(function.root)
        # A machine with one NUMA node has every root near it, whatever the firmware leaves out.
        # With several nodes, a root whose nodes are not known is near none.
        everything = {root for near in roots.values() for root in near} if len(machine.numa_nodes) < 2 else None
        self._roots = {node: tuple(sorted(near)) for node, near in roots.items() if node is not None}
        self._all_roots = tuple(sorted(everything)) if everything is not None else None

    def pcie_roots(self, node: int | None) -> tuple[str, ...]:
        """List the PCIe roots near a NUMA node, sorted."""
        if self._all_roots is not None:
            return self._all_roots
        return self._roots.get(node, ()) if node is not None else ()

    def of(self, cpu: Cpu) -> dict[str, AttributeValue]:
        """Return the attributes of one CPU."""
        facts: dict[str, AttributeValue] = {}
        if self._isolated is not None:
            facts["isolated"] = cpu.id in self._isolated
        if self._tickless is not None:
            facts["nohzFull"] = cpu.id in self._tickless
        if self._smt in ("0", "1"):
            facts["smtEnabled"] = self._smt == "1"
        for name, file in _FREQUENCIES.items():
            text = (self._tree.read(f"{_CPU_FOLDER}/cpu{cpu.id}/cpufreq/{file}") or "").strip()
            if text.isascii() and text.isdecimal() and int(text[:12]) > 0:
                facts[name] = int(text[:12]) // 1000
        return facts


def _cpu_list(tree: Tree, path: str) -> CpuSet | None:
    """Read a list of CPUs.

    None where the kernel has none, or writes `(null)` for a parameter that was not given.
    """
    text = tree.read(path)
    if text is None:
        return None
    try:
        return CpuSet.parse(text)
    except ValueError:
        return None if text.strip() != "(null)" else CpuSet()
