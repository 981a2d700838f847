"""Answers about CPUs and devices whose NUMA node the machine does not tell: what is placed is as
kubelet places it, and no text prints an empty set of nodes.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, owner, pod
from topobus.engine.alignment.planning.placement import place
from topobus.values.idset import NodeSet
from topobus.values.outcome import ContainerPlacement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, PodRequest, Policy
from topobus.values.view import NodeView
from unit.alignment.outcomes import codes, placed


def without_node(view: NodeView, device_class: str, *names: str) -> NodeView:
    """Give the same node with these devices in no known place."""
    devices = tuple(
        structs.replace(device, numa_nodes=None) if device.name in names else device
        for device in view.devices[device_class]
    )
    return structs.replace(view, devices={**view.devices, device_class: devices})


def homeless(view: NodeView, cores: int, *, before: int = 0) -> NodeView:
    """Give the same node with these cores of no known NUMA node, after so many that have one.

    The others are not there.
    """
    placed = view.cores[:before]
    lost = tuple(structs.replace(core, numa_node=None) for core in view.cores[before : before + cores])
    return structs.replace(view, cores=(*placed, *lost))


def text(container_placement: ContainerPlacement, code: str) -> str:
    """Give the message of a reason."""
    (message,) = (reason.message for reason in container_placement.reasons if reason.code == code)
    return message


@pytest.mark.parametrize(
    ("before", "where"),
    [
        pytest.param(0, "on an unknown NUMA node: 2 whole cores", id="all"),
        pytest.param(1, "on NUMA node 0 and an unknown one: 2", id="some"),
    ],
)
def test_place_says_that_the_node_of_cpus_is_unknown_when_the_machine_does_not_tell_it(before: int, where: str) -> None:
    """CPUs of no node are on an unknown one, alone or beside others."""
    view = homeless(dgx(policy=Policy.BEST_EFFORT), 2 - before, before=before)

    (container_placement,) = placed(place(view, pod("p", container(cpus=4))))

    assert where in text(container_placement, "cpus-taken")


def test_place_names_the_whole_machine_when_no_resource_has_an_opinion() -> None:
    """The merged hint without opinions is the whole machine, and the reason says so beside it."""
    view = homeless(dgx(policy=Policy.BEST_EFFORT), 4)

    (container_placement,) = placed(place(view, pod("p", container(cpus=4))))

    assert container_placement.alignment.nodes == NodeSet(0, 1)
    assert (
        text(container_placement, "no-affinity")
        == "no resource has an opinion on NUMA nodes, so the merged hint is all there are: 0-1"
    )


def test_place_says_which_device_tells_no_node_when_it_is_outside_the_alignment() -> None:
    """A device in no known place is not called too far away, and one that is too far away is told
    beside it.
    """
    view = without_node(dgx(policy=Policy.BEST_EFFORT), "fpga", "fpga-0")
    request = pod("p", container(gpu=1, fpga=2))
    view = structs.replace(
        view,
        devices={
            **view.devices,
            "gpu": tuple(device for device in view.devices["gpu"] if device.numa_nodes == NodeSet(1)),
        },
    )

    (container_placement,) = placed(place(view, request))

    outside = text(container_placement, "outside-alignment")
    assert "fpga-0 does not report its NUMA node, and not enough that do are inside NUMA node 1" in outside
    assert "fpga-1: not enough inside NUMA node 1" in outside


def test_place_says_that_devices_are_too_far_away_when_all_that_are_outside_have_a_node() -> None:
    """Devices of known nodes alone are said to be outside, as before."""
    view = dgx(policy=Policy.BEST_EFFORT)
    view = structs.replace(view, devices={**view.devices, "gpu": view.devices["gpu"][4:]}, silent_classes=("fpga",))

    (container_placement,) = placed(place(view, pod("p", container(gpu=1, fpga=1))))

    assert text(container_placement, "outside-alignment").endswith(": not enough inside NUMA node 1")


def test_place_says_that_devices_tell_no_node_when_all_that_are_outside_are_such() -> None:
    """Several devices of no known place are one sentence."""
    view = dgx(policy=Policy.BEST_EFFORT)
    view = without_node(view, "gpu", *(device.name for device in view.devices["gpu"]))

    (container_placement,) = placed(place(view, pod("p", container(cpus=2, gpu=2))))

    assert "gpu gpu-0, gpu-1 do not report their NUMA nodes" in text(container_placement, "outside-alignment")


@pytest.mark.parametrize("policy", [Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
def test_place_says_that_a_device_tells_no_node_when_that_alone_refuses_the_pod(policy: Policy) -> None:
    """Two devices of which one tells no node: one sentence says which, and which policies would
    place both.

    The table of nodes counts it, too.
    """
    view = without_node(dgx(policy=policy), "fpga", "fpga-1")

    outcome = place(view, pod("p", container(fpga=2)))

    assert codes(outcome) == ["no-numa-node", "policy-not-met", "resource-nodes", "numa-node-unknown"]
    assert isinstance(outcome, Refusal)
    *_, row, unknown = outcome.reasons
    assert row.message == "fpga: 2 wanted, offered on no NUMA node (node 0: 1 of 1 free; unknown node: 1 of 1 free)"
    assert unknown.message == (
        "fpga fpga-1 does not report its NUMA node, so it cannot be aligned: only policies none and "
        "best-effort place 2 fpga here"
    )


def test_place_names_the_first_of_many_devices_when_none_of_them_tells_its_node() -> None:
    """Devices beyond eight are counted."""
    view = dgx(policy=Policy.RESTRICTED)
    (first, *_) = view.devices["fpga"]
    view = structs.replace(
        view,
        devices={
            "fpga": (
                first,
                *(structs.replace(first, name=f"fpga-x{number}", numa_nodes=None) for number in range(1, 10)),
            )
        },
    )

    outcome = place(view, pod("p", container(fpga=5)))

    assert isinstance(outcome, Refusal)
    assert (
        "fpga-x7, fpga-x8 and 1 more do not report their NUMA node, so they cannot be aligned"
        in outcome.reasons[-1].message
    )


def test_place_says_that_cpus_tell_no_node_when_that_alone_refuses_the_pod() -> None:
    """Free CPUs of no known node are counted and named, as devices are."""
    outcome = place(homeless(dgx(policy=Policy.RESTRICTED), 2, before=1), pod("p", container(cpus=6)))

    assert isinstance(outcome, Refusal)
    *_, row, unknown = outcome.reasons
    assert "offered on no NUMA node (node 0: 2 of 2 free; unknown node: 4 of 4 free)" in row.message
    assert unknown.message.startswith("CPUs 1-2,113-114 do not report their NUMA node")


def test_place_blames_no_unknown_node_when_too_little_is_free_anyway() -> None:
    """Where more is wanted than would fit with known nodes, too, or less than those have, the
    unknown node is not the reason; it is in the table.
    """
    view = holding(without_node(dgx(), "gpu", "gpu-3"), "busy", gpu=("gpu-0", "gpu-4"))

    outcome = place(view, pod("p", container(gpu=4), policy=Policy.SINGLE_NUMA_NODE))

    assert isinstance(outcome, Refusal)
    assert "numa-node-unknown" not in codes(outcome)
    assert any("unknown node: 1 of 1 free" in reason.message for reason in outcome.reasons)


def test_place_blames_no_unknown_node_when_devices_are_asked_for_by_name() -> None:
    """Devices that are asked for by name are in the refusal already."""
    wanted = DeviceRequest(device_class="fpga", count=2, names=("fpga-0", "fpga-1"))
    request = PodRequest(owner=owner("p"), containers=(ContainerRequest(name="main", devices=(wanted,)),))

    outcome = place(without_node(dgx(policy=Policy.RESTRICTED), "fpga", "fpga-1"), request)

    assert codes(outcome) == ["no-numa-node", "policy-not-met", "resource-nodes"]


def test_place_names_no_empty_node_set_when_an_owner_in_the_way_is_in_no_known_place() -> None:
    """What would have to be freed is on an unknown node, not on one without a name."""
    view = dgx()
    view = holding(without_node(view, "fpga", "fpga-0", "fpga-1"), "busy", fpga=("fpga-0", "fpga-1"))

    outcome = place(view, pod("p", container(fpga=1)))

    assert isinstance(outcome, Refusal)
    assert [reason.message for reason in outcome.to_free] == [
        "pod default/busy holds fpga-0, fpga-1 on an unknown NUMA node; it would fit without them"
    ]
