"""Placements on a node of which a device service is silent: nothing of its class is handed out, and
the rest is as ever.
"""

from __future__ import annotations

import pytest

from support.alignment_nodes import container, dgx_facts, owner, pod
from topobus.engine.alignment.planning.node_view import node_view
from topobus.engine.alignment.planning.placement import place
from topobus.values.idset import CpuSet
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, PodRequest
from topobus.values.view import AlignmentOptions, PlanMode

SINCE = "2026-01-01T00:00:00Z"


def of_gpu(**wanted: object) -> PodRequest:
    """A pod that asks for GPUs by name."""
    request = DeviceRequest(device_class="gpu", **wanted)  # type: ignore[arg-type]  # a test's own fields
    return PodRequest(owner=owner("named"), containers=(ContainerRequest(name="main", devices=(request,)),))


@pytest.mark.parametrize("mode", list(PlanMode))
@pytest.mark.parametrize(
    ("silent", "request_", "wanted"),
    [
        pytest.param("gpu", pod("a", container(gpu=1, nic=1)), ["gpu"], id="some-devices"),
        pytest.param("gpu", of_gpu(count=1, names=("gpu-1",)), ["gpu"], id="by-name"),
        pytest.param("gpu", pod("a", container(gpu=1), container("b", nic=1)), ["gpu"], id="one-container-of-two"),
        pytest.param("cpu", pod("a", container(cpus=2, gpu=1)), ["cpu"], id="cpus"),
        pytest.param("cpu", pod("a", container(gpu=1)), [], id="no-cpus-wanted"),
        pytest.param("gpu", pod("a", container(cpus=2, nic=1)), [], id="others"),
        pytest.param("gpu", of_gpu(count=1, names=("gpu-1",), is_shared=True), [], id="only-looked-at"),
    ],
)
def test_place_refuses_only_what_a_silent_service_would_give_when_it_is_asked_for(
    silent: str, request_: PodRequest, wanted: list[str], mode: PlanMode
) -> None:
    """One reason a silent class, with since when.

    What is not to be held, and other classes, do not need its word.
    """
    machine, inventories = dgx_facts()
    view = node_view(machine, inventories, None, AlignmentOptions(mode=mode), CpuSet(), unheard_classes={silent: SINCE})
    outcome = place(view, request_)

    reasons = outcome.reasons if isinstance(outcome, Refusal) else ()
    assert [(reason.code, reason.facts["resource"], reason.facts["since"]) for reason in reasons] == [
        ("service-silent", resource, SINCE) for resource in wanted
    ]
    assert isinstance(outcome, Placement) is not bool(wanted)
