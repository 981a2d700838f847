"""What the page shows of devices, nodes, events, decisions and objects, as plain values for JSON.

Flows in: inventories, ledgers, machines, events, stored objects. Flows out: dictionaries of texts, numbers and lists; the page draws them and decides nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from topobus.contracts.messages import ApiObject, DecisionEvent, HealthEvent
from topobus.domain.device import Device, Inventory
from topobus.domain.health import DeviceHealth
from topobus.domain.hint import Hint
from topobus.domain.ledger import Holders
from topobus.domain.machine import Cpu, Machine
from topobus.domain.outcome import ContainerPlacement, Placement, Reason, Refusal
from topobus.domain.request import Owner

__all__ = ["View", "decision_view", "event_view", "node_row", "node_view", "sick_view", "waiting_view"]

View = dict[str, Any]

_CPU = "cpu"
# A hint list of a big machine has hundreds of entries; the narrow ones decide.
_SHOWN_HINTS = 24
_CONDITIONS = {"ResourceClaim": "Allocated", "Pod": "PodScheduled"}
_ADVICE = ("nearest-miss", "would-fit")


def node_row(node: str, inventories: Iterable[Inventory], ledger: Holders | None) -> View:
    """Count one node's devices: by class how many there are, are held, are free, and are not well."""
    classes = []
    for inventory in sorted(inventories, key=lambda inventory: inventory.device_class):
        held = _held_names(ledger, inventory.device_class)
        names = {device.name for device in inventory.devices}
        unfit = {device.name for device in inventory.devices if not device.is_allocatable}
        classes.append(
            {
                "class": inventory.device_class,
                "total": len(names),
                "held": len(held & names),
                "free": len(names - held - unfit),
                "sick": sum(not device.is_allocatable or device.health.worst is not None for device in inventory.devices),
            }
        )
    return {"node": node, "classes": classes}


def sick_view(device: Device, node: str, ledger: Holders | None, event: HealthEvent | None = None) -> View | None:
    """Say what is wrong with a device, since when, what to do and whom it affects; None when it is well and no operator keeps it back."""
    worst = device.health.worst
    if worst is None and device.is_allocatable:
        return None
    pods = [*event.pods, *event.affected] if event is not None else []
    pods += _holders_of(ledger, device.device_class, device.name)
    return {
        "node": node,
        "class": device.device_class,
        "device": device.name,
        "state": device.health.state.value if device.maintenance is None else device.maintenance.verb.value,
        "reason": worst.reason if worst is not None else "kept-back",
        "message": worst.message if worst is not None else device.why_not,
        "action": worst.action.value if worst is not None else "",
        "since": device.health.since,
        "users": sorted({str(owner) for owner in pods}),
        "conditions": _conditions(device.health),
    }


def node_view(machine: Machine, inventories: Iterable[Inventory], ledger: Holders | None) -> View:
    """Give one machine as it is drawn: NUMA nodes with their cores, root complexes, switches and devices, and who holds what.

    Order: NUMA nodes by id, devices by root complex, switch, class and name; holders by key, and each is known by its place in that list.
    """
    all_inventories = tuple(inventories)
    allocations = [allocation for _, allocation in sorted((ledger.allocations if ledger is not None else {}).items())]
    by_cpu: dict[int, int] = {}
    by_device: dict[tuple[str, str], list[int]] = {}
    for place, allocation in enumerate(allocations):
        for holding in allocation.holdings:
            by_cpu.update(dict.fromkeys(holding.cpus, place))
            for device_class, names in holding.devices.items():
                for name in names:
                    users = by_device.setdefault((device_class, name), [])
                    if place not in users:
                        users.append(place)
    unfit_cpus = {
        device.cpu
        for inventory in all_inventories
        if inventory.device_class == _CPU
        for device in inventory.devices
        if device.cpu is not None and not device.is_allocatable
    }
    devices = [device for inventory in all_inventories if inventory.device_class != _CPU for device in inventory.devices]
    devices.sort(key=lambda device: (device.pcie_root, str(device.pcie_switch or ""), device.device_class, device.name))
    of_node: dict[int | None, list[Device]] = {}
    for device in devices:
        of_node.setdefault(device.numa_nodes.lowest if device.numa_nodes else None, []).append(device)
    drawn = {numa_node.id for numa_node in machine.numa_nodes}
    numa_nodes = []
    for numa_node in machine.numa_nodes:
        cpus = [cpu for cpu in machine.cpus if cpu.online and cpu.numa_node == numa_node.id]
        numa_nodes.append(
            {
                "id": numa_node.id,
                "socket": next((cpu.socket for cpu in cpus if cpu.socket is not None), None),
                "memory_bytes": numa_node.memory_bytes,
                "cpus": len(cpus),
                "free_cpus": sum(cpu.id not in by_cpu and cpu.id not in unfit_cpus for cpu in cpus),
                "cores": _cores(cpus, by_cpu, unfit_cpus),
                "roots": _roots(of_node.get(numa_node.id, ()), by_device),
            }
        )
    homeless = [device for node_id, listed in of_node.items() if node_id is None or node_id not in drawn for device in listed]
    return {
        "node": machine.node,
        "generation": machine.generation,
        "numa_nodes": numa_nodes,
        "elsewhere": _roots(homeless, by_device),
        "distances": [list(row) for row in machine.distances],
        "holders": [
            {
                "name": str(allocation.shown),
                "pods": sorted(str(pod) for pod in allocation.pods),
                "cpus": str(_cpus_of(ledger, place)),
                "devices": sorted(
                    f"{kind}/{name}" for holding in allocation.holdings for kind, names in holding.devices.items() for name in names
                ),
                "decision": allocation.decision_id,
            }
            for place, allocation in enumerate(allocations)
        ],
        "warnings": [
            *machine.warnings,
            *(f"{inventory.device_class}: {text}" for inventory in all_inventories for text in inventory.warnings),
        ],
    }


