"""Partitions: what devices take from each other, and what a driver may say of it."""

from __future__ import annotations

import pytest

from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import Device
from topobus.values.partitions import MAX_PARTS, PARTS, Partitions, partitioned

CARD = CounterSet(name="gpu-0", counters={"slices": 7, "memory": 80})


def _gpu(name: str, slices: int = 0, memory: int = 0, *, partition_of: str = "") -> Device:
    uses = [
        CounterUse(counter_set="gpu-0", counter=key, amount=amount)
        for key, amount in (("slices", slices), ("memory", memory))
        if amount
    ]
    return Device(name=name, device_class="gpu", consumes=tuple(uses), partition_of=partition_of)


WHOLE = _gpu("gpu-0", 7, 80)
PARTITIONS = (
    _gpu("gpu-0-3g-0", 3, 40, partition_of="gpu-0"),
    _gpu("gpu-0-4g-0", 4, 40, partition_of="gpu-0"),
    _gpu("gpu-0-3g-4", 3, 40),
)


def test_shortage_names_the_counter_and_who_uses_it_when_a_partition_does_not_fit() -> None:
    """What is short, how much there is, what is in use, and by which devices."""
    partitions = Partitions((WHOLE, *PARTITIONS), (CARD,))

    shortage = partitions.shortage(("gpu-0-4g-0", "gpu-9"), ("gpu-0",))

    assert shortage is not None
    assert (shortage.counter_set, shortage.counter, shortage.total) == ("gpu-0", "memory", 80)
    assert (shortage.in_use, shortage.wanted, shortage.devices) == (40, 80, ("gpu-0-4g-0",))


def test_shortage_is_none_when_all_fit_or_are_held_already() -> None:
    """Two halves fit; what is held takes nothing more."""
    partitions = Partitions((WHOLE, *PARTITIONS), (CARD,))

    assert partitions.shortage(("gpu-0-4g-0",), ("gpu-0-3g-0",)) is None
    assert partitions.shortage(("gpu-0",), ("gpu-0",)) is None
    assert sorted(partitions.blocked(("gpu-0",))) == ["gpu-0-3g-0", "gpu-0-3g-4", "gpu-0-4g-0"]


def test_shortage_is_found_when_the_counter_is_not_declared() -> None:
    """A device whose counter nobody declares fits nowhere: a message may have lost its counter
    sets.
    """
    shortage = Partitions((WHOLE,), ()).shortage((), ("gpu-0",))

    assert shortage is not None
    assert shortage.total == 0


def test_rivals_are_those_that_can_exclude_each_other() -> None:
    """Two partitions that fit together are no rivals; with the whole beside them all are."""
    alone = Partitions((_gpu("a", 3), _gpu("b", 4), Device(name="c", device_class="gpu")), (CARD,))
    beside = Partitions((WHOLE, *PARTITIONS), (CARD,))

    assert alone.rivals() == frozenset()
    assert beside.rivals() == {"gpu-0", "gpu-0-3g-0", "gpu-0-4g-0", "gpu-0-3g-4"}


def test_together_keeps_the_whole_and_what_counts_nothing() -> None:
    """Where nobody counts, the card is offered as a whole, and its partitions are not."""
    other = Device(name="gpu-1", device_class="gpu")

    assert Partitions((WHOLE, *PARTITIONS), (CARD,)).together((*PARTITIONS[:2], WHOLE, other)) == {"gpu-0", "gpu-1"}


def test_partitioned_counts_parts_when_their_driver_does_not() -> None:
    """`partition_of` alone is enough: any number of parts, never beside the whole.

    Counted once more it is the same.
    """
    whole = Device(name="nic-0", device_class="nic")
    parts = tuple(Device(name=f"nic-0-vf{index}", device_class="nic", partition_of="nic-0") for index in range(3))

    good, sets, faults = partitioned((whole, *parts), ())
    again = partitioned(good, sets)

    assert (again, faults) == ((good, sets, {}), {})
    assert sets == (CounterSet(name="nic-0", counters={PARTS: MAX_PARTS}),)
    partitions = Partitions(good, sets)
    names = [part.name for part in parts]
    assert partitions.shortage(names[:2], names[2:]) is None
    assert partitions.shortage(names[:1], ("nic-0",)) is not None
    assert partitions.shortage(("nic-0",), names[:1]) is not None


