"""The work queue of a reconcile loop: when an object is due, and that an error in its work is told,
counted, and never ends the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

import pytest
from prometheus_client import CollectorRegistry

from topobus.controller.metrics import ControllerMetrics
from topobus.process.work_queue import Again, Behind, Busy, Done, Result, WorkQueue
from topobus.testing.clock import ManualClock
from topobus.values.errors import ContractError, HardwareError, InvariantError, PeerUnavailable
from topobus.values.outcome import Reason

RETRY_S = 2.0


class Loop:
    """A loop with its queue: says how often the work ran and what was reported."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.registry = CollectorRegistry()
        self.clock = ManualClock()
        self.result: Result = None
        self.queue = WorkQueue("pods", self.clock, RETRY_S, failures=ControllerMetrics(self.registry).set_aside)
        self.errors = list(errors)
        self.report_errors: list[Exception] = []
        self.runs = 0
        self.reports: list[Reason] = []

    async def work(self) -> Result:
        """Fail with the next error, or give the result."""
        self.runs += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return self.result

    async def report(self, reason: Reason) -> None:
        """Keep the report, or fail as a write may."""
        if self.report_errors:
            raise self.report_errors.pop(0)
        self.reports.append(reason)

    async def round(self, version: int = 1, key: str = "a") -> float | None:
        """Run the object once; gives after how many seconds one is due."""
        await self.queue.run(key, version, self.work, name=f"Pod default/{key}", report=self.report)
        return self.queue.wait_s()

    @property
    def failures(self) -> float:
        """Count what the metric says."""
        return self.registry.get_sample_value("topobus_controller_objects_set_aside_total", {"loop": "pods"}) or 0.0


