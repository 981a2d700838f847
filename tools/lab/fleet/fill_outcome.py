"""The required result of a fill, whatever died meanwhile: every claim has its devices, the nodes'
ledgers hold them for it, and no device is in two claims.

Pure, and from what is stored alone: it uses none of the controller's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from topobus.values.dra_names import class_of_device, node_of_pool
from topobus.values.ledger import Ledger

__all__ = ["faults_of", "left_at_nodes"]

_SHOWN = 5
_Device = tuple[str, str, str]
"""Node, class and name."""


def faults_of(
    claims: Iterable[Mapping[str, Any]], ledgers: Iterable[Ledger], *, are_reserved: bool = True
) -> list[str]:
    """Return what is wrong at the end of a fill. Empty when nothing is.

    Shapes: claims — metadata and status; are_reserved — each must be reserved for one pod.
    Cost: O(devices held).
    """
    held = _held(ledgers)
    holders: dict[_Device, list[str]] = {}
    uids: dict[str, str] = {}
    without: list[str] = []
    unreserved: list[str] = []
    for claim in claims:
        name = str(claim["metadata"]["name"])
        uids[name] = str(claim["metadata"]["uid"])
        devices = _devices(claim)
        if not devices:
            without.append(name)
        elif are_reserved and len(claim["status"].get("reservedFor") or ()) != 1:
            unreserved.append(name)
        for device in devices:
            holders.setdefault(device, []).append(name)
    named = {
        "claims without devices": without,
        "claims that are not reserved for one pod": unreserved,
        "devices in two claims": [
            f"{'/'.join(device)} ({', '.join(names)})" for device, names in sorted(holders.items()) if len(names) > 1
        ],
        "devices that a ledger holds for two": ["/".join(device) for device in sorted(held) if len(held[device]) > 1],
        "devices that the node's ledger does not hold for their claim": [
            f"{'/'.join(device)} of {names[0]}"
            for device, names in sorted(holders.items())
            if uids[names[0]] not in held.get(device, ())
        ],
    }
    return [f"{len(those)} {what}: {', '.join(those[:_SHOWN])}" for what, those in named.items() if those]


def left_at_nodes(claims: Iterable[Mapping[str, Any]], ledgers: Iterable[Ledger]) -> list[str]:
    """Name devices that a ledger holds and no claim has: a node that answered too late held them
    for a claim that was allocated elsewhere. Its gateway would release them, but this fill has
    none.
    """
    had = {device for claim in claims for device in _devices(claim)}
    return ["/".join(device) for device in sorted(_held(ledgers).keys() - had)]


def _devices(claim: Mapping[str, Any]) -> list[_Device]:
    """List the devices of a claim's allocation."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return [
        (
            node_of_pool(result["pool"]),
            class_of_device(result["driver"], result["device"]) or result["driver"],
            result["device"],
        )
        for result in (allocation.get("devices") or {}).get("results") or ()
    ]


def _held(ledgers: Iterable[Ledger]) -> dict[_Device, set[str]]:
    """Map what ledgers hold to the uids of the holders."""
    held: dict[_Device, set[str]] = {}
    for ledger in ledgers:
        for allocation in ledger.allocations.values():
            for holding in allocation.holdings:
                for device_class, names in holding.devices.items():
                    for name in names:
                        held.setdefault((ledger.node, device_class, name), set()).add(allocation.owner.uid)
    return held
