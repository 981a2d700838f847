"""The required result of a fill, whatever died meanwhile: every claim has its devices, the nodes'
ledgers hold them for it, and no device is in two claims.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from topobus.testing.apiserver import Object
from topobus.values.dra_names import class_of_device, node_of_pool
from topobus.values.ledger import Ledger

__all__ = ["faults_of", "left_at_nodes"]

_SHOWN = 5


def faults_of(claims: Iterable[Object], ledgers: Iterable[Ledger]) -> list[str]:
    """Return what is wrong at the end of a fill. Empty when nothing is.

    Shapes: claims — only of our driver, each reserved for a pod.
    """
    held = _held(ledgers)
    holders: dict[tuple[str, str, str], list[str]] = {}
    uids: dict[str, str] = {}
    without: list[str] = []
    unreserved: list[str] = []
    for claim in claims:
        name, status = str(claim["metadata"]["name"]), claim.get("status") or {}
        uids[name] = str(claim["metadata"]["uid"])
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
        if not results:
            without.append(name)
        elif len(status.get("reservedFor") or ()) != 1:
            unreserved.append(name)
        for result in results:
            holders.setdefault(_device(result), []).append(name)
    doubles = [
        f"{'/'.join(device)} ({', '.join(names)})" for device, names in sorted(holders.items()) if len(names) > 1
    ]
    unheld = [
        f"{'/'.join(device)} of {names[0]}"
        for device, names in sorted(holders.items())
        if held.get(device) != uids[names[0]]
    ]
    named = {
        "claims without devices": without,
        "claims that are not reserved for one pod": unreserved,
        "devices in two claims": doubles,
        "devices that the node's ledger does not hold for their claim": unheld,
    }
    return [f"{len(those)} {what}: {', '.join(those[:_SHOWN])}" for what, those in named.items() if those]


def left_at_nodes(claims: Iterable[Object], ledgers: Iterable[Ledger]) -> list[str]:
    """Name devices that a ledger holds and no claim has: a node that answered too late held them
    for a claim that was allocated elsewhere. Its gateway would release them, but this fill has
    none.
    """
    results = [
        result
        for claim in claims
        for result in (((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
    ]
    had = {_device(result) for result in results}
    return ["/".join(device) for device in sorted(_held(ledgers).keys() - had)]


def _device(result: Object) -> tuple[str, str, str]:
    """Name a granted device as node, class and device."""
    device_class = class_of_device(result["driver"], result["device"])
    return node_of_pool(result["pool"]), device_class or "", result["device"]


def _held(ledgers: Iterable[Ledger]) -> dict[tuple[str, str, str], str]:
    """Map what ledgers hold, as node, class and device, to the holder's uid."""
    return {
        (ledger.node, device_class, device): allocation.owner.uid
        for ledger in ledgers
        for allocation in ledger.allocations.values()
        for holding in allocation.holdings
        for device_class, devices in holding.devices.items()
        for device in devices
    }
