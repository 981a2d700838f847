"""Reads the whole machine from a tree at once: the value that placement and device services use.

Contradictory or unreadable parts become a sentence in `Machine.warnings` and the rest stays. Only a
tree without any CPU is an error.
Cost: about 0.3 s for 224 CPUs (one core), most of it opening small files; call it from a worker
thread.
"""

from __future__ import annotations

import platform
import re

from msgspec.structs import replace

from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.cpus import read_cpu_facts
from topobus.sysfs.limits import Limits, read_limits
from topobus.sysfs.numa import read_node_cpus, read_numa_facts
from topobus.sysfs.pci import pci_folder, read_pci_devices
from topobus.sysfs.tree import Tree
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine, PciDevice

__all__ = ["read_machine"]


def read_machine(tree: Tree, node: str) -> Machine:
    """Read the machine below a tree. `node` is the Kubernetes node name to put in.

    Its generation is 1, because the publisher counts generations.

    Errors: raises HardwareError when the tree has no CPU at all, or names and lists cannot be read.
    """
    scan = tree.for_scan()
    limits = read_limits(scan) if tree.settings.honours_cpuset else Limits()
    warnings: list[str] = []
    node_cpus = read_node_cpus(scan)
    cpus = read_cpu_facts(scan, limits.cpus, node_cpus.node_of)
    if outside := cpus.seen - cpus.usable:
        warnings.append(f"CPUs {outside} are outside our cpuset {limits.source}; not offered")
    architecture = _read_architecture(scan)
    pci_devices, pci_warnings = read_pci_devices(scan, cpus.usable)
    with_functions = frozenset(device.numa_node for device in pci_devices if device.numa_node is not None)
    numa = read_numa_facts(
        scan,
        node_cpus,
        usable=cpus.usable,
        allowed=limits.nodes,
        with_functions=with_functions,
        architecture=architecture,
    )
    if not numa.is_known:
        # Without NUMA in the kernel, all CPUs belong to the one node of the machine.
        cpus = read_cpu_facts(scan, limits.cpus, dict.fromkeys(cpus.present, 0))
    shared = {cpu: (cache & cpus.usable or cache).lowest for cache in numa.caches for cpu in cache}
    pci_devices, lost_warnings = _without_missing_nodes(pci_devices, {numa_node.id for numa_node in numa.nodes})
    return Machine(
        node=node,
        boot_id=read_boot_id(scan),
        architecture=architecture,
        numa_nodes=numa.nodes,
        cpus=tuple(
            cpu if cpu.l3 is not None or cpu.id not in shared else replace(cpu, l3=shared[cpu.id]) for cpu in cpus.cpus
        ),
        l3_caches=cpus.l3_caches,
        distances=numa.distances,
        pci_devices=pci_devices,
        warnings=(*warnings, *cpus.warnings, *numa.warnings, *pci_warnings, *lost_warnings),
    )


def _without_missing_nodes(devices: tuple[PciDevice, ...], nodes: set[int]) -> tuple[tuple[PciDevice, ...], list[str]]:
    """Remove a NUMA node that the machine lacks from its devices: a device on it would be near
    nothing, and would always be refused.
    """
    lost = {
        device.address: device.numa_node
        for device in devices
        if device.numa_node is not None and device.numa_node not in nodes
    }
    warnings = [
        f"{pci_folder(address)}/numa_node: got {node}, wanted one of the nodes "
        f"{str(NodeSet.of(nodes)) or 'none'}; taken as unknown"
        for address, node in lost.items()
    ]
    return tuple(replace(device, numa_node=None) if device.address in lost else device for device in devices), warnings


def _read_architecture(tree: Tree) -> str:
    """Name the architecture as uname does: our own when live, else from a recording's side file or
    the form of cpuinfo.
    """
    if tree.is_live:
        return platform.machine()
    # hwloc's recorder keeps the output of uname here.
    match = re.search(r"^Architecture: (\S+)", tree.read("proc/hwloc-nofile-info") or "", re.MULTILINE)
    if match is not None:
        return match[1]
    if (
        version := re.search(r"\((x86_64|aarch64|ppc64le|ppc64|s390x|riscv64)\)", tree.read("proc/version") or "")
    ) is not None:
        return version[1]
    text = tree.read("proc/cpuinfo") or ""
    for pattern, name in (
        (r"^vendor_id\s*: (GenuineIntel|AuthenticAMD|HygonGenuine|CentaurHauls)", "x86_64"),
        (r"^CPU implementer\s*:", "aarch64"),
        (r"^cpu\s*: (POWER|PPC|Cell)", "ppc64"),
        (r"^vendor_id\s*: IBM/S390", "s390x"),
        (r"^arch\s*: IA-64", "ia64"),
    ):
        if re.search(pattern, text, re.MULTILINE):
            return name
    return ""
