"""When a gated pod is looked at again: at a change, at its time, and, where other pods were in its way, when pods come and go."""

from __future__ import annotations

from typing import Any

from topobus.controller.reconcilers.gated_pod_queue import Due, GatedPodQueue
from topobus.controller.state.api_server_state import ApiServerState
from topobus.testing.clock import ManualClock

KEY = ("default", "p")


def pod(name: str, **spec: Any) -> dict[str, Any]:
    """A pod as the server shows it."""
    return {"metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": "5"}, "spec": spec}


def test_pod_that_others_keep_off_is_due_when_pods_move_and_not_at_once() -> None:
    """Of its hundred seconds it waits five after a pod went: pods come and go all the time, and each look costs."""
    state, clock = ApiServerState(), ManualClock()
    queue = GatedPodQueue(clock, state, 1.0)
    state.put("Pod", "v1", pod("p", schedulingGates=[{"name": "topobus.dev/allocation"}]))
    state.put("Pod", "v1", pod("q", nodeName="n1"))
    now_s = clock.monotonic()
    queue.due[KEY] = Due(now_s + 100, queue.versions_of(KEY), state.room.changes, now_s + 5)

    before = queue.take_ready([KEY])
    state.drop("Pod", ("default", "q"))
    moved = queue.take_ready([KEY])
    clock.advance(5)
    later = queue.take_ready([KEY])

    assert (before, moved, later) == (([], 100.0), ([], 5.0), ([KEY], None))
