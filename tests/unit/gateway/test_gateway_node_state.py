"""The gateway's view of its node: what was handed out is held until the ledger says so, and no longer."""

from __future__ import annotations

from typing import Any

from topobus.domain.ledger import Allocation, Holding, Ledger
from topobus.domain.request import Owner, OwnerKind
from topobus.gateway.node_state import NodeState

NODE = "demo-node"
OWNER = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid="u")


def state_with_ledger(ledger: Ledger) -> NodeState:
    """Give a view that has seen a ledger."""
    nobody: Any = None
    state = NodeState(nobody, NODE, lambda device_class: f"topobus.dev/{device_class}")
    state.take_ledger(ledger)
    return state


def test_device_is_held_when_it_was_handed_out_and_the_ledger_that_says_so_has_not_come() -> None:
    """Another write of the ledger that was under way in that moment changes nothing; the one that names the owner does not either."""
    state = state_with_ledger(Ledger(node=NODE, sequence=6))
    holding = Holding(devices={"gpu": ("gpu-0",)})

    state.hand_out("gpu", ["gpu-0"], OWNER, 8)
    state.take_ledger(Ledger(node=NODE, sequence=7))
    before = state.holders("gpu")
    state.take_ledger(Ledger(node=NODE, sequence=8, allocations={OWNER.key: Allocation(owner=OWNER, holdings=(holding,))}))

    assert before == state.holders("gpu") == {"gpu-0": OWNER}


def test_device_is_held_no_more_when_the_ledger_began_anew_after_it_was_handed_out() -> None:
    """A lost ledger counts from the beginning and never reaches the number that was promised: that nobody holds the device there is told, and can be mended."""
    state = state_with_ledger(Ledger(node=NODE, sequence=7))

    state.hand_out("gpu", ["gpu-0"], OWNER, 7)
    state.take_ledger(Ledger(node=NODE, sequence=0))

    assert state.holders("gpu") == {}
    assert not state.is_holder(OWNER.key)
