"""Checks a fleet after a run, from what is stored alone: each claim has its devices, its node's
ledger holds exactly those, and no device has two holders.

It uses none of the controller's code.
"""

from __future__ import annotations

from collections.abc import Iterable

from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import class_of_device, node_of_pool
from topobus.values.ledger import Ledger

__all__ = ["find_faults"]

_Device = tuple[str, str, str]
"""Node, class and name."""


def find_faults(claims: Iterable[ApiObject], ledgers: Iterable[Ledger]) -> list[str]:
    """Return what is wrong, one sentence each. Empty when nothing is.

    Shapes: claims — whole devices only, each on the node whose name its pool has.
    Cost: O(devices held).
    """
    faults: list[str] = []
    holders: dict[_Device, str] = {}
    held_by: dict[str, set[_Device]] = {}
    for ledger in ledgers:
        for allocation in ledger.allocations.values():
            for holding in allocation.holdings:
                for device_class, names in holding.devices.items():
                    for name in names:
                        device = (ledger.node, device_class, name)
                        held_by.setdefault(allocation.owner.uid, set()).add(device)
                        before = holders.setdefault(device, allocation.owner.uid)
                        if before != allocation.owner.uid:
                            faults.append(
                                f"ledger of {ledger.node}: {device_class} {name} is held by {before} and by "
                                f"{allocation.owner.uid}"
                            )
    given: dict[_Device, str] = {}
    uids: set[str] = set()
    for claim in claims:
        name, uid = str(claim.metadata["name"]), str(claim.metadata["uid"])
        uids.add(uid)
        allocation_status = claim.status.get("allocation")
        if not isinstance(allocation_status, dict):
            faults.append(f"claim {name} is not allocated")
            continue
        devices = {
            (
                node_of_pool(result["pool"]),
                class_of_device(result["driver"], result["device"]) or result["driver"],
                result["device"],
            )
            for result in allocation_status["devices"]["results"]
        }
        faults += [
            f"{' '.join(device)} is given to claims {given[device]} and {name}"
            for device in sorted(devices)
            if given.setdefault(device, name) != name
        ]
        if devices != held_by.get(uid, set()):
            faults.append(
                f"claim {name} was given {sorted(devices)}, and ledgers hold {sorted(held_by.get(uid, set()))} for it"
            )
    faults += [
        f"ledgers hold {sorted(devices)} for {uid}, which is no claim"
        for uid, devices in sorted(held_by.items())
        if uid not in uids
    ]
    return faults
