"""The queue of gated pods: a round costs what changed, and forgets what is gone."""

from __future__ import annotations

from typing import Any

from support.cluster_home import claim, pod, slice_of
from topobus.controller.cluster.gated_pod_queue import GatedPodQueue
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster.changed_pods import ChangedPods
from topobus.engine.claims.attempts import Attempt, with_attempt
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.process.work_queue import Again, Done, Result
from topobus.testing.clock import ManualClock
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.outcome import Reason
from topobus.values.request import Owner, OwnerKind

P, Q = ("default", "p"), ("default", "q")


def _put(state: ApiServerState, plain: dict[str, Any], version: int, **metadata: Any) -> None:
    """Store an object at a version."""
    plain["metadata"] |= {"uid": plain["metadata"]["name"], "resourceVersion": str(version), **metadata}
    state.put(plain["kind"], "v1", plain)


def _queue(*pods: str) -> tuple[ApiServerState, GatedPodQueue, ManualClock]:
    """Make a state with gated pods that use a claim each, and its queue."""
    state, clock = ApiServerState(), ManualClock()
    for name in pods:
        _put(state, claim(f"c-{name}"), 1)
        _put(state, pod(name, f"c-{name}"), 2)
    return state, GatedPodQueue(clock, state, retry_s=1.0), clock


def _take(queue: GatedPodQueue) -> list[tuple[str, str]]:
    queue.pending_pods()
    return queue.take_ready()


async def _end(queue: GatedPodQueue, key: tuple[str, str], result: Result) -> None:
    """Do work on a pod that has this result, whatever came of it before."""

    async def work() -> Result:
        return result

    async def report(reason: Reason) -> None:
        raise AssertionError(reason)

    await queue.run(key, work, report, is_costly=True)


async def _round(queue: GatedPodQueue) -> list[tuple[str, str]]:
    """Take a round's pods, and end the work on them at once with nothing to do until something
    changes.
    """
    ready = _take(queue)
    for key in ready:
        await _end(queue, key, Done(queue.versions_of(key)))
        queue.release(key)
    return ready


async def test_queue_gives_only_the_pod_whose_claim_changed() -> None:
    """After all pods were looked at, a new version of one's claim makes that one ready and no
    other.
    """
    state, queue, _ = _queue("p", "q")
    first = [await _round(queue), await _round(queue)]

    _put(state, claim("c-q"), 3, labels={"new": "label"})

    assert first == [[P, Q], []]
    assert await _round(queue) == [Q]


async def test_queue_gives_all_waiting_pods_when_something_became_free() -> None:
    """What a pod waits for may be there now."""
    state, queue, _ = _queue("p", "q")
    await _round(queue)

    _put(state, slice_of("n1", 2), 4)

    assert await _round(queue) == [P, Q]
    assert await _round(queue) == []


async def test_queue_gives_no_pod_when_a_ledger_only_takes_devices() -> None:
    """A node's first ledger frees nothing, and neither does one that holds more: nobody looks
    again.

    One that holds less lets all look.
    """
    state, queue, _ = _queue("p")
    await _round(queue)
    held = Allocation(
        owner=Owner(kind=OwnerKind.POD, name="x", uid="x"), holdings=(Holding(devices={"gpu": ("gpu-0",)}),)
    )
    rounds = []
    for allocations in ({}, {"x": held}, {}):
        state.put_ledger(Ledger(node="n1", allocations=allocations))
        rounds.append(await _round(queue))

    assert rounds == [[], [], [P]]


async def test_queue_gives_a_pod_again_when_its_time_has_come() -> None:
    """A pod that waits for time alone is told of by the seconds left, and ready after them."""
    _, queue, clock = _queue("p")
    await _round(queue)
    await _end(queue, P, Again(5.0, "p"))
    before = _take(queue), queue.wait_s()

    clock.advance(5.0)

    assert before == ([], 5.0)
    assert _take(queue) == [P]


