"""How long the scheduler of classic pods waits, by its pods alone."""

from __future__ import annotations

from typing import Any

from support.controllers import runtime_on
from topobus.controller.classic.scheduler import ClassicScheduler
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject
from topobus.process.work_queue import WorkQueue
from topobus.testing.clock import ManualClock

RETRY_S = 2.0
LOOK_AGAIN_S = 5.0


async def test_scheduler_waits_for_no_pod_when_its_pod_has_a_node() -> None:
    """A pod that waits is looked at again after a while; one that runs makes no controller wake."""
    nobody: Any = None  # any write, and any look at nodes, would fail
    clock, state = ManualClock(), StandaloneState()
    runtime = runtime_on(nobody, clock=clock)
    queue = WorkQueue("classic-pods", clock, RETRY_S)
    scheduler = ClassicScheduler(runtime, state, nobody, queue)
    claim = ApiObject(
        api_version="resource.k8s.io/v1alpha2",
        kind="ResourceClaim",
        metadata={"namespace": "default", "name": "c", "uid": "c", "deletionTimestamp": "2026-01-01T00:00:00Z"},
        spec={"resourceClassName": "gpu"},
    )
    spec = {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}
    pod = ApiObject(api_version="v1", kind="Pod", metadata={"namespace": "default", "name": "p", "uid": "p"}, spec=spec)
    placed = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
    bound = ApiObject(
        api_version="v1", kind="Pod", metadata=pod.metadata, spec={**spec, "nodeName": "n1"}, status=placed
    )
    state.put_object(ObjectKey("resourceclaim", "default", "c"), Stored(1, claim))
    key = ObjectKey("pod", "default", "p")

    waits = []
    for revision, version in ((2, pod), (3, bound)):
        state.put_object(key, Stored(revision, version))
        await scheduler.reconcile_all()
        waits.append(queue.wait_s())

    assert waits == [LOOK_AGAIN_S, None]