def event_view(event: HealthEvent) -> View:
    """Give one health event: which device, from what to what, why, and whom it affects."""
    worst = event.health.worst
    return {
        "time": event.time,
        "node": event.node,
        "class": event.device_class,
        "device": event.device,
        "state": "removed" if event.is_removed else event.health.state.value,
        "previous": event.previous.value if event.previous is not None else "",
        "reason": worst.reason if worst is not None else "",
        "message": worst.message if worst is not None else "",
        "users": sorted({str(owner) for owner in (*event.pods, *event.affected)}),
    }


def decision_view(event: DecisionEvent) -> View:
    """Take a decision apart: what was asked, hints and their merge by container, picks or reasons."""
    outcome = event.outcome
    asked = event.request.containers if event.request is not None else ()
    return {
        "id": event.id,
        "time": event.time,
        "verb": event.verb,
        "node": event.node,
        "owner": str(event.owner),
        "is_dry_run": event.is_dry_run,
        "is_refused": isinstance(outcome, Refusal),
        "summary": _summary(outcome),
        "policy": f"{event.view.options.policy.value}, scope {event.view.options.scope.value}" if event.view is not None else "",
        "asked": [
            {
                "container": container.name,
                "wants": ", ".join(
                    [*(f"{device.count} {device.device_class}" for device in container.devices)]
                    + ([f"{container.cpus} exclusive cpus"] if container.cpus else [])
                ),
            }
            for container in asked
        ],
        "containers": [_container_view(container) for container in outcome.containers] if isinstance(outcome, Placement) else [],
        "reasons": [_reason(reason) for reason in outcome.reasons] if isinstance(outcome, Refusal) else [],
        "to_free": [_reason(reason) for reason in outcome.to_free] if isinstance(outcome, Refusal) else [],
    }


def waiting_view(api_object: ApiObject) -> View | None:
    """Say why a claim or pod waits; None for what does not wait, and for other kinds."""
    kind = api_object.kind
    wanted = _CONDITIONS.get(kind)
    if wanted is None or (kind == "ResourceClaim" and api_object.status.get("allocation")):
        return None
    conditions = api_object.status.get("conditions")
    named = (
        [entry for entry in conditions if isinstance(entry, dict) and entry.get("type") == wanted] if isinstance(conditions, list) else []
    )
    condition: Mapping[str, Any] = named[0] if named else {}
    if kind == "Pod" and (condition.get("status") == "True" or api_object.spec.get("nodeName")):
        return None
    metadata = api_object.metadata
    return {
        "kind": "claim" if kind == "ResourceClaim" else "pod",
        "namespace": str(metadata.get("namespace") or "default"),
        "name": str(metadata.get("name") or ""),
        "reason": str(condition.get("reason") or "not looked at yet"),
        "message": str(condition.get("message") or ""),
        "since": str(metadata.get("creationTimestamp") or ""),
    }


def _held_names(ledger: Holders | None, device_class: str) -> set[str]:
    holdings = [holding for allocation in (ledger.allocations if ledger is not None else {}).values() for holding in allocation.holdings]
    if device_class == _CPU:
        return {f"cpu-{cpu}" for holding in holdings for cpu in holding.cpus}
    return {name for holding in holdings for name in holding.devices.get(device_class, ())}


