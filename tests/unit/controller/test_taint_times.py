"""Since when a taint without a time is there: since it was seen, and anew when it came back."""

from __future__ import annotations

from typing import Any

from support.controllers import runtime_on
from topobus.controller.standalone.evict_tainted import Evictor
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.messages.messages import ApiObject
from topobus.process.work_queue import WorkQueue
from topobus.testing.clock import ManualClock

DRIVER = "gpu.example.com"


def slices(state: StandaloneState, revision: int, *tainted: str) -> None:
    """Publish two devices of a vendor, some of them with a taint that evicts and says no time."""
    taint = {"key": "example.com/hot", "effect": "NoExecute"}
    devices = [{"name": name} | ({"taints": [taint]} if name in tainted else {}) for name in ("a", "b")]
    spec = {
        "driver": DRIVER,
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": devices,
    }
    api_object = ApiObject(
        api_version="resource.k8s.io/v1", kind="ResourceSlice", metadata={"name": "s", "uid": "s"}, spec=spec
    )
    state.put_object(ObjectKey("resourceslice", "cluster", "s"), Stored(revision, api_object))


async def test_claim_stays_its_whole_time_when_the_taint_went_and_came_back() -> None:
    """A claim that bears a taint for 60 s is not evicted 20 s after the taint came back, though it
    was first seen 70 s ago.
    """
    nobody: Any = None  # any write, and any eviction, would fail
    clock, state = ManualClock(), StandaloneState()
    runtime = runtime_on(nobody, clock=clock)
    queue = WorkQueue("evictions", clock, 2.0)
    evictor = Evictor(runtime, state, nobody, queue)
    toleration = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    granted = {"request": "r", "driver": DRIVER, "pool": "n1", "device": "a", "tolerations": [toleration]}
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"namespace": "default", "name": "c", "uid": "c"},
        spec={"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": DRIVER}}]}},
        status={"allocation": {"devices": {"results": [granted]}}},
    )
    state.put_object(ObjectKey("resourceclaim", "default", "c"), Stored(1, claim))

    slices(state, 2, "a", "b")
    await evictor.reconcile_all()
    assert queue.wait_s() == 2.0
    clock.advance(50)
    slices(state, 3, "b")
    await evictor.reconcile_all()
    assert queue.wait_s() is None
    slices(state, 4, "a", "b")
    clock.advance(1)
    await evictor.reconcile_all()
    assert queue.wait_s() == 2.0
    clock.advance(20)

    await evictor.reconcile_all()
    assert queue.wait_s() == 2.0
