"""Choose exclusive CPUs for a claim as kubelet's static policy chooses them for a container, its
refusals included.

The allocation of single CPUs and the choice of a claim's CPUs within a group both use it, so the
two cannot differ.
Source: kubelet 1.36 cm/cpumanager/policy_static.go, Allocate and validateSMTAlignment.
"""

from __future__ import annotations

from topobus.engine.alignment.cpus.cpu_assignment import assign_cpus
from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal, refuse
from topobus.values.view import CpuOptions

__all__ = ["choose_exclusive_cpus"]


def choose_exclusive_cpus(
    topology: CpuTopology,
    free: CpuSet,
    count: int,
    options: CpuOptions,
    *,
    reserved: CpuSet | None = None,
) -> CpuSet | Refusal:
    """Take `count` of the free CPUs.

    Shapes: free — reserved ones are removed from it here.
    Order: deterministic, as `assign_cpus`.
    Errors: raises nothing; Refusal codes not-enough-cpus, and with full-pcpus-only smt-alignment.

    >>> from topobus.engine.alignment.cpus.cpu_topology import CpuPlace
    >>> machine = CpuTopology([CpuPlace(cpu, cpu % 4, 0, 0, 0) for cpu in range(8)])
    >>> choose_exclusive_cpus(machine, CpuSet.parse("0-7"), 2, CpuOptions(), reserved=CpuSet(0))
    CpuSet(1, 5)
    """
    reserved = reserved if reserved is not None else CpuSet()
    usable = free - reserved
    if options.full_pcpus_only:
        threads = topology.threads_per_core
        if count % threads:
            return _refuse(
                "smt-alignment",
                f"full-pcpus-only wants whole cores of {threads} CPUs, got {count}",
                wanted=count,
                threads=threads,
            )
        whole = len(free - topology.siblings_of(reserved))
        if count > whole:
            message = f"full-pcpus-only leaves {whole} CPUs outside the cores with reserved CPUs, wanted {count}"
            return _refuse("smt-alignment", message, wanted=count, free=whole)
    assigned = assign_cpus(topology, usable, count, None, options)
    if assigned is None:
        message = f"wants {count} exclusive CPUs, of which {len(usable)} can be had together"
        return _refuse("not-enough-cpus", message, wanted=count, free=len(usable))
    return assigned


def _refuse(code: str, message: str, **facts: int) -> Refusal:
    return refuse(code, message, resource="cpu", **facts)
