"""What a container runtime is told of CPUs: the same for control groups of version 1 and 2, whose
files it writes itself.
"""

from __future__ import annotations

from topobus.gateway.containers.rules.cpusets import CpuOwnership, cpuset_of
from topobus.gateway.containers.values import resources_of
from topobus.values.edits import Cpuset
from topobus.values.idset import CpuSet, NodeSet


def test_resources_name_cpus_memory_and_no_quota_and_no_files_of_a_version() -> None:
    """The quota -1 is `cpu.cfs_quota_us` of version 1, and runc writes `max` into version 2's
    `cpu.max` for it; `unified`, which version 2 alone has, stays empty.
    """
    resources = resources_of(CpuSet(1, 2), NodeSet(0), is_unlimited=True)

    assert (resources.cpu.cpus, resources.cpu.mems, resources.cpu.quota.value) == ("1-2", "0", -1)
    assert [field.name for field, _ in resources.ListFields()] == ["cpu"]
    assert [field.name for field, _ in resources.cpu.ListFields()] == ["quota", "cpus", "mems"]


def test_resources_leave_the_quota_of_containers_of_the_pool() -> None:
    """What kubelet wrote stays, and so do memory nodes that are not named."""
    resources = resources_of(CpuSet(0), NodeSet())

    assert not resources.cpu.HasField("quota")
    assert resources.cpu.mems == ""


def test_mixed_container_has_its_own_and_the_pool() -> None:
    """One claim of several that says so is enough, and memory comes from anywhere then."""
    ownership = CpuOwnership(
        online=CpuSet.parse("0-7"),
        claims={
            "a": Cpuset(cpus=CpuSet(2), mems=NodeSet(0), with_shared=True),
            "b": Cpuset(cpus=CpuSet(5), mems=NodeSet(1)),
            "c": Cpuset(cpus=CpuSet(7), mems=NodeSet(1)),
        },
        kubelet=CpuSet(1),
    )

    mixed = cpuset_of(["a", "b"], None, ownership)

    assert mixed is not None
    assert (mixed.cpus, mixed.mems, mixed.is_exclusive) == (CpuSet.parse("0,2-6"), NodeSet(), True)
