"""Ways in which a card can be held, counted: what fits together, for any
number of ways and parts.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.devicekit.partitioning.exclusive_ways import count_ways
from topobus.values.device import Device
from topobus.values.partitions import Partitions

CARD = "gpu-0"


@settings(max_examples=examples(100), deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5), chosen=st.data())
def test_devices_fit_together_when_and_only_when_they_are_of_one_way(sizes: list[int], chosen: st.DataObject) -> None:
    """Any parts of one way fit at once, and no two of different ways, whatever the sizes are."""
    ways = [[f"{CARD}-w{way}-{part}" for part in range(size)] for way, size in enumerate(sizes)]
    sets, uses = count_ways(CARD, ways)
    partitions = Partitions(
        [Device(name=name, device_class="gpu", consumes=uses[name]) for way in ways for name in way], sets
    )
    names = chosen.draw(st.sets(st.sampled_from([name for way in ways for name in way]), min_size=1, max_size=6))

    shortage = partitions.shortage((), names)

    assert (shortage is None) is (len({name.rpartition("-")[0] for name in names}) == 1)
    assert all(1 <= len(counter_set.counters) <= 32 for counter_set in sets)
    assert all(len({use.counter_set for use in uses[name]}) <= 2 for name in names)


def test_ways_are_refused_when_they_need_more_counters_than_a_device_may_name() -> None:
    """Two sets of 32 are what Kubernetes lets a device name."""
    with pytest.raises(ValueError, match="65 counters"):
        count_ways(CARD, [[f"{CARD}-a-{part}" for part in range(65)], [f"{CARD}-b-{part}" for part in range(66)]])
