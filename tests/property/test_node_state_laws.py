"""The gateway's view of who holds what, over histories of the ledger and of what was handed out: it
is what the last ledger says, whatever came before it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.gateway.node_state import NodeState
from topobus.values.device_sharing import HeldShare
from topobus.values.idset import CpuSet
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.request import Owner, OwnerKind

NODE = "n"
CLASSES = ("gpu", "nic", "cpu")
OWNERS = tuple(
    Owner(kind=kind, namespace="kubelet", name="topobus.dev/gpu", uid=f"{number}")
    for kind in (OwnerKind.DEVICE_PLUGIN, OwnerKind.CLAIM)
    for number in range(3)
)
NAMES = st.sampled_from(["a", "b"])
SHARES = st.sampled_from([HeldShare(), HeldShare(replicas=(0,)), HeldShare(amounts={"memory": 4})])
WHOLE = st.builds(
    Holding,
    devices=st.dictionaries(st.sampled_from(["gpu", "nic"]), st.tuples(NAMES), max_size=2),
    cpus=st.frozensets(st.integers(0, 3)).map(CpuSet.of),
)
PARTS = st.builds(
    lambda name, share: Holding(devices={"gpu": (name,)}, shared={"gpu": (name,)}, shares={"gpu": {name: share}}),
    NAMES,
    SHARES,
)
ALLOCATIONS = st.tuples(st.integers(0, len(OWNERS) - 1), st.none() | WHOLE | PARTS)
HAND_OUTS = st.tuples(
    st.sampled_from(["gpu", "nic"]), NAMES, st.sampled_from(OWNERS), st.integers(0, 12), st.none() | SHARES
)
STEPS = st.lists(
    st.tuples(st.integers(-2, 3), st.lists(ALLOCATIONS, max_size=3), st.lists(HAND_OUTS, max_size=2)),
    min_size=1,
    max_size=8,
)


def view() -> NodeState:
    """A view that has seen nothing."""
    nobody: Any = None
    return NodeState(nobody, NODE, lambda device_class: f"topobus.dev/{device_class}")


def hand_out(state: NodeState, given_out: tuple[str, str, Owner, int, HeldShare | None]) -> None:
    """Give one device, or a share of it, before the ledger says so."""
    device_class, name, owner, sequence, share = given_out
    state.hand_out(device_class, [name], owner, sequence, {name: share} if share is not None else {})


@given(STEPS)
@settings(max_examples=examples(500))
def test_holders_are_those_of_the_last_ledger_and_of_what_it_does_not_confirm(
    steps: list[tuple[int, list[tuple[int, Holding | None]], list[tuple[str, str, Owner, int, HeldShare | None]]]],
) -> None:
    """A view that followed each change holds what a new one does that is told of the last ledger
    and of what was handed out since.
    """
    followed = view()
    ledger = Holders(node=NODE)
    waiting: dict[tuple[str, ...], tuple[str, str, Owner, int, HeldShare | None]] = {}
    for growth, changes, given_out in steps:
        for each in given_out:
            hand_out(followed, each)
            # Of a device one is the last who got it whole; of its shares each owner has his own.
            waiting[(*each[:2], each[2].key) if each[4] is not None else each[:2]] = each
        sequence = max(0, ledger.sequence + growth)
        waiting = (
            {place: each for place, each in waiting.items() if each[3] > sequence}
            if sequence >= ledger.sequence
            else {}
        )
        held = dict(ledger.allocations)
        for number, holding in changes:
            held.pop(OWNERS[number].key, None)
            if holding is not None:
                held[OWNERS[number].key] = Allocation(owner=OWNERS[number], holdings=(holding,))
        ledger = Holders(node=NODE, sequence=sequence, allocations=dict(sorted(held.items())))
        followed.take_ledger(ledger)

    fresh = view()
    fresh.take_ledger(ledger)
    for each in waiting.values():
        hand_out(fresh, each)
    assert {name: followed.holders(name) for name in CLASSES} == {name: fresh.holders(name) for name in CLASSES}
    assert {name: dict(followed.sharers(name)) for name in CLASSES} == {
        name: dict(fresh.sharers(name)) for name in CLASSES
    }
    assert {owner.key: followed.is_holder(owner.key) for owner in OWNERS} == {
        owner.key: fresh.is_holder(owner.key) for owner in OWNERS
    }
