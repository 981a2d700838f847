"""Compares the exclusive CPUs, and the memory by NUMA node, that kubelet's own managers gave to
containers with the ledger.

The result is what to adopt into the ledger so that alignment counts it, what to release, and where
the two disagree. Topobus offers neither resource to kubelet, so kubelet's list is taken as a fact:
the managers have decided already, and nothing needs to be prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from topobus.formats.messages.messages import Disagreement
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders
from topobus.values.outcome import MemoryBlock
from topobus.values.request import Owner, OwnerKind

__all__ = ["CPU_RESOURCE", "ExclusiveUse", "compare_exclusive", "idle_containers"]

CPU_RESOURCE = "cpu"
"""The name of the resource in Kubernetes, and of our class."""


class ExclusiveUse(Struct, frozen=True, kw_only=True):
    """What one container has exclusively.

    An empty container name means the pod as a whole (pod-level resources).
    """

    namespace: str
    pod: str
    container: str
    cpus: CpuSet = CpuSet()
    memory: tuple[MemoryBlock, ...] = ()

    @property
    def owner(self) -> Owner:
        """The owner under which the ledger lists it."""
        return Owner(kind=OwnerKind.CONTAINER, namespace=self.namespace, name=self.pod, uid=self.container)

    @property
    def where(self) -> str:
        """Describe the container, and what gave it the CPUs."""
        who = f"container {self.container} of pod" if self.container else "pod"
        return f"{who} {self.namespace}/{self.pod} (kubelet's CPU manager)"


def compare_exclusive(
    uses: Iterable[ExclusiveUse], ledger: Holders | None
) -> tuple[tuple[ExclusiveUse, ...], tuple[Disagreement, ...]]:
    """Return what the ledger lacks, without CPUs that another owner holds there, and these as
    disagreements.

    A pod that was placed through `place` holds its CPUs as itself, which agrees with kubelet's
    list. CPUs that the ledger lists for another container are kubelet's to give, so kubelet's newer
    list counts. Where kubelet lists one CPU twice (a pod that has ended is listed for a while), it
    stays with the owner in the ledger, else with the first, so that the ledger does not alternate.
    """
    uses = tuple(uses)
    listed = {(cpu, use.owner.key) for use in uses for cpu in use.cpus}
    given: set[int] = set()
    allocations = ledger.allocations if ledger is not None else {}
    holders = _holders(allocations)
    lacking: list[ExclusiveUse] = []
    disagreements: list[Disagreement] = []
    for use in sorted(uses, key=lambda use: (use.namespace, use.pod, use.container)):
        cpus: list[int] = []
        is_placed = False
        for cpu in use.cpus:
            holder = holders.get(cpu)
            if (
                holder is not None
                and holder.kind is OwnerKind.POD
                and (holder.namespace, holder.name) == (use.namespace, use.pod)
            ):
                is_placed = True
            elif holder is None or holder.kind is OwnerKind.CONTAINER:
                is_anothers = holder is not None and holder != use.owner and (cpu, holder.key) in listed
                if not is_anothers and cpu not in given:
                    cpus.append(cpu)
                    given.add(cpu)
            else:
                disagreements.append(
                    Disagreement(
                        device_class=CPU_RESOURCE, device=f"cpu-{cpu}", kubelet=use.where, ledger=f"{holder} holds it"
                    )
                )
        wanted = ExclusiveUse(
            namespace=use.namespace,
            pod=use.pod,
            container=use.container,
            cpus=CpuSet.of(cpus),
            # The ledger has the memory of a placed pod as well.
            memory=() if is_placed else use.memory,
        )
        if not _is_written(wanted, allocations.get(use.owner.key)):
            lacking.append(wanted)
    return tuple(lacking), tuple(disagreements)


def idle_containers(ledger: Holders, uses: Iterable[ExclusiveUse]) -> tuple[Allocation, ...]:
    """Return what the ledger holds for containers that kubelet no longer lists."""
    keys = {use.owner.key for use in uses}
    return tuple(
        allocation
        for key, allocation in sorted(ledger.allocations.items())
        if allocation.owner.kind is OwnerKind.CONTAINER and key not in keys
    )


def _holders(allocations: Mapping[str, Allocation]) -> dict[int, Owner]:
    return {
        cpu: allocation.owner
        for allocation in allocations.values()
        for holding in allocation.holdings
        for cpu in holding.cpus
    }


def _is_written(use: ExclusiveUse, allocation: Allocation | None) -> bool:
    if allocation is None:
        return not use.cpus and not use.memory
    held = CpuSet.of(cpu for holding in allocation.holdings for cpu in holding.cpus)
    memory = tuple(block for holding in allocation.holdings for block in holding.memory)
    return held == use.cpus and memory == use.memory
