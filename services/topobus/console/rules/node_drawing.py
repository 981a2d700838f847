"""One machine as the page draws it: the drawing of the CLI (`topobus.engine.drawing`), with the
details of each device.

The dictionaries are in the order in which the page shows them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from topobus.engine.drawing.layout import DrawnCore, NumaPanel, Place, RootBranch, layout_of
from topobus.engine.drawing.leaves import HEALTH_SIGNS, Leaf, short_address
from topobus.engine.drawing.letters import DrawnHolder, DrawnHolders
from topobus.values.device import Device, Inventory
from topobus.values.health import DeviceHealth, HealthState
from topobus.values.ledger import Holders
from topobus.values.machine import Machine

__all__ = ["View", "conditions_view", "node_view"]

View = dict[str, Any]

_NO_HOLDER = -1


def node_view(
    machine: Machine, inventories: Iterable[Inventory], ledger: Holders | None, letters: Mapping[str, str] | None = None
) -> View:
    """Return one machine as it is drawn: sockets with NUMA nodes, these with cores, root complexes,
    switches and devices, with their holders and the meaning of the signs.

    Order and signs: as in `layout_of`. `letters` are those that owners have had, by key.
    """
    layout = layout_of(machine, inventories, ledger, letters=letters)
    users = _users(layout.holders)
    return {
        "node": layout.node,
        "generation": layout.generation,
        "summary": layout.summary,
        "sockets": [[_panel(panel, layout.holders, users) for panel in panels] for panels in layout.sockets],
        "elsewhere": None
        if layout.elsewhere is None
        else {
            "title": "NUMA node not reported by the machine",
            "memory": "",
            **_place(layout.elsewhere, layout.holders, users),
        },
        "memory_only": layout.memory_only,
        "holders": [
            {
                "letter": holder.letter,
                "colour": holder.colour,
                "name": holder.name,
                "holds": holder.held_text,
                "decision": holder.allocation.decision_id,
            }
            for holder in layout.holders.all
        ],
        "distances": layout.distances,
        "warnings": list(layout.warnings),
    }


def conditions_view(health: DeviceHealth) -> list[View]:
    """Return what is wrong with a device, the worst first, in its service's order."""
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


def _users(holders: DrawnHolders) -> dict[tuple[str, str], list[DrawnHolder]]:
    """Map devices, by class and name, to their holders. A shared device has several."""
    users: dict[tuple[str, str], list[DrawnHolder]] = {}
    for holder in holders.all:
        for device_class, names in holder.allocation.devices.items():
            for name in names:
                users.setdefault((device_class, name), []).append(holder)
    return users


def _panel(panel: NumaPanel, holders: DrawnHolders, users: Mapping[tuple[str, str], list[DrawnHolder]]) -> View:
    title = " · ".join(part for part in (panel.socket_text, f"NUMA node {panel.node.id}") if part)
    return {"title": title, "memory": panel.memory_text, **_place(panel, holders, users)}


def _place(place: Place, holders: DrawnHolders, users: Mapping[tuple[str, str], list[DrawnHolder]]) -> View:
    caches: dict[int | None, list[View]] = {}
    for core in place.cores:
        caches.setdefault(core.l3, []).append(_core(core, holders))
    return {
        "cpus": place.cpus_text if place.cores else "",
        "caches": place.caches,
        "cores": list(caches.values()),
        "roots": _roots(place.roots, holders, users),
    }


def _core(core: DrawnCore, holders: DrawnHolders) -> View:
    names = dict.fromkeys(holders.by_cpu[cpu].name for cpu in core.cpus if cpu in holders.by_cpu)
    return {
        "sign": core.sign,
        "colour": core.holder.colour if core.holder is not None else _NO_HOLDER,
        "is_sick": core.is_sick,
        "text": f"cpu {core.cpus}: "
        f"{'not well' if core.is_sick else ''}{', ' if core.is_sick and names else ''}{', '.join(names)}"
        if core.is_sick or names
        else f"cpu {core.cpus}: free",
    }


def _roots(
    roots: Iterable[RootBranch], holders: DrawnHolders, users: Mapping[tuple[str, str], list[DrawnHolder]]
) -> list[View]:
    return [
        {
            "title": root.title,
            "switches": [
                {
                    "title": f"switch {short_address(branch.switch)}" if branch.switch else "",
                    "devices": [_leaf(leaf, holders, users) for leaf in branch.leaves],
                }
                for branch in root.switches
            ],
        }
        for root in roots
    ]


def _leaf(leaf: Leaf, holders: DrawnHolders, users: Mapping[tuple[str, str], list[DrawnHolder]]) -> View:
    if leaf.device is None:
        return {"class": leaf.device_class, "name": leaf.name, "text": leaf.text, "is_offered": False}
    sharers = holders.sharers.get((leaf.device_class, leaf.name), ())
    shared = f" shared by {''.join(sharer.letter for sharer, _ in sharers)}" if len(sharers) > 1 else ""
    return {
        **_device(leaf.device, leaf.text + shared, holders, users),
        "parts": [_device(part, _text(part), holders, users) for part in leaf.parts],
    }


def _text(device: Device) -> str:
    worst = device.health.worst
    if worst is not None:
        return worst.reason
    return "spare" if device.is_spare else device.model or device.vendor


def _device(
    device: Device, text: str, holders: DrawnHolders, users: Mapping[tuple[str, str], list[DrawnHolder]]
) -> View:
    worst = device.health.worst
    place = (device.device_class, device.name)
    holder = holders.by_device.get(place)
    return {
        "class": device.device_class,
        "name": device.name,
        "text": text,
        "is_offered": True,
        "sign": holder.letter if holder is not None else "·",
        "colour": holder.colour if holder is not None else _NO_HOLDER,
        "mark": HEALTH_SIGNS[device.health.state].strip() or ("" if device.is_allocatable else "-"),
        "state": device.health.state.value,
        "is_well": device.health.state is HealthState.HEALTHY and device.is_fit,
        "reason": worst.reason if worst is not None else device.why_not,
        "message": worst.message if worst is not None else "",
        "conditions": conditions_view(device.health),
        "model": device.model or device.vendor,
        "pci": str(device.pci or ""),
        "numa": str(device.numa_nodes) if device.numa_nodes is not None else "not reported",
        "users": list(
            dict.fromkeys(
                name
                for user in users.get(place, ())
                for name in (user.name, *(str(pod) for pod in user.allocation.pods))
            )
        ),
    }
