"""Runs searches: a short one at once, a long one in a thread, so that probes and watches never wait
for it.

A search for claims with an alignment request also needs the node. The duration of each search is
measured.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.engine.allocation.admission import has_heavy_selector
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.suggestions import ADVICE_STEPS, would_fit
from topobus.engine.allocation.values import Allocated, AllocationInput, GaveUp, Outcome
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.scheduling.aligned_allocation import AlignedClaims, allocate_near
from topobus.engine.scheduling.closer_devices import bring_closer
from topobus.process.clock import Clock
from topobus.values.outcome import Reason
from topobus.values.request import PodRequest
from topobus.values.view import NodeView

__all__ = ["CHEAP_STEPS", "LONGEST_S", "AllocationRunner"]

T = TypeVar("T")

CHEAP_STEPS = 5_000
"""Steps of one claim, or of one pod's claims, on all nodes together while cheaper ones wait: some
ten milliseconds."""
# Some ten milliseconds of search.
_QUICK_STEPS = 1000
LONGEST_S = 10.0
"""As long as kube-scheduler tries a pod. A longer search gives up, so that other claims are
searched, and the nodes left are reported as given up."""


class AllocationRunner:
    """Runs searches."""

    def __init__(
        self, settings: ControllerSettings, clock: Clock, compiler: SelectorCompiler, metrics: ControllerMetrics
    ) -> None:
        self._budget = settings.step_budget
        self._clock = clock
        self._compiler = compiler
        self._metrics = metrics

    async def search(self, given: AllocationInput, *, is_brief: bool = False, is_cheap: bool = False) -> Outcome:
        """Search for claims without an alignment request. A brief miss comes without reasons.

        The search ends when its caller is cancelled, so that a stop is not delayed. A cheap search
        gives up where other claims would wait: after a thousand steps, and before selectors that
        are heavy.
        """
        started = self._clock.monotonic()
        # Most searches take less time than passing them to a thread. A long one must not keep
        # probes and watches waiting.
        is_heavy = any(has_heavy_selector(claim.spec, self._compiler) for claim in given.claims)
        quick = 0 if is_heavy else min(_QUICK_STEPS, self._budget)
        outcome = allocate(given, self._compiler, step_budget=quick, is_brief=is_brief) if quick else GaveUp(0)
        if isinstance(outcome, GaveUp) and self._budget > quick and not is_cheap:
            search = partial(allocate, given, self._compiler, step_budget=self._budget, is_brief=is_brief)
            end = started + LONGEST_S
            outcome = await _in_thread(
                lambda is_abandoned: search(is_abandoned=lambda: is_abandoned() or self._clock.monotonic() > end)
            )
        return self._measured(outcome, started)

    async def search_near(
        self,
        given: AllocationInput,
        wished: Sequence[AlignedClaims],
        view: NodeView | None,
        *,
        pod: PodRequest | None,
    ) -> Outcome:
        """Search place after place.

        When its caller is cancelled, the search ends with its current place, so that a stop is not
        delayed.
        """
        started = self._clock.monotonic()
        near = partial(allocate_near, given, wished, view, self._compiler, pod=pod, step_budget=self._budget)
        outcome = await _in_thread(lambda is_abandoned: near(is_abandoned=is_abandoned))
        return self._measured(outcome, started)

    async def bring_closer(self, given: AllocationInput, outcome: Allocated, view: NodeView) -> Allocated:
        """Exchange the devices of an outcome for equal ones that lie closer together, where there
        are some.
        """
        started = self._clock.monotonic()
        closer = await _in_thread(
            lambda is_abandoned: bring_closer(given, outcome, view, self._compiler, is_abandoned=is_abandoned)
        )
        self._metrics.searches.observe(self._clock.monotonic() - started)
        self._metrics.steps.inc(closer.steps - outcome.steps)
        return closer

    async def advise(self, given: AllocationInput) -> tuple[Reason, ...]:
        """Find out what would fit, by a few dozen short searches in a thread."""

        def search(changed: AllocationInput) -> Outcome:
            return allocate(changed, self._compiler, step_budget=ADVICE_STEPS, is_brief=True)

        return await asyncio.to_thread(would_fit, given, search)

    def _measured(self, outcome: Outcome, started: float) -> Outcome:
        self._metrics.searches.observe(self._clock.monotonic() - started)
        self._metrics.steps.inc(outcome.steps)
        return outcome


async def _in_thread(work: Callable[[Callable[[], bool]], T]) -> T:
    """Run a search in a thread. It is given the question whether its caller was cancelled."""
    abandoned = threading.Event()
    try:
        return await asyncio.to_thread(work, abandoned.is_set)
    finally:
        abandoned.set()