async def test_pod_that_others_keep_off_is_due_when_pods_move_and_not_at_once() -> None:
    """Of its hundred seconds it waits five after a pod went: pods come and go all the time, and
    each look costs.
    """
    state, clock = ApiServerState(), ManualClock()
    queue = GatedPodQueue(clock, state, 1.0)
    _put(state, pod("p"), 5)
    _put(state, pod("q", gates=(), nodeName="n1"), 5)
    await _round(queue)
    await _end(queue, P, Again(100.0, queue.versions_of(P).with_moves))

    before = _take(queue), queue.wait_s()
    state.drop("Pod", ("default", "q"))
    moved = _take(queue), queue.wait_s()
    clock.advance(5)

    assert (before, moved, _take(queue)) == (([], 100.0), ([], 5.0), [P])


async def test_pod_that_others_keep_off_is_due_when_pods_moved_while_it_was_looked_at() -> None:
    """What it waits for is how it was when the look began: a pod that went since then may have been
    in its way.
    """
    state, queue, clock = _queue("p")
    _put(state, pod("q", gates=(), nodeName="n1"), 5)
    _take(queue)
    versions = queue.versions_of(P)
    state.drop("Pod", Q)
    clock.advance(5)
    _take(queue)

    await _end(queue, P, Again(100.0, versions.with_moves))
    queue.release(P)

    assert _take(queue) == [P]


def test_queue_gives_no_pod_twice_while_it_is_worked_on() -> None:
    """A busy pod that changes is ready when the work on it has ended."""
    state, queue, _ = _queue("p")
    ready = _take(queue)
    _put(state, claim("c-p"), 3, labels={"new": "label"})
    while_busy = _take(queue)

    queue.release(P)

    assert (ready, while_busy) == ([P], [])
    assert _take(queue) == [P]


async def test_queue_forgets_a_pod_that_is_gone_also_when_it_was_worked_on() -> None:
    """Nothing is kept of pods that went: not what was seen of them, and not when they were told."""
    state, queue, _ = _queue("p")
    _take(queue)
    queue.silence(P)
    await _end(queue, P, Again(5.0, "p"))
    state.drop("Pod", P)
    _take(queue)

    queue.release(P)

    assert list(queue.pending_pods()) == []
    assert (queue.wait_s(), queue.silence_s(P)) == (None, 0.0)


async def test_queue_knows_a_pod_of_the_same_name_as_another_one() -> None:
    """What was learned of a pod does not hold for the next one of its name."""
    state, queue, _ = _queue("p")
    await _round(queue)
    queue.silence(P)
    state.drop("Pod", P)

    _put(state, pod("p", "c-p"), 5, uid="other")

    assert await _round(queue) == [P]
    assert queue.silence_s(P) == 0.0


def test_pause_between_explanations_doubles_up_to_a_minute() -> None:
    """A pod that keeps waiting is told ever more seldom, and one that was never told at once."""
    _, queue, clock = _queue("p")
    _take(queue)
    pauses = [queue.silence_s(P)]
    for _ in range(6):
        queue.silence(P)
        pauses.append(queue.silence_s(P))
    clock.advance(59.0)

    assert pauses == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert queue.silence_s(P) == 1.0


def test_pause_before_refused_nodes_are_tried_again_doubles_up_to_five_minutes() -> None:
    """With each round, and it runs on while it is asked for."""
    _, queue, clock = _queue("p")
    _take(queue)
    pauses, are_over = [], []
    for rounds in (0, 1, 2, 6, 60):
        pauses.append(queue.refused_wait_s(P, 5.0, rounds))
        clock.advance(4.0)
        pauses.append(queue.refused_wait_s(P, 5.0, rounds))
        before = queue.may_begin_round(P)
        clock.advance(pauses[-1])
        are_over.append((before, queue.may_begin_round(P), queue.may_begin_round(P)))

    assert pauses == [5.0, 1.0, 10.0, 6.0, 20.0, 16.0, 300.0, 296.0, 300.0, 296.0]
    assert are_over == [(False, True, False)] * 5


