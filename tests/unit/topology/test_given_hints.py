"""Which hint lists topology says of a decision."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.alignment_nodes import container, dgx, holding, pod
from topobus.engine.alignment.planning.placement import place
from topobus.engine.ledger.given_hints import given_hints
from topobus.formats.messages.messages import DecisionEvent
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.request import PodRequest, Policy, Scope
from topobus.values.view import NodeView


def _decided(view: NodeView, request: PodRequest) -> DecisionEvent:
    return DecisionEvent(
        id="d-1",
        verb="place",
        node=view.node,
        op_id="op-1",
        time="2026-11-28T00:00:00Z",
        owner=request.owner,
        request=request,
        view=view,
        outcome=place(view, request),
    )


_ONE_SOCKET = (Hint(NodeSet(0), True), Hint(NodeSet(1), True), Hint(NodeSet(0, 1), False))  # noqa: FBT003 - Hint's own shape


def test_given_hints_are_those_of_each_container_when_the_scope_is_the_container() -> None:
    """A class's notice has the operation, the owner, and a list for each container that wanted
    devices of it.
    """
    wanted = pod("trainer", container("a", gpu=2), container("b", gpu=1, nic=1))

    of_gpu, of_nic = given_hints(_decided(dgx(), wanted))

    assert (of_gpu.device_class, of_gpu.op_id, of_gpu.by, of_gpu.owner) == ("gpu", "op-1", "topology", wanted.owner)
    assert [(listed.container, listed.resource, set(listed.hints or ())) for listed in of_gpu.lists] == [
        ("a", "gpu", set(_ONE_SOCKET)),
        ("b", "gpu", set(_ONE_SOCKET)),
    ]
    assert [(of_nic.device_class, listed.container, listed.resource) for listed in of_nic.lists] == [
        ("nic", "b", "nic")
    ]


def test_given_hints_are_said_once_when_the_scope_is_the_pod() -> None:
    """One merge for the whole pod is one list a resource, of no container."""
    wanted = pod("trainer", container("a", gpu=2), container("b", gpu=1))

    (of_gpu,) = given_hints(_decided(dgx(scope=Scope.POD), wanted))

    assert [listed.container for listed in of_gpu.lists] == [""]


def test_given_hints_are_those_of_the_container_in_the_way_when_the_pod_is_refused() -> None:
    """A refusal was decided by hints as well, though it does not carry them."""
    view = holding(dgx(policy=Policy.SINGLE_NUMA_NODE), "other", gpu=("gpu-0", "gpu-4"))

    (of_gpu,) = given_hints(_decided(view, pod("trainer", container("fits", gpu=1), container("large", gpu=4))))

    assert [listed.container for listed in of_gpu.lists] == ["large"]


def test_given_hints_leave_out_a_class_when_its_device_service_gives_them() -> None:
    """Who gave the hints says them: nothing is said twice."""
    view = structs.replace(dgx(), custom_hints={"gpu/1": ((NodeSet(1), True),)})

    notices = given_hints(_decided(view, pod("trainer", container(gpu=1, nic=1))))

    assert [notice.device_class for notice in notices] == ["nic"]


def test_given_hints_say_how_many_lists_are_left_out_when_a_pod_has_many_containers() -> None:
    """A notice has the lists of the first sixteen containers."""
    wanted = pod("trainer", *(container(f"c{place}", cpus=1) for place in range(20)))

    (of_cpu,) = given_hints(_decided(dgx(), wanted))

    assert (of_cpu.device_class, len(of_cpu.lists), of_cpu.omitted_lists) == ("cpu", 16, 4)


@pytest.mark.parametrize("verb", ["adopt", "release"])
def test_given_hints_are_none_when_a_decision_merges_nothing(verb: str) -> None:
    """What kubelet chose, and what is let go, had no hints."""
    event = structs.replace(_decided(dgx(), pod("trainer", container(gpu=1))), verb=verb, view=None, outcome=None)

    assert given_hints(event) == ()
