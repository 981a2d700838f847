"""The gateway's view of its node: what was handed out is held until the ledger says so, and no
longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from topobus.bus.bus import ChangeKind
from topobus.gateway.node_state import NodeState
from topobus.values.device import Device, Inventory
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.own_shapes import OwnShape
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

NODE = "demo-node"
OWNER = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="u")


def state_with_ledger(ledger: Ledger, bus: Any = None) -> NodeState:
    """Give a view that has seen a ledger."""
    state = NodeState(bus, NODE, lambda device_class: f"topobus.dev/{device_class}")
    state.take_ledger(ledger)
    return state


def test_device_is_held_when_it_was_handed_out_and_the_ledger_that_says_so_has_not_come() -> None:
    """Another write of the ledger that was under way in that moment changes nothing.

    The one that names the owner does not either.
    """
    state = state_with_ledger(Ledger(node=NODE, sequence=6))
    holding = Holding(devices={"gpu": ("gpu-0",)})

    state.hand_out("gpu", ["gpu-0"], OWNER, 8)
    state.take_ledger(Ledger(node=NODE, sequence=7))
    before = state.holders("gpu")
    state.take_ledger(
        Ledger(node=NODE, sequence=8, allocations={OWNER.key: Allocation(owner=OWNER, holdings=(holding,))})
    )

    assert before == state.holders("gpu") == {"gpu-0": OWNER}


def test_device_is_held_no_more_when_the_ledger_began_anew_after_it_was_handed_out() -> None:
    """A lost ledger counts from the beginning and never reaches the number that was promised: that
    nobody holds the device there is told, and can be mended.
    """
    state = state_with_ledger(Ledger(node=NODE, sequence=7))

    state.hand_out("gpu", ["gpu-0"], OWNER, 7)
    state.take_ledger(Ledger(node=NODE, sequence=0))

    assert state.holders("gpu") == {}
    assert not state.is_holder(OWNER.key)


@pytest.mark.parametrize(
    ("epoch", "sequence", "is_other_store", "is_announced"),
    [
        pytest.param(1, 8, False, False, id="next"),
        pytest.param(1, 6, False, True, id="older"),
        pytest.param(2, 8, False, True, id="rebuilt"),
        pytest.param(1, 8, True, True, id="of-another-store"),
    ],
)
async def test_ledger_went_back_when_it_is_older_or_may_have_been_meanwhile(
    epoch: int, sequence: int, is_other_store: bool, is_announced: bool
) -> None:
    """A store that was put back and written on before it was read has a higher number: the ledger's
    epoch, or the feed's word that the store is another one, tells.
    """

    async def watch(*_: object, **_parts: object) -> AsyncIterator[Any]:
        if is_other_store:
            yield SimpleNamespace(kind=ChangeKind.RESET)
        yield SimpleNamespace(kind=ChangeKind.PUT, value=Ledger(node=NODE, epoch=epoch, sequence=sequence))

    state = state_with_ledger(Ledger(node=NODE, sequence=7), SimpleNamespace(watch=watch))
    ticket = state.ledger_went_back.ticket()

    async with asyncio.timeout(60):
        await state.follow_ledger()

    assert ticket.is_set() == is_announced


async def test_shapes_follow_what_the_operator_adds() -> None:
    """They come with the node's alignment, which is read before the gateway starts to serve, and go with it."""
    added = OwnShape(name="duo", parts={"gpu": 2}, within="machine")
    alignment = NodeAlignment(node=NODE, own_shapes=(added,))
    levels: list[object] = []

    async def watch(*_: object, **_parts: object) -> AsyncIterator[Any]:
        for kind, value in (
            (ChangeKind.PUT, alignment),
            (ChangeKind.SNAPSHOT_END, None),
            (ChangeKind.RESET, None),
            (ChangeKind.DELETE, None),
        ):
            yield SimpleNamespace(kind=kind, value=value)
            levels.append([shape.attributes["level"] for shape in state.shapes().devices])

    state = NodeState(cast(Any, SimpleNamespace(watch=watch)), NODE, lambda device_class: f"topobus.dev/{device_class}")
    gpus = tuple(Device(name=f"gpu-{number}", device_class="gpu") for number in range(2))
    state.take_inventory("gpu", Inventory(node=NODE, device_class="gpu", generation=1, devices=gpus))
    ticket = state.changed.ticket()

    async with asyncio.timeout(60):
        await state.follow_alignment()

    assert levels == [["machine", "duo"]] * 3 + [["machine"]]
    assert ticket.is_set()
