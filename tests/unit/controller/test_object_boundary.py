"""The boundary around one object of a reconcile loop: it is told, counted, set aside until it changes, and never ends the loop."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.object_boundary import ObjectBoundary
from topobus.domain.errors import ContractError, HardwareError, InvariantError, PeerUnavailable
from topobus.domain.outcome import Reason


class Loop:
    """A loop with one boundary: says how often the work ran and what was reported."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.registry = CollectorRegistry()
        self.boundary = ObjectBoundary("pods", ControllerMetrics(self.registry).set_aside)
        self.errors = list(errors)
        self.report_errors: list[Exception] = []
        self.runs = 0
        self.reports: list[Reason] = []

    async def work(self) -> bool:
        """Fail with the next error, or be done."""
        self.runs += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return False

    async def report(self, reason: Reason) -> None:
        """Keep the report, or fail as a write may."""
        if self.report_errors:
            raise self.report_errors.pop(0)
        self.reports.append(reason)

    async def round(self, version: int = 1, key: str = "a") -> bool:
        """Run the object once."""
        return await self.boundary.run(key, version, self.work, name=f"Pod default/{key}", report=self.report)

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
async def test_boundary_sets_an_object_aside_until_it_changes_when_its_work_fails(error: Exception) -> None:
    """A failing object is reported and counted once, is left alone at the same version, and is worked on again at a newer one."""
    loop = Loop(error)

    answers = [await loop.round(), await loop.round(), await loop.round(version=2)]

    assert answers == [False, False, False]
    assert loop.runs == 2
    assert [reason.code for reason in loop.reports] == ["malformed"]
    assert loop.failures == 1
    assert loop.boundary.reason("a") is None


async def test_boundary_lets_the_neighbour_go_on_when_one_object_fails() -> None:
    """The failure of one object says nothing of another."""
    loop = Loop(TypeError("bad"))

    await loop.round(key="a")
    await loop.round(key="b")

    assert loop.runs == 2
    assert loop.boundary.reason("a") is not None
    assert loop.boundary.reason("b") is None


@pytest.mark.parametrize(
    "error",
    [PeerUnavailable("silent"), HardwareError("broken"), ExceptionGroup("both", [PeerUnavailable("silent"), HardwareError("broken")])],
    ids=lambda error: type(error).__name__,
)
async def test_boundary_asks_for_another_try_when_only_a_peer_failed(error: Exception) -> None:
    """A silent peer is not the object's fault: it is tried again, and nothing is reported or counted."""
    loop = Loop(error)

    answers = [await loop.round(), await loop.round()]

    assert answers == [True, False]
    assert loop.runs == 2
    assert (loop.reports, loop.failures) == ([], 0)


async def test_boundary_reports_again_when_the_report_met_a_silent_peer() -> None:
    """An object is set aside only when it was told so, or cannot be told at all."""
    loop = Loop(TypeError("bad"), TypeError("bad"))
    loop.report_errors = [PeerUnavailable("the write was not confirmed")]

    answers = [await loop.round(), await loop.round(), await loop.round()]

    assert answers == [True, False, False]
    assert loop.runs == 2
    assert len(loop.reports) == 1
    assert loop.failures == 1


async def test_boundary_sets_aside_when_the_report_itself_fails() -> None:
    """An object that cannot even be told what is wrong is still set aside."""
    loop = Loop(TypeError("bad"))
    loop.report_errors = [AttributeError("no status")]

    answers = [await loop.round(), await loop.round()]

    assert answers == [False, False]
    assert loop.runs == 1


async def test_boundary_lets_a_cancellation_through() -> None:
    """A stop is no failure of the object that was being worked on."""
    loop = Loop(asyncio.CancelledError())

    with pytest.raises(asyncio.CancelledError):
        await loop.round()

    assert loop.boundary.reason("a") is None


async def test_boundary_forgets_objects_that_are_gone() -> None:
    """What is kept of objects is bounded by those that there are; one that comes back is worked on anew."""
    loop = Loop(TypeError("bad"))
    await loop.round()

    loop.boundary.keep(["b"])
    await loop.round()

    assert loop.runs == 2


def test_boundary_takes_in_the_neighbours_when_one_value_cannot_be_taken_in() -> None:
    """A change that nobody can take in is counted, and the copy of everything else goes on."""
    loop = Loop()
    taken: list[str] = []

    def bad() -> None:
        raise AttributeError("'int' object has no attribute 'get'")

    answers = [
        loop.boundary.run_now("a", 1, bad, name="a"),
        loop.boundary.run_now("b", 1, lambda: taken.append("b"), name="b"),
    ]

    assert answers == [False, True]
    assert taken == ["b"]
    assert loop.failures == 1
