"""Promises of hint generation: kubelet's hints for CPUs and devices, from small and from huge
machines.
"""

from __future__ import annotations

import pytest

from topobus.engine.alignment.cpus.cpu_hints import cpu_hints
from topobus.engine.alignment.devices.device_hints import device_hints
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.values.device import Device
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import Policy
from topobus.values.view import KubeletVersion


def device(name: str, nodes: str | None) -> Device:
    """Make a device that tells these NUMA nodes."""
    return Device(name=name, device_class="gpu", numa_nodes=None if nodes is None else NodeSet.parse(nodes))


def texts(hints: tuple[Hint, ...] | None) -> list[tuple[str, bool]]:
    """Write hints as lists of ids with their flag."""
    assert hints is not None
    return [(str(hint.nodes), hint.preferred) for hint in hints]


def test_cpu_hints_prefer_by_capacity_when_node_is_busy() -> None:
    """A node whose CPUs are busy is not hinted, and the wide hint stays
    unpreferred, as in kubelet.
    """
    hints = cpu_hints({0: CpuSet.parse("0-3"), 1: CpuSet.parse("4-7")}, CpuSet.parse("3-5"), 3)

    assert texts(hints) == [("0-1", False)]


def test_cpu_hints_pin_to_reusable_cpus_when_an_init_container_left_some() -> None:
    """Every mask must hold the reusable CPUs."""
    hints = cpu_hints({0: CpuSet(0, 1), 1: CpuSet(2, 3)}, CpuSet(2, 3), 2, reusable=CpuSet(0, 1))

    assert texts(hints) == [("0", True), ("0-1", False)]


def test_cpu_hints_are_none_when_no_cpu_is_asked_for() -> None:
    """A container without exclusive CPUs has no opinion."""
    assert cpu_hints({0: CpuSet(0)}, CpuSet(0), 0) is None


def test_device_hints_list_only_hosting_nodes_when_other_nodes_exist() -> None:
    """Since 1.36 a node that hosts no device of the class is no candidate."""
    hints = device_hints([device("a", "0"), device("b", "2")], ["a", "b"], 1, NodeSet.parse("0-3"))

    assert texts(hints) == [("0", True), ("2", True), ("0,2", False)]


def test_device_hints_have_no_opinion_when_no_device_tells_its_node() -> None:
    """Devices without a known NUMA node never mean node 0."""
    assert device_hints([device("a", None)], ["a"], 1, NodeSet(0, 1)) is None


def test_device_hints_are_empty_when_fewer_are_free() -> None:
    """Fewer free devices than asked for cannot be satisfied."""
    assert device_hints([device("a", "0"), device("b", "1")], ["a"], 2, NodeSet(0, 1)) == ()


def test_device_hints_count_a_device_once_when_it_spans_nodes() -> None:
    """A device on two nodes counts in each mask that touches it, once."""
    hints = device_hints([device("a", "0-1"), device("b", "1")], ["a", "b"], 2, NodeSet(0, 1))

    assert texts(hints) == [("1", True), ("0-1", False)]


def test_cpu_hints_answer_when_the_machine_has_64_nodes() -> None:
    """Very large machines get an answer: the narrow masks and the whole set."""
    hints = cpu_hints(
        {4 * node: CpuSet.parse(f"{2 * node}-{2 * node + 1}") for node in range(64)}, CpuSet.parse("0-127"), 4
    )

    assert hints is not None
    assert (str(hints[0].nodes), hints[0].preferred) == ("0,4", True)
    assert hints[-1].nodes == NodeSet.of(range(0, 256, 4))


@pytest.mark.parametrize(("kubelet", "merged"), [(KubeletVersion.V1_35, "0"), (KubeletVersion.V1_36, "1")])
def test_device_hints_range_over_all_nodes_when_kubelet_is_older(kubelet: KubeletVersion, merged: str) -> None:
    """k/k PR 138244 changed best-effort masks: 3 CPUs free on node 0 only, a device on node 1 only.

    Before 1.36 node 0 wins, since then node 1.
    """
    nodes = NodeSet(0, 1)
    cpus = cpu_hints({0: CpuSet.parse("0-3"), 1: CpuSet.parse("4-7")}, CpuSet.parse("0-3"), 3)
    devices = device_hints([device("a", "1")], ["a"], 1, nodes, kubelet=kubelet)

    assert str(merge_hints([cpus, devices], nodes, Policy.BEST_EFFORT).hint.nodes) == merged
