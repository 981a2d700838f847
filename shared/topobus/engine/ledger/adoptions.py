"""What an adoption takes: the devices that it names, and CPUs that are chosen here for shares of
groups of CPUs.

The policy is kubelet's static one with the node's options. An owner keeps the CPUs that it has of a
group: when it asks again, it gets the same CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.engine.alignment.cpus.exclusive_choice import choose_exclusive_cpus
from topobus.engine.alignment.planning.node_view import cpu_name, cpu_of_name
from topobus.engine.ledger.adoption_faults import fault_of_adoption, shares_of
from topobus.engine.ledger.transitions import adopted_by
from topobus.formats.messages.messages import AdoptRequest
from topobus.values.cpu_groups import is_cpu_group
from topobus.values.device import Device
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger, OperationRecord
from topobus.values.outcome import Refusal, refuse
from topobus.values.view import NodeView

__all__ = ["Taken", "adopted_cpus", "read_adoption"]


class Taken(Struct, frozen=True, kw_only=True):
    """What an adoption takes."""

    adoption: AdoptRequest
    """As it was asked, with CPUs in the places of groups, and held by share only what its driver
    shares."""
    groups: Mapping[str, CpuSet] = {}
    """Which CPUs were chosen of which group."""


def read_adoption(asked: AdoptRequest, ledger: Ledger, view: NodeView, cpus: Iterable[Device]) -> Taken | Refusal:
    """Choose the CPUs of the groups that an adoption names.

    Shapes: view — of the node with nothing held; cpus — the devices of class `cpu`, groups among
            them.
    Order: groups by name. Each group chooses from the CPUs that those before it left.
    Errors: raises nothing; Refusal codes not-enough-cpus, smt-alignment, and those of
            `fault_of_adoption`.
    """
    asked = structs.replace(asked, shared=shares_of(view, asked))
    if not asked.group_cpus:
        return fault_of_adoption(view, ledger, asked) or Taken(adoption=asked)
    groups = {device.name: device for device in cpus if is_cpu_group(device)}
    topology, online = CpuTopology.of_cores(view.cores), CpuSet()
    for core in view.cores:
        online |= core.cpus
    named = CpuSet.of(cpu for name in asked.devices.get(CPU_CLASS, ()) if (cpu := cpu_of_name(name)) is not None)
    free = online - view.unhealthy_cpus - named - _held_by_others(ledger, asked.owner.key)
    if asked.owned_cpus is not None:
        free &= asked.owned_cpus
    kept = _kept(asked, ledger, groups, free)
    chosen: dict[str, CpuSet] = {}
    for cpus_of_group in kept.values():
        free -= cpus_of_group
    for name, count in sorted(asked.group_cpus.items()):
        if name not in groups:
            return refuse(
                "unknown-device",
                f"there is no group of CPUs named {name!r} on node {view.node}",
                resource=CPU_CLASS,
                device=name,
            )
        if name in kept:
            chosen[name] = kept[name]
            continue
        outcome = choose_exclusive_cpus(
            topology, free & groups[name].near_cpus, count, view.options.cpu, reserved=view.reserved_cpus
        )
        if isinstance(outcome, Refusal):
            return refuse(
                outcome.reasons[0].code,
                f"group {name}: {outcome.reasons[0].message}",
                **{**outcome.reasons[0].facts, "device": name},
            )
        chosen[name] = outcome
        free -= outcome
    devices = {
        device_class: tuple(name for name in names if name not in groups)
        for device_class, names in asked.devices.items()
    }
    devices[CPU_CLASS] = (
        *devices.get(CPU_CLASS, ()),
        *(cpu_name(cpu) for cpus_of_group in chosen.values() for cpu in cpus_of_group),
    )
    settled = structs.replace(asked, devices=devices)
    return fault_of_adoption(view, ledger, settled) or Taken(adoption=settled, groups=chosen)


def adopted_cpus(asked: AdoptRequest, ledger: Ledger, record: OperationRecord) -> dict[str, CpuSet] | Refusal:
    """Answer an adoption again from the present ledger: which CPUs the owner has of each group, or
    why it does not hold what it asked for.
    """
    # Admin access holds nothing, so nothing of it can be lost.
    held = {} if asked.is_shared else asked.devices
    single = {
        device_class: tuple(name for name in names if name not in asked.group_cpus)
        for device_class, names in held.items()
    }
    refusal = adopted_by(ledger, record, single)
    if refusal is not None:
        return refusal
    chosen = _groups_of(ledger, asked.owner.key)
    lost = sorted(name for name, count in asked.group_cpus.items() if name not in chosen or len(chosen[name]) != count)
    if lost:
        message = (
            f"decision {record.decision_id} chose CPUs of {', '.join(lost)} for {record.owner_key}, which does "
            "not hold them now: use a new op_id"
        )
        return refuse("released-since", message, decision=record.decision_id)
    return {name: chosen[name] for name in sorted(asked.group_cpus)}


def _held_by_others(ledger: Ledger, owner_key: str) -> CpuSet:
    held = CpuSet()
    for key, allocation in ledger.allocations.items():
        for holding in allocation.holdings if key != owner_key else ():
            held |= holding.cpus
    return held


def _groups_of(ledger: Ledger, owner_key: str) -> dict[str, CpuSet]:
    allocation = ledger.allocations.get(owner_key)
    return (
        {name: cpus for holding in allocation.holdings for name, cpus in holding.groups.items()}
        if allocation is not None
        else {}
    )


def _kept(asked: AdoptRequest, ledger: Ledger, groups: Mapping[str, Device], free: CpuSet) -> dict[str, CpuSet]:
    """List the CPUs of groups that the owner has already and may keep."""
    return {
        name: cpus
        for name, cpus in _groups_of(ledger, asked.owner.key).items()
        if name in groups and asked.group_cpus.get(name) == len(cpus) and cpus <= free & groups[name].near_cpus
    }