def test_changed_pods_name_the_users_of_a_claim_once() -> None:
    """A claim's change concerns all pods that use it.

    A pod that stopped using it is not concerned.
    """
    index = ChangedPods()
    index.put_pod(P, (("default", "shared"),))
    index.put_pod(Q, (("default", "shared"), ("default", "own")))
    index.take()
    index.put_claim(("default", "shared"))
    both, after = index.take(), index.take()
    index.put_pod(Q, None)
    index.put_claim(("default", "shared"))

    assert (both, after) == ({P, Q}, frozenset())
    assert index.take() == {P, Q}
    assert (index.claims_of(P), index.claims_of(Q)) == ((("default", "shared"),), ())


def _intended(state: ApiServerState, name: str, device: str) -> tuple[Stored, Attempt]:
    """Make a claim's next version, with an intent."""
    result = GrantedDevice(request="r", driver="gpu.example.com", pool="n1", device=device)
    attempt = Attempt(
        number=1, node="n1", allocation=AllocationResult(devices=DevicesAllocated(results=(result,))), pod="p"
    )
    stored = state.claims["default", name]
    return Stored(stored.revision, with_attempt(stored.value, attempt)), attempt


def _taken(state: ApiServerState) -> int:
    return state.stock.state_of("n1").taken


def test_intent_takes_its_devices_while_it_is_written_and_gives_them_back_when_it_was_not() -> None:
    """From the decision on nobody else is given the devices.

    A write that failed leaves them free, and waiting pods look again.
    """
    state, _, _ = _queue("p")
    _put(state, slice_of("n1", 2), 4)
    intended, attempt = _intended(state, "c-p", "n1-gpu-1")
    before, supply = _taken(state), state.supply

    state.under_way.put(("default", "c-p"), intended, P, attempt)
    during = (
        _taken(state),
        state.under_way.claims(),
        state.intended_on("n1", without=""),
        state.intended_on("n1", without="p"),
    )
    state.settle(("default", "c-p"))

    assert before == 0
    assert during == (0b10, {"c-p"}, {P}, frozenset())
    assert (_taken(state), state.under_way.claims(), state.supply > supply) == (0, frozenset(), True)


def test_intent_stays_taken_when_it_was_written() -> None:
    """The copy of the written claim takes the place of what was being written, whichever comes
    first, answer or watch.
    """
    state, _, _ = _queue("p")
    _put(state, slice_of("n1", 2), 4)
    intended, attempt = _intended(state, "c-p", "n1-gpu-1")
    state.under_way.put(("default", "c-p"), intended, P, attempt)
    metadata = {**intended.value.metadata, "resourceVersion": "9"}
    state.put("ResourceClaim", "v1", {"metadata": metadata, "spec": intended.value.spec, "status": {}})

    state.settle(("default", "c-p"))

    assert _taken(state) == 0b10
    assert state.under_way.claims() == frozenset()
    assert state.objects[ObjectKey("resourceclaim", "default", "c-p")].revision == 9


def test_placeless_pods_are_those_that_kube_scheduler_cannot_place() -> None:
    """Thousands of pods that have devices and no node yet are nobody's work.

    One of them that is unschedulable is.
    """
    state, _, _ = _queue("p", "q")
    for name, conditions in (
        ("p", []),
        ("q", [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]),
    ):
        open_pod = pod(name, f"c-{name}", gates=())
        _put(state, {**open_pod, "status": {"conditions": conditions}}, 6)
        intended, _ = _intended(state, f"c-{name}", f"n1-gpu-{name == 'q':d}")
        noted = _served(intended, name)
        state.put("ResourceClaim", "v1", noted)

    assert state.gated_pods.placeless() == {Q}


def _served(intended: Stored, user: str) -> dict[str, Any]:
    """Make the allocated and reserved claim of an intent, as a server shows it."""
    note = {**intended.value.metadata["annotations"]}
    note = {key: value.replace('"pod":"p"', f'"pod":"{user}"') for key, value in note.items()}
    result = {"request": "r", "driver": "gpu.example.com", "pool": "n1", "device": f"n1-gpu-{user == 'q':d}"}
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": user, "uid": user}],
    }
    metadata = {**intended.value.metadata, "annotations": note, "resourceVersion": "8"}
    return {"metadata": metadata, "spec": intended.value.spec, "status": status}
