"""The choice of devices for classic claims: whole, disjoint and found whenever there is one."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.classic_choice import Wanted, choose_on
from topobus.engine.allocation.pools import Slice, gather_pools
from topobus.engine.allocation.values import ALL_GATES, DeviceId, Node, Usage
from topobus.formats.kubernetes.classic.classic_parameters import AttributeCondition, DeviceSelector
from topobus.formats.kubernetes.resource import (
    Attribute,
    Pool,
    SliceDevice,
    SliceSpec,
)
from topobus.values.outcome import Refusal

NODE = Node("n1")


def _device(index: int, marks: frozenset[int]) -> SliceDevice:
    attributes = {f"m{mark}": Attribute(bool_=True) for mark in sorted(marks)}
    return SliceDevice(name=f"gpu-{index}", attributes={"class": Attribute(string="gpu"), **attributes})


def _wanted(mark: int, count: int) -> Wanted:
    return Wanted(count, of_claim=DeviceSelector(attribute=AttributeCondition(name=f"m{mark}", value=True)))


def _exists(sets: list[set[int]], counts: list[int], free: set[int]) -> bool:
    """Say by trying everything whether all counts can be served."""
    if not counts:
        return True
    return any(
        _exists(sets[1:], counts[1:], free - set(some)) for some in combinations(sorted(sets[0] & free), counts[0])
    )


@given(
    st.lists(st.frozensets(st.integers(0, 2)), max_size=6),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=3),
    st.sets(st.integers(0, 5)),
)
@settings(deadline=None)
def test_choice_serves_all_claims_exactly_when_they_can_be_served(
    marks: list[frozenset[int]], asked: list[tuple[int, int]], held: set[int]
) -> None:
    """No claim is refused where a way exists, none gets what it does not want or what somebody has,
    and no device goes twice.
    """
    devices = tuple(_device(index, marks_of_device) for index, marks_of_device in enumerate(marks))
    spec = SliceSpec(
        driver="topobus.dev", pool=Pool(name="n1", resource_slice_count=1), node_name="n1", devices=devices
    )
    pools = gather_pools((Slice("s", spec),), NODE, ALL_GATES)
    usage = Usage({DeviceId("topobus.dev", "n1", f"gpu-{index}"): "claim x/y" for index in held})
    wanted = [_wanted(mark, count) for mark, count in asked]

    chosen = choose_on(NODE, "gpu", wanted, pools, usage)

    free = {index for index in range(len(marks)) if index not in held}
    sets = [{index for index, marks_of_device in enumerate(marks) if mark in marks_of_device} for mark, _ in asked]
    if isinstance(chosen, Refusal):
        assert not _exists(sets, [count for _, count in asked], free)
        return
    given_out = [name for names in chosen for name in names]
    assert [len(names) for names in chosen] == [count for _, count in asked]
    assert len(set(given_out)) == len(given_out)
    assert all(
        {int(name.removeprefix("gpu-")) for name in names} <= sets[index] & free for index, names in enumerate(chosen)
    )
    assert chosen == choose_on(NODE, "gpu", wanted, pools, usage)
