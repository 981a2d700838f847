"""What the page lists of devices, nodes, events and decisions, as plain values for JSON.

The page draws these values and decides nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

from msgspec import structs

from topobus.console.rules.free_devices import free_view
from topobus.console.rules.node_drawing import View, conditions_view
from topobus.engine.health.silence import SERVICE_SILENT
from topobus.formats.messages.messages import DecisionEvent, HealthEvent, RepairState
from topobus.values.cluster_answers import FreeRow
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import CPU_CLASS
from topobus.values.ledger import Holders
from topobus.values.outcome import ContainerPlacement, Placement, Reason, Refusal
from topobus.values.request import Owner
from topobus.values.timestamps import rfc3339

__all__ = ["decision_view", "event_view", "for_counting", "node_row", "repair_views", "sick_view"]

# A hint list of a big machine has hundreds of entries. The narrow ones decide.
_SHOWN_HINTS = 24


def for_counting(inventory: Inventory) -> Inventory:
    """Keep of an inventory what rows and lists show: of a healthy device only its name, and where it
    is unless it is a CPU.

    A thousand nodes have a quarter of a million devices, CPUs included, each with attributes that
    only a drawing shows.
    """
    return structs.replace(inventory, devices=tuple(_for_counting(device) for device in inventory.devices))


def _for_counting(device: Device) -> Device:
    if device.health.worst is not None or not device.is_allocatable:
        return device
    if device.device_class == CPU_CLASS:
        return Device(name=device.name, device_class=CPU_CLASS)
    return Device(
        name=device.name,
        device_class=device.device_class,
        numa_nodes=device.numa_nodes,
        pcie_root=device.pcie_root,
    )


def node_row(
    node: str, inventories: Iterable[Inventory], rows: Mapping[str, FreeRow], silent: Collection[str] = ()
) -> View:
    """Count one node's devices by class: how many there are, are held, are free, and are unhealthy.
    Also names the silent services.
    """
    classes = [
        {
            **free_view(rows[inventory.device_class]),
            "sick": sum(not device.is_fit or device.health.worst is not None for device in inventory.devices),
        }
        for inventory in sorted(inventories, key=lambda inventory: inventory.device_class)
    ]
    return {"node": node, "classes": classes, "silent": sorted(silent)}


def sick_view(device: Device, node: str, ledger: Holders | None, event: HealthEvent | None = None) -> View | None:
    """Return what is wrong with a device, since when, what to do and which pods it affects.

    None when it is healthy and no operator withholds it. Also None when its service is silent and
    nothing else is known of it, as the service has an entry of its own.
    """
    worst = device.health.worst
    if (worst is None and device.is_fit) or (worst is not None and worst.reason == SERVICE_SILENT):
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
        "model": device.model,
        "pci": str(device.pci or ""),
        "numa": str(device.numa_nodes) if device.numa_nodes is not None else "",
        "users": sorted({str(owner) for owner in pods}),
        "conditions": conditions_view(device.health),
    }


def event_view(event: HealthEvent) -> View:
    """Return one health event: which device, from what to what, why, and which pods it affects."""
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


def repair_views(state: RepairState) -> dict[str, View]:
    """Return each repair under way and each device that was left to a person, by device."""
    return {
        "/".join(repair.place): {
            "node": repair.node,
            "device": repair.device,
            "now": repair.what,
            "is_left": repair.is_left,
            "rule": repair.rule.name,
            "reasons": ", ".join(repair.codes),
            "since": rfc3339(datetime.fromtimestamp(repair.step_s, UTC)),
            "why": repair.text,
        }
        for repair in state.repairs
        if repair.end is None or repair.is_left
    }


def decision_view(event: DecisionEvent) -> View:
    """Return a decision in parts: the request, hints and their merge by container, picks or
    reasons.
    """
    outcome = event.outcome
    asked = event.request.containers if event.request is not None else ()
    return {
        "id": event.id,
        "time": event.time,
        "verb": event.verb,
        "node": event.node,
        "owner": str(event.owner),
        "text": event.text,
        "is_dry_run": event.is_dry_run,
        "is_refused": isinstance(outcome, Refusal),
        "summary": event.answer,
        "policy": f"{event.view.options.policy.value}, scope {event.view.options.scope.value}"
        if event.view is not None and _is_aligned(outcome)
        else "",
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
        "containers": [_container_view(container) for container in outcome.containers]
        if isinstance(outcome, Placement)
        else [],
        "reasons": [_reason(reason) for reason in outcome.reasons] if isinstance(outcome, Refusal) else [],
        "to_free": [_reason(reason) for reason in outcome.to_free] if isinstance(outcome, Refusal) else [],
    }


def _is_aligned(outcome: Placement | Refusal | None) -> bool:
    """Say whether the node's policy affected the outcome. It does not for a claim's devices."""
    return not isinstance(outcome, Placement) or any(container.has_alignment for container in outcome.containers)


def _holders_of(ledger: Holders | None, device_class: str, name: str) -> list[Owner]:
    return [
        owner
        for allocation in (ledger.allocations if ledger is not None else {}).values()
        if any(name in holding.devices.get(device_class, ()) for holding in allocation.holdings)
        for owner in dict.fromkeys((allocation.shown, *allocation.pods))
    ]


def _container_view(container: ContainerPlacement) -> View:
    return {
        "container": container.name or "(claim)",
        "merged": container.alignment.text if container.has_alignment else "",
        "numa": str(container.numa_nodes) or "-",
        "cpus": str(container.cpus),
        "devices": {device_class: list(names) for device_class, names in sorted(container.devices.items())},
        "hints": [
            {
                "resource": listed.resource,
                "hints": None if listed.hints is None else [hint.text for hint in listed.hints[:_SHOWN_HINTS]],
            }
            for listed in container.hints
        ],
        "reasons": [_reason(reason) for reason in container.shown_reasons],
    }


def _reason(reason: Reason) -> View:
    return {"code": reason.code, "message": reason.message or reason.code}
