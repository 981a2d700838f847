"""How long kube-scheduler may refuse a pod before the devices are taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from support.cluster_home import claim, pod
from topobus.controller.cluster.allocated_condition import AllocatedCondition
from topobus.controller.cluster.unschedulable_pods import UnschedulablePods
from topobus.controller.commit.deallocate_claims import ClusterDeallocation
from topobus.controller.config import ClusterSettings
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.engine.claims.attempts import Attempt, with_attempt
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.formats.messages.messages import ApiObject
from topobus.process.work_queue import WorkQueue
from topobus.testing.clock import ManualClock

REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no"}
DEVICE = GrantedDevice(request="r", driver="gpu.example.com", pool="n1", device="gpu-0")


class Writes:
    """Takes what is written, and stores nothing: the writer and the events."""

    def __init__(self) -> None:
        self.claims: list[Mapping[str, Any]] = []

    async def write(self, key: ObjectKey, _revision: int, value: ApiObject) -> Stored | None:
        """Take an object's next version."""
        if key.kind == "resourceclaim":
            self.claims.append(value.status)
        return None

    async def warn(self, *_: Any, **__: Any) -> None:
        """Take an event."""


def refused_pod(state: ApiServerState, status: dict[str, Any], **note: Any) -> None:
    """Store a pod with devices that kube-scheduler does not place, and the record in its claim."""
    identity = {"uid": "p", "resourceVersion": "1"}
    waiting = pod("p", "c", gates=())
    state.put("Pod", "v1", {**waiting, "metadata": {**waiting["metadata"], **identity}, "status": status})
    result = AllocationResult(devices=DevicesAllocated(results=(DEVICE,)))
    attempt = Attempt(number=1, node="n1", allocation=result, pod="p", **note)
    plain = claim("c")
    noted = with_attempt(
        ApiObject(api_version="v1", kind="ResourceClaim", metadata=plain["metadata"], spec=plain["spec"]), attempt
    )
    granted = {"request": "r", "driver": "gpu.example.com", "pool": "n1", "device": "gpu-0"}
    state.put(
        "ResourceClaim",
        "v1",
        {
            "metadata": {**noted.metadata, "uid": "c", "resourceVersion": "2"},
            "spec": noted.spec,
            "status": {
                "allocation": {"devices": {"results": [granted]}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}],
            },
        },
    )


def reconciler(state: ApiServerState, clock: ManualClock, writes: Any) -> tuple[UnschedulablePods, WorkQueue]:
    """Make the reconciler, with the default times."""
    queue = WorkQueue("deallocation", clock, 1.0)
    condition = AllocatedCondition(clock, state, writes, writes)
    deallocation = ClusterDeallocation(state, writes, writes, writes)
    return UnschedulablePods(ClusterSettings(), state, writes, deallocation, condition, writes, queue), queue


@pytest.mark.parametrize(
    ("status", "note", "wait_s"),
    [
        ({"conditions": [REFUSED]}, {}, 5.0),
        ({"conditions": [REFUSED]}, {"refused": ("n0",)}, 15.0),
        ({"conditions": [REFUSED]}, {"rounds": 1}, 15.0),
        ({"conditions": [REFUSED], "nominatedNodeName": "n1"}, {}, 60.0),
        ({"conditions": [REFUSED], "nominatedNodeName": "n1"}, {"refused": ("n0",)}, 60.0),
    ],
    ids=["first node", "further node", "further round", "preempting", "preempting on a further node"],
)
async def test_devices_are_taken_back_after_the_time_that_the_scheduler_may_need(
    status: dict[str, Any], note: dict[str, Any], wait_s: float
) -> None:
    """The refusal of the first node is final at once. On a further node kube-scheduler may not have
    tried yet, and a pod with a nominated node waits for the pods that are evicted.
    """
    state, clock, writes = ApiServerState(), ManualClock(), Writes()
    refused_pod(state, status, **note)
    pods, queue = reconciler(state, clock, writes)
    await pods.reconcile_all()
    waits = queue.wait_s()
    clock.advance(wait_s - 0.001)
    await pods.reconcile_all()
    before = len(writes.claims)

    clock.advance(0.002)
    await pods.reconcile_all()

    assert waits == wait_s
    assert before == 0
    assert [status.get("reservedFor", []) for status in writes.claims] == [[]]


async def test_the_short_time_begins_when_the_preemption_ends() -> None:
    """kube-scheduler withdraws its nomination: what it says from then on is final."""
    state, clock, writes = ApiServerState(), ManualClock(), Writes()
    refused_pod(state, {"conditions": [REFUSED], "nominatedNodeName": "n1"})
    pods, queue = reconciler(state, clock, writes)
    await pods.reconcile_all()
    clock.advance(50.0)
    plain = pod("p", "c", gates=())
    plain["metadata"] |= {"uid": "p", "resourceVersion": "3"}

    state.put("Pod", "v1", {**plain, "status": {"conditions": [REFUSED]}})
    await pods.reconcile_all()

    assert (queue.wait_s(), writes.claims) == (5.0, [])
