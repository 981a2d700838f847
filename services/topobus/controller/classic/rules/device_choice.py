"""Chooses devices of a node for classic claims: all claims together, each with the number that it
asks for, or the reasons why they do not fit.

The reasons count the failed checks. The claims compete for devices, so this is a bipartite matching
found by augmenting paths, not a first fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topobus.controller.classic.rules.selection import is_wanted
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.values import DeviceId
from topobus.formats.kubernetes.classic.classic_parameters import DeviceSelector
from topobus.formats.kubernetes.slices import health_reason
from topobus.values.outcome import Reason, Refusal, refuse

__all__ = ["Wanted", "choose", "fitting_devices"]

# Effects of a taint with which a device may still be allocated. A device with an unknown effect
# must not be.
_HARMLESS = ("None",)


@dataclass(frozen=True)
class Wanted:
    """What one claim wants of the node."""

    name: str
    """Name in messages: `default/fast`."""
    count: int
    of_class: DeviceSelector
    of_claim: DeviceSelector


def choose(
    node: str, wanted: Sequence[Wanted], devices: Sequence[Candidate], taken: Mapping[DeviceId, str]
) -> tuple[tuple[str, ...], ...] | Refusal:
    """Choose devices for all claims at once.

    Shapes: devices — those of one class on the node; taken — device to why it is not free; result
    — the names for each claim, sorted.
    Order: claims and devices as given. The first device that leaves room for all is taken, so the
    same input gives the same choice.
    Cost: O(devices wanted x devices x claims).

    Errors: raises nothing. Refuses with a reason for each claim that does not fit by itself, or
    with one reason about all of them together.
    """
    usable: list[list[int]] = []
    reasons: list[Reason] = []
    for claim in wanted:
        fitting, why = fitting_devices(node, claim, devices, taken)
        usable.append(fitting)
        if len(fitting) < claim.count:
            reasons.append(why)
    if reasons:
        return Refusal(reasons=tuple(reasons))
    slots = [index for index, claim in enumerate(wanted) for _ in range(claim.count)]
    chosen = _match(slots, usable)
    if chosen is None:
        names = tuple(claim.name for claim in wanted)
        message = (
            f"node {node}: {', '.join(names)} want {len(slots)} devices together, and want the same ones: each "
            "alone could be had"
        )
        return refuse("claims-compete", message, node=node, claims=names, wanted=len(slots))
    given: list[list[int]] = [[] for _ in wanted]
    for device, slot in chosen.items():
        given[slots[slot]].append(device)
    return tuple(tuple(sorted(devices[index].id.device for index in indices)) for indices in given)


def fitting_devices(
    node: str, claim: Wanted, devices: Sequence[Candidate], taken: Mapping[DeviceId, str]
) -> tuple[list[int], Reason]:
    """Find the devices that a claim could use, and count the others by the first check that each
    fails.
    """
    fitting: list[int] = []
    counts: dict[str, int] = {}
    for index, device in enumerate(devices):
        why = _first_failure(claim, device, taken)
        if why is None:
            fitting.append(index)
        else:
            counts[why] = counts.get(why, 0) + 1
    parts = "; ".join(f"{count}: {why}" for why, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    message = f"node {node}: {claim.name} wants {claim.count} of {len(devices)} devices, {len(fitting)} can be had"
    return fitting, Reason(
        code="too-few-devices",
        message=f"{message} ({parts})" if parts else message,
        facts={"node": node, "claim": claim.name, "wanted": claim.count, "free": len(fitting), "devices": len(devices)},
    )


def _first_failure(claim: Wanted, device: Candidate, taken: Mapping[DeviceId, str]) -> str | None:
    if not is_wanted(claim.of_class, device.facts):
        return "not of the class"
    if not is_wanted(claim.of_claim, device.facts):
        return "not selected"
    if device.device.allow_multiple_allocations:
        return "shared by claims with structured parameters"
    taint = next((taint for taint in device.device.taints if taint.effect not in _HARMLESS), None)
    if taint is not None:
        reason = health_reason(device.device, taint)
        return (f"{taint.key}={taint.value}" if taint.value else taint.key) + (f" ({reason})" if reason else "")
    holder = taken.get(device.id)
    return f"taken by {holder}" if holder is not None else None


def _match(slots: Sequence[int], usable: Sequence[Sequence[int]]) -> dict[int, int] | None:
    """Give every slot a device of its own, as device index to slot. None when that is
    impossible.
    """
    holds: dict[int, int] = {}
    for slot in range(len(slots)):
        came_from: dict[int, int] = {}
        queue = deque([slot])
        end: int | None = None
        while queue and end is None:
            asking = queue.popleft()
            for device in usable[slots[asking]]:
                if device in came_from:
                    continue
                came_from[device] = asking
                if device not in holds:
                    end = device
                    break
                queue.append(holds[device])
        if end is None:
            return None
        _shift(end, slot, came_from, holds)
    return holds


def _shift(end: int, slot: int, came_from: Mapping[int, int], holds: dict[int, int]) -> None:
    """Move each slot of the path found to the device that it asked for."""
    device = end
    while True:
        asking = came_from[device]
        before = next((key for key, holder in holds.items() if holder == asking), None)
        holds[device] = asking
        if asking == slot or before is None:
            return
        device = before