@pytest.mark.parametrize(
    "error",
    [
        ContractError("cpus is 9007199254740993"),
        TypeError("argument of type 'int' is not iterable"),
        KeyError("name"),
        RecursionError("too deep"),
        InvariantError("held twice"),
        ExceptionGroup("unhandled errors in a TaskGroup", [ContractError("garbage"), PeerUnavailable("silent")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_queue_sets_an_object_aside_until_it_changes_when_its_work_fails(error: Exception) -> None:
    """A failing object is reported and counted once, is left alone at the same version, and is
    worked on again at a newer one.
    """
    loop = Loop(error)

    answers = [await loop.round(), await loop.round(), await loop.round(version=2)]

    assert answers == [None, None, None]
    assert loop.runs == 2
    assert [reason.code for reason in loop.reports] == ["malformed"]
    assert loop.failures == 1
    assert loop.queue.reason("a") is None


async def test_queue_lets_the_neighbour_go_on_when_one_object_fails() -> None:
    """The failure of one object says nothing of another."""
    loop = Loop(TypeError("bad"))

    await loop.round(key="a")
    await loop.round(key="b")

    assert loop.runs == 2
    assert loop.queue.reason("a") is not None
    assert loop.queue.reason("b") is None


@pytest.mark.parametrize(
    "error",
    [
        PeerUnavailable("silent"),
        HardwareError("broken"),
        ExceptionGroup("both", [PeerUnavailable("silent"), HardwareError("broken")]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_queue_asks_for_another_try_when_only_a_peer_failed(error: Exception) -> None:
    """A silent peer is not the object's fault: it is tried again, after a while at the latest, and
    nothing is reported or counted.
    """
    loop = Loop(error)

    wait_s, after = await loop.round(), await loop.round()

    assert wait_s is not None
    assert RETRY_S / 2 <= wait_s <= RETRY_S
    assert (after, loop.runs) == (None, 2)
    assert (loop.reports, loop.failures) == ([], 0)


async def test_queue_asks_a_silent_peer_ever_more_seldom_when_it_is_to_back_off() -> None:
    """The longest pause doubles with each failure in a row up to the queue's longest.

    An answer ends that.
    """
    loop = Loop(*[PeerUnavailable("silent")] * 40, None, PeerUnavailable("silent"))
    loop.queue = WorkQueue("pods", loop.clock, RETRY_S, longest_s=16.0)
    pauses = []
    for _ in range(42):
        pauses.append(await loop.round())
        loop.clock.advance(16.0)

    assert all(
        pause is not None and RETRY_S / 2 <= pause <= limit
        for pause, limit in zip(pauses, (2, 4, 8, *[16] * 37), strict=False)
    )
    assert max(pause for pause in pauses if pause is not None) > 8
    assert pauses[40] is None
    assert pauses[41] is not None
    assert pauses[41] <= RETRY_S


async def test_queue_asks_a_silent_peer_again_when_the_narrowest_version_changed() -> None:
    """What became free elsewhere is no reason to ask a silent node again.

    That it wrote something is.
    """
    loop = Loop(PeerUnavailable("silent"))
    runs = []
    for version, narrow in ((1, "a"), (2, "a"), (2, "b")):
        await loop.queue.run("a", version, loop.work, name="a", narrow=(narrow,))
        runs.append(loop.runs)

    assert runs == [1, 1, 2]


async def test_queue_reports_again_when_the_report_met_a_silent_peer() -> None:
    """An object is set aside only when it was told so, or cannot be told at all."""
    loop = Loop(TypeError("bad"), TypeError("bad"))
    loop.report_errors = [PeerUnavailable("the write was not confirmed")]

    answers = [await loop.round(), await loop.round(), await loop.round()]

    assert [answer is None for answer in answers] == [False, True, True]
    assert loop.runs == 2
    assert len(loop.reports) == 1
    assert loop.failures == 1


async def test_queue_sets_aside_when_the_report_itself_fails() -> None:
    """An object that cannot even be told what is wrong is still set aside."""
    loop = Loop(TypeError("bad"))
    loop.report_errors = [AttributeError("no status")]

    answers = [await loop.round(), await loop.round()]

    assert answers == [None, None]
    assert loop.runs == 1


async def test_queue_lets_a_cancellation_through() -> None:
    """A stop is no failure of the object that was being worked on."""
    loop = Loop(asyncio.CancelledError())

    with pytest.raises(asyncio.CancelledError):
        await loop.round()

    assert loop.queue.reason("a") is None


async def test_queue_forgets_objects_that_are_gone() -> None:
    """What is kept of objects is bounded by those that there are.

    One that comes back is worked on anew.
    """
    loop = Loop(TypeError("bad"))
    await loop.round()

    loop.queue.keep({"b"})
    await loop.round()

    assert loop.runs == 2


def test_queue_takes_in_the_neighbours_when_one_value_cannot_be_taken_in() -> None:
    """A change that nobody can take in is counted, and the copy of everything else goes on."""
    loop = Loop()
    taken: list[str] = []

    def bad() -> None:
        raise AttributeError("'int' object has no attribute 'get'")

    loop.queue.run_now("a", 1, bad, name="a")
    loop.queue.run_now("b", 1, lambda: taken.append("b"), name="b")

    assert taken == ["b"]
    assert loop.failures == 1


@pytest.mark.parametrize(
    ("result", "at_once", "changed", "later"),
    [
        pytest.param(None, True, True, True, id="nothing"),
        pytest.param(Done(1), False, True, False, id="done"),
        pytest.param(Again(5), True, True, True, id="again"),
        pytest.param(Again(5, version=1), False, True, True, id="again-at-the-version"),
        pytest.param(Behind(1), False, True, False, id="behind"),
    ],
)
async def test_queue_works_on_an_object_when_its_result_says_so(
    result: Result, *, at_once: bool, changed: bool, later: bool
) -> None:
    """After a result an object is ready at once, when its version is another, and when its time has
    come, or is not.
    """
    loop = Loop()
    loop.result = result
    await loop.round()

    ready = [loop.queue.is_ready("a", 1), loop.queue.is_ready("a", 2)]
    loop.clock.advance(5)

    assert [*ready, loop.queue.is_ready("a", 1)] == [at_once, changed, later]


async def test_queue_keeps_what_it_holds_of_an_object_when_work_goes_on_beside_the_loop() -> None:
    """A round that begins work ends no wait; the work's own result does."""
    loop = Loop()
    loop.result = Again(5)
    await loop.round()
    loop.result = Busy()
    while_busy = await loop.round()

    loop.queue.put("a", None)

    assert (while_busy, loop.queue.wait_s()) == (5, None)


async def test_queue_waits_again_when_its_loop_did_not_come_to_an_object_that_was_due() -> None:
    """An object that nobody looks at any more makes no loop run without a pause."""
    loop = Loop()
    loop.result = Again(5)
    waits = [await loop.round()]

    loop.clock.advance(6)

    assert [*waits, loop.queue.wait_s()] == [5, RETRY_S]


@pytest.mark.parametrize(
    ("elapsed_s", "versions", "is_ready"),
    [
        pytest.param(0, (1, "narrow"), False, id="nothing-changed"),
        pytest.param(0, (2, "narrow"), False, id="only-the-wide-version-changed"),
        pytest.param(0, (2, "other"), True, id="the-narrow-version-changed"),
        pytest.param(RETRY_S, (1, "narrow"), True, id="its-time-has-come"),
    ],
)
async def test_queue_leaves_an_object_alone_while_the_version_that_its_result_names_is_one_of_its_versions(
    elapsed_s: float, versions: tuple[Hashable, ...], *, is_ready: bool
) -> None:
    """Of two versions the result chooses for which it waits: an object whose node is silent does
    not ask again because something else became free.
    """
    loop = Loop()
    loop.queue.put("a", Again(version="narrow"))

    loop.clock.advance(elapsed_s)

    assert loop.queue.is_ready("a", *versions) is is_ready


async def test_work_knows_that_only_time_has_passed_when_it_asked_for_another_look_at_this_version() -> None:
    """What is over in a moment is told to nobody: the work waits once, and tells at the second
    look.
    """
    loop = Loop()
    loop.result = Again(5, version=1)
    waited = [loop.queue.has_waited("a", 1)]
    await loop.round()
    loop.clock.advance(5)

    waited += [loop.queue.has_waited("a", 1), loop.queue.has_waited("a", 2)]

    assert waited == [False, True, False]


class Freed:
    """What each object reads, as a number that grows when something is freed there."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, key: str) -> Hashable:
        """Say how free it is now."""
        return self.counts.get(key, 0)


def test_longest_waiting_come_first_when_work_is_costly() -> None:
    """Each try goes to the end of the line.

    An object that was never tried keeps its place, and one that is gone has none.
    """
    queue, freed = Loop().queue, Freed()
    for key in ("a", "b", "c"):
        queue.put(key, Behind(1))
    first = queue.behind("abc", freed)

    queue.put("a", Behind(2, freed("a")))
    queue.put("d", Behind(1))
    freed.counts = {"a": 1}

    assert first == ["a", "b", "c"]
    assert queue.behind("abd", freed) == ["b", "d"]


@pytest.mark.parametrize(
    ("freed_keys", "elapsed_s", "due"),
    [
        pytest.param("", 1e6, [], id="nothing-freed"),
        pytest.param("b", 1e6, [], id="freed-elsewhere"),
        pytest.param("a", 1, [], id="too-early"),
        pytest.param("a", RETRY_S, ["a"], id="freed"),
    ],
)
def test_costly_work_is_repeated_when_something_that_it_read_was_freed(
    freed_keys: str, elapsed_s: float, due: list[str]
) -> None:
    """Time alone changes nothing; what is freed elsewhere does not either."""
    loop, freed = Loop(), Freed()
    loop.queue.put("a", Behind(1))
    loop.queue.put("a", Behind(2, freed("a")))
    freed.counts = dict.fromkeys(freed_keys, 1)

    loop.clock.advance(elapsed_s)

    assert loop.queue.behind(["a"], freed) == due


def test_pause_doubles_with_each_vain_try_and_ends_at_a_minute() -> None:
    """Where something is freed all the time, a search that never finds anything is made ever more
    seldom.

    The loop wakes when the pause is over.
    """
    loop, freed = Loop(), Freed()
    loop.queue.put("a", Behind(1))
    pauses = []
    for version in range(2, 10):
        loop.queue.put("a", Behind(version, freed("a")))
        pauses.append(loop.queue.wait_s())
        loop.clock.advance(pauses[-1] or 0.0)
        pauses.append(loop.queue.wait_s())

    assert pauses[::2] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert set(pauses[1::2]) == {None}


async def test_costly_work_is_done_although_the_version_is_the_same_and_ends_the_wait() -> None:
    """Cheap work waits for another version, costly work is what the object waits for.

    Whatever comes of it takes the object out of the line.
    """
    loop, freed = Loop(), Freed()
    loop.queue.put("a", Behind(1))
    await loop.round()
    cheap = loop.runs

    await loop.queue.run("a", 1, loop.work, name="a", is_costly=True)

    assert (cheap, loop.runs) == (0, 1)
    assert loop.queue.behind(["a"], freed) == []
    assert loop.queue.is_ready("a", 1)


async def test_object_is_ready_for_the_work_that_goes_on_when_its_costly_work_began_it() -> None:
    """A claim that got its devices by a long search is written by a task, and does not wait for its
    turn again.
    """
    loop, freed = Loop(), Freed()
    loop.queue.put("a", Behind(1))
    loop.result = Busy()

    await loop.queue.run("a", 1, loop.work, name="a", is_costly=True)

    assert loop.queue.is_ready("a", 1)
    assert loop.queue.behind(["a"], freed) == []


def test_changed_object_is_new_and_one_that_is_gone_is_forgotten_when_its_work_was_costly() -> None:
    """A user who changes an object need not wait for its pause.

    Who deletes it leaves nothing behind.
    """
    loop, freed = Loop(), Freed()
    loop.queue.put("a", Behind(1))
    loop.queue.put("a", Behind(2, freed("a")))
    before = loop.queue.behind(["a"], freed)
    loop.queue.put("a", Behind(3))
    changed = loop.queue.behind(["a"], freed)

    loop.queue.keep(frozenset())

    assert (before, changed) == ([], ["a"])
    assert loop.queue.behind(["a"], freed) == []