def _holders_of(ledger: Holders | None, device_class: str, name: str) -> list[Owner]:
    return [
        owner
        for allocation in (ledger.allocations if ledger is not None else {}).values()
        if any(name in holding.devices.get(device_class, ()) for holding in allocation.holdings)
        for owner in (allocation.shown, *allocation.pods)
    ]


def _cpus_of(ledger: Holders | None, place: int) -> str:
    allocation = sorted((ledger.allocations if ledger is not None else {}).items())[place][1]
    return ",".join(str(holding.cpus) for holding in allocation.holdings if holding.cpus)


def _conditions(health: DeviceHealth) -> list[View]:
    return [
        {
            "dimension": condition.dimension.value,
            "state": condition.state.value,
            "reason": condition.reason,
            "message": condition.message,
            "evidence": dict(sorted(condition.evidence.items())),
            "action": condition.action.value,
            "since": condition.since,
        }
        for condition in health.conditions
    ]


def _cores(cpus: Iterable[Cpu], by_cpu: Mapping[int, int], unfit: set[int]) -> list[View]:
    """Give one cell a core: its CPUs, who holds one of them (-1: nobody), and whether it is unfit."""
    cells = []
    for _, group in groupby(sorted(cpus, key=_core_key), key=_core_key):
        ids = [cpu.id for cpu in group]
        holders = [by_cpu[cpu] for cpu in ids if cpu in by_cpu]
        cells.append({"cpus": ids, "holder": holders[0] if holders else -1, "is_unfit": any(cpu in unfit for cpu in ids)})
    return cells


def _core_key(cpu: Cpu) -> int:
    return cpu.core if cpu.core is not None else cpu.id


def _roots(devices: Iterable[Device], by_device: Mapping[tuple[str, str], list[int]]) -> list[View]:
    return [
        {
            "root": root,
            "switches": [
                {"switch": switch, "devices": [_device(device, by_device) for device in group]}
                for switch, group in groupby(under_root, key=lambda device: str(device.pcie_switch or ""))
            ],
        }
        for root, under_root in groupby(devices, key=lambda device: device.pcie_root)
    ]


def _device(device: Device, by_device: Mapping[tuple[str, str], list[int]]) -> View:
    worst = device.health.worst
    return {
        "class": device.device_class,
        "name": device.name,
        "model": device.model or device.vendor,
        "state": device.health.state.value,
        "is_allocatable": device.is_allocatable,
        "reason": worst.reason if worst is not None else device.why_not,
        "message": worst.message if worst is not None else "",
        "conditions": _conditions(device.health),
        "pci": str(device.pci or ""),
        "numa": str(device.numa_nodes) if device.numa_nodes is not None else "?",
        "holders": by_device.get((device.device_class, device.name), []),
    }


def _summary(outcome: Placement | Refusal | None) -> str:
    if outcome is None:
        return "done"
    if isinstance(outcome, Refusal):
        return "refused: " + ", ".join(dict.fromkeys(reason.code for reason in outcome.reasons if reason.code not in _ADVICE))
    texts = []
    for container in outcome.containers:
        held = [f"{len(names)} {device_class}" for device_class, names in sorted(container.devices.items())]
        held += [f"{len(container.cpus)} cpus"] if container.cpus else []
        texts.append(f"{container.name or 'claim'}: {', '.join(held) or 'nothing'} on NUMA {container.numa_nodes or '-'}")
    return "placed: " + "; ".join(texts)


def _container_view(container: ContainerPlacement) -> View:
    return {
        "container": container.name or "(claim)",
        "merged": _hint(container.alignment),
        "numa": str(container.numa_nodes) or "-",
        "cpus": str(container.cpus),
        "devices": {device_class: list(names) for device_class, names in sorted(container.devices.items())},
        "hints": [
            {"resource": listed.resource, "hints": None if listed.hints is None else [_hint(hint) for hint in listed.hints[:_SHOWN_HINTS]]}
            for listed in container.hints
        ],
        "reasons": [_reason(reason) for reason in container.reasons],
    }


def _hint(hint: Hint) -> str:
    """Write a hint as the CLI does: the nodes, and a star when it is preferred."""
    return f"{{{hint.nodes if hint.nodes is not None else 'any'}}}{'*' if hint.preferred else ''}"


def _reason(reason: Reason) -> View:
    return {"code": reason.code, "message": reason.message or reason.code}
