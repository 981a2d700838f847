"""Reads the attributes of CPUs that selectors use besides their place: isolation from the
scheduler, frequencies, the PCIe roots near their memory.

A value that the kernel does not publish is absent. Only frequencies that do not change are
published: base and maximum.
Source: Documentation/ABI/testing/sysfs-devices-system-cpu,
Documentation/admin-guide/pm/{cpufreq,intel_pstate}.rst.
"""

from __future__ import annotations

from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, Machine

__all__ = ["CpuFacts"]

_CPUS = "sys/devices/system/cpu"
# The kernel counts in kHz.
_FREQUENCIES = {"baseFrequencyMhz": "base_frequency", "maxFrequencyMhz": "cpuinfo_max_freq"}


class CpuFacts:
    """The facts of all CPUs of one machine, read once for a discovery."""

    def __init__(self, tree: Tree, machine: Machine) -> None:
        """Read what concerns all CPUs. Frequencies are read later, CPU by CPU."""
        self._tree = tree
        self._isolated = _cpus(tree, f"{_CPUS}/isolated")
        self._tickless = _cpus(tree, f"{_CPUS}/nohz_full")
        self._smt = (tree.read(f"{_CPUS}/smt/active") or "").strip()
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
            text = (self._tree.read(f"{_CPUS}/cpu{cpu.id}/cpufreq/{file}") or "").strip()
            if text.isascii() and text.isdecimal() and int(text[:12]) > 0:
                facts[name] = int(text[:12]) // 1000
        return facts


def _cpus(tree: Tree, path: str) -> CpuSet | None:
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