def test_partitioned_takes_the_count_off_when_the_last_part_is_gone() -> None:
    """A card that has no parts any more counts nothing."""
    good, sets, _ = partitioned(
        (Device(name="a", device_class="gpu"), Device(name="b", device_class="gpu", partition_of="a")), ()
    )

    assert partitioned(good[:1], sets) == ((Device(name="a", device_class="gpu"),), (), {})


@pytest.mark.parametrize(
    ("device", "sets", "fault"),
    [
        pytest.param(_gpu("a", 1), (), "counter gpu-0/slices, which its driver does not have", id="no such set"),
        pytest.param(_gpu("a", 8), (CARD,), "consumes 8 of gpu-0/slices, wanted 0 to 7", id="more than there is"),
        pytest.param(
            _gpu("a", 1),
            (CounterSet(name="gpu-0", counters={"Slices": 7}),),
            "does not have",
            id="a counter that is no DNS label",
        ),
        pytest.param(
            _gpu("a", 1),
            (CounterSet(name="gpu-0", counters={f"c{n}": 1 for n in range(33)}),),
            "does not have",
            id="33 counters",
        ),
        pytest.param(
            Device(
                name="a",
                device_class="gpu",
                consumes=tuple(CounterUse(counter_set=f"s{n}", counter="c", amount=1) for n in range(3)),
            ),
            tuple(CounterSet(name=f"s{n}", counters={"c": 1}) for n in range(3)),
            "3 counter sets, wanted at most 2",
            id="three sets",
        ),
        pytest.param(
            Device(
                name="a",
                device_class="gpu",
                consumes=(CounterUse(counter_set="gpu-0", counter="slices", amount=1),) * 2,
            ),
            (CARD,),
            "one counter twice",
            id="a counter twice",
        ),
        pytest.param(
            Device(name="a", device_class="gpu", partition_of="a"), (), "partition_of names itself", id="its own part"
        ),
        pytest.param(
            Device(name="a", device_class="gpu", partition_of="gpu-0"),
            (CARD,),
            "wanted consumes",
            id="a part that does not count",
        ),
        pytest.param(
            _gpu("a", memory=0, slices=0, partition_of="gpu-0"), (CARD,), "wanted consumes", id="a part of what counts"
        ),
    ],
)
def test_partitioned_leaves_a_device_out_when_its_counters_make_no_sense(
    device: Device, sets: tuple[CounterSet, ...], fault: str
) -> None:
    """One device with a fault is named with the fault; the others stay."""
    whole = WHOLE if sets == (CARD,) else Device(name="gpu-0", device_class="gpu")

    good, _, faults = partitioned((whole, device), sets)

    assert [device.name for device in good] == ["gpu-0"]
    assert fault in faults["a"]


def test_partitioned_leaves_a_part_out_when_its_counters_let_it_stand_beside_the_whole() -> None:
    """A part that names its whole must exclude it by the counters that it gives."""
    half = _gpu("gpu-0", 3)

    _, _, faults = partitioned((half, _gpu("a", 3, partition_of="gpu-0")), (CARD,))

    assert faults == {"a": "partition_of names gpu-0, and its counters let both be held at once"}


def test_partitions_are_nothing_when_no_device_counts() -> None:
    """Who asks can leave the counting out; a device that uses a counter makes it necessary."""
    assert not Partitions((Device(name="gpu-1", device_class="gpu"),), ())
    assert Partitions((WHOLE,), (CARD,))


def test_blocked_is_empty_when_nothing_that_counts_is_held() -> None:
    """A held device without counters takes nothing from the others."""
    assert Partitions((WHOLE, *PARTITIONS), (CARD,)).blocked(("nic-0",)) == {}


def test_partition_without_counters_is_left_out_when_its_parent_is_the_name_of_a_counter_set() -> None:
    """The driver counts by itself there, so a part that takes nothing
    would stand beside its whole.
    """
    parent = Device(name="gpu-0", device_class="gpu")
    part = Device(name="gpu-0-3g-0", device_class="gpu", partition_of="gpu-0")

    good, _, faults = partitioned((parent, part), (CARD,))

    assert good == (parent,)
    assert faults == {"gpu-0-3g-0": "partition_of names gpu-0, and so does a counter set: wanted consumes"}


def test_partition_is_good_when_its_counters_exclude_its_parent() -> None:
    """The driver counts for itself: the whole takes all, so no part stands beside it."""
    good, sets, faults = partitioned((WHOLE, PARTITIONS[0]), (CARD,))

    assert (good, sets, faults) == ((WHOLE, PARTITIONS[0]), (CARD,), {})
