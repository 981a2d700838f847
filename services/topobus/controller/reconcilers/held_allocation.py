"""What a node holds for a claim whose placement it refused: this very attempt, nothing, or what an older attempt left behind.

Flows in: the node's ledger, and what the claim says now. Flows out: whether the attempt is done, and one release of a stale holding. Both homes of the controller ask this
in the same order, because a node keeps only its newest operations while the ledger keeps what is held.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from enum import Enum

from topobus.contracts import catalogue
from topobus.controller.allocation.values import DeviceId
from topobus.controller.state.inventory_slices import holders_from_ledger
from topobus.domain.device import Device
from topobus.domain.request import Owner
from topobus.runtime.bus import Bus

__all__ = ["Holding", "look_at_holding"]


class Holding(Enum):
    """What the node holds."""

    DONE = "done"
    """Exactly the attempt's devices."""
    NOT_DONE = "not-done"
    """Nothing of the claim, or something stale, whose release was asked for."""
    OVERTAKEN = "overtaken"
    """The attempt is not the claim's newest any more: what is held may be what another replica got by a later one, and is its."""


async def look_at_holding(
    bus: Bus,
    node: str,
    owner: Owner,
    wanted: Collection[DeviceId],
    *,
    cpu_devices: Iterable[Device],
    is_newest: Callable[[], Awaitable[bool]],
    release: Callable[[str, str], Awaitable[object]],
) -> Holding:
    """Compare a node's ledger with an attempt that the node has just refused, and let go of what an older attempt left there.

    Shapes: wanted — the attempt's devices on this node; is_newest — reads the claim anew and says whether the attempt is still its newest;
    release — takes an operation id and the id of the only decision whose devices may go.
    Errors: raises what `bus.get`, `is_newest` and `release` raise.
    """
    entry = await bus.get(catalogue.LEDGER, node=node)
    if entry is None or owner.key not in entry.value.allocations:
        return Holding.NOT_DONE
    held = {device for device, holder in holders_from_ledger(entry.value, cpu_devices).items() if holder == owner}
    if held == set(wanted):
        return Holding.DONE
    # In this order: each attempt is written before it is placed, so as long as the claim still has ours, what was held before is from an older one.
    if not await is_newest():
        return Holding.OVERTAKEN
    # Another replica may let go of it, and have the next attempt placed, before this is heard: what that holds stays.
    await release(f"release-{owner.uid}-stale-{entry.value.sequence}", entry.value.allocations[owner.key].decision_id)
    return Holding.NOT_DONE
