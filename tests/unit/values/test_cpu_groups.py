"""CPUs offered by number: what is a group, and how many of its CPUs may be given."""

from __future__ import annotations

from topobus.values.cpu_groups import GROUP_CAPACITY, cpus_of, cut_group, is_cpu_group
from topobus.values.device import Device
from topobus.values.idset import CpuSet

GROUP = Device(
    name="numa-0", device_class="cpu", near_cpus=CpuSet.parse("0-3"), allows_multiple=True, capacity={GROUP_CAPACITY: 4}
)
SINGLE = Device(name="cpu-0", device_class="cpu", cpu=0)
CARD = Device(name="gpu-0", device_class="gpu", near_cpus=CpuSet.parse("0-3"), allows_multiple=True)


def test_group_is_told_from_a_cpu_and_from_another_shared_device() -> None:
    """A group is of class cpu, shared, and no CPU itself."""
    assert [is_cpu_group(device) for device in (GROUP, SINGLE, CARD)] == [True, False, False]


def test_cpus_of_lists_what_a_device_is_or_has() -> None:
    """A CPU is itself, a group has those of its unit, and what only lies near CPUs has none."""
    assert [cpus_of(device) for device in (GROUP, SINGLE, CARD)] == [CpuSet.parse("0-3"), CpuSet(0), CpuSet()]


def test_group_is_cut_to_the_cpus_that_may_be_given() -> None:
    """Its capacity counts them; a group without any is not offered.

    Without a limit, and for what is no group, nothing changes.
    """
    cut = cut_group(GROUP, CpuSet.parse("2-9"))

    assert cut is not None
    assert cut.capacity == {GROUP_CAPACITY: 2}
    assert cut_group(GROUP, CpuSet.parse("4-9")) is None
    assert cut_group(GROUP, None) == GROUP
    assert cut_group(SINGLE, CpuSet.parse("4-9")) == SINGLE
