"""Laws of hand-over plans: whatever was handed over, and whatever a pod did to it, the way back
leads to the state before.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from support.interface_model import apply_to_state
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, InterfaceFields, Route, Rule
from topobus.nic.interfaces.rules.interface_state import HeldAddress, HeldRoute, InterfaceState
from topobus.nic.netlink.hand_over_plan import (
    HOST_CHANGES,
    POD_CHANGES,
    Change,
    plan_hand_over,
    plan_restore,
)

NAMES = st.sampled_from(["eth1", "net1", "ens1f0"])
MACS = st.sampled_from(["02:00:00:00:00:01", "02:00:00:00:00:02"])
MTUS = st.sampled_from([1280, 1500, 9000])
ADDRESSES = st.lists(st.sampled_from(["10.0.0.3/24", "10.0.0.4/24", "fd00::3/64"]), max_size=3, unique=True)
RP_FILTER = "net.ipv4.conf.IFNAME.rp_filter"
DISABLE_IPV6 = "net.ipv6.conf.IFNAME.disable_ipv6"
STATES = st.builds(
    lambda name, alternative_names, **fields: InterfaceState(
        name=name, alternative_names=tuple(sorted(alternative_names - {name})), **fields
    ),
    name=NAMES,
    alternative_names=st.sets(NAMES),
    index=st.just(7),
    mac=MACS,
    mtu=MTUS,
    is_up=st.booleans(),
    kind=st.sampled_from(["", "veth"]),
    alias=st.sampled_from(["", "rack 7"]),
    tx_queue_length=st.sampled_from([0, 1000]),
    master=st.sampled_from(["", "br0"]),
    addresses=ADDRESSES.map(lambda texts: tuple(HeldAddress(address=text) for text in texts)),
    sysctls=st.fixed_dictionaries({RP_FILTER: st.integers(0, 2), DISABLE_IPV6: st.integers(0, 1)}),
).flatmap(
    lambda state: st.builds(
        lambda routes: msgspec.structs.replace(state, routes=routes if state.is_up else ()),
        st.sampled_from([(), (HeldRoute(destination="10.9.0.0/16", gateway="10.0.0.1"),)]),
    )
)
CONFIGS = st.builds(
    InterfaceConfig,
    interface=st.builds(
        InterfaceFields,
        name=st.none() | NAMES,
        mtu=st.none() | MTUS,
        mac=st.none() | MACS,
        addresses=st.none() | ADDRESSES.map(tuple),
        up=st.none() | st.booleans(),
    ),
    routes=st.sampled_from(
        [(), (Route(destination="10.8.0.0/16", gateway="10.0.0.1"), Route(destination="10.0.0.1/32"))]
    ),
    rules=st.sampled_from([(), (Rule(source="10.0.0.0/24", table=100, priority=5),)]),
    sysctls=st.dictionaries(st.just(RP_FILTER), st.integers(0, 2)),
)


def after(state: InterfaceState, changes: tuple[Change, ...]) -> InterfaceState:
    """The state after some changes, by the model.

    To the kernel a name that an interface has, as whichever, is not free.
    """
    for change in changes:
        given = {"name": [change.value], "add-names": change.value}.get(change.name, ())
        assert not {state.name, *state.alternative_names} & set(given), change
        state = apply_to_state(state, change)
    return state


@given(STATES, CONFIGS, st.data())
def test_restore_leads_to_the_state_before_when_a_hand_over_was_cut_anywhere(
    before: InterfaceState, config: InterfaceConfig, data: Any
) -> None:
    """After any number of its changes, the plan back ends at what was there; and planned again,
    there is nothing to do.
    """
    changes = plan_hand_over(before, config, tag="topobus eth1")
    made = changes[: data.draw(st.integers(0, len(changes)))]
    now = after(before, made)

    restored = after(now, plan_restore(now, before))

    assert restored == before
    assert plan_restore(restored, before) == ()


@given(STATES, STATES)
def test_restore_leads_to_the_state_before_when_a_pod_did_anything_at_all(
    before: InterfaceState, changed: InterfaceState
) -> None:
    """Nothing that is found on the way back is taken for granted."""
    now = msgspec.structs.replace(changed, kind=before.kind)

    assert after(now, plan_restore(now, before)) == before


@given(STATES, STATES, st.sets(NAMES))
def test_restore_leaves_others_their_names(before: InterfaceState, changed: InterfaceState, taken: set[str]) -> None:
    """It gets each of its names that nobody else has, and keeps the one that it came with where its
    own is another's.
    """
    now = msgspec.structs.replace(
        changed,
        name="tb7x0" if changed.name in taken else changed.name,
        alternative_names=tuple(name for name in changed.alternative_names if name not in taken),
    )

    restored = after(now, plan_restore(now, before, taken=taken))

    assert restored.name == (now.name if before.name in taken else before.name)
    assert set(restored.alternative_names) == set(before.alternative_names) - taken - {restored.name}


@given(STATES, CONFIGS)
def test_hand_over_is_in_the_order_that_the_kernel_needs(before: InterfaceState, config: InterfaceConfig) -> None:
    """The mark first, the host's changes before the move and the pod's after it.

    Routes without a gateway before those that go by them.
    """
    changes = plan_hand_over(before, config, tag="topobus eth1")
    names = [change.name for change in changes]

    assert names == [name for name in (*HOST_CHANGES, *POD_CHANGES) if name in names]
    assert names[0] == "mark"
    assert {"move", "loopback"} <= set(names)
    routes = next((change.value for change in changes if change.name == "routes"), [])
    assert [bool(route.get("gateway")) for route in routes] == sorted(bool(route.get("gateway")) for route in routes)
