"""Searches one node for claims that are allocated together, for both homes, and caches the results
by the claims' shape.

Each home decides which nodes are searched and in which order: `Allocator` stand-alone,
`NodeChooser` in a cluster. A short search runs at once, a long one in a thread, so that probes and
watches never wait for it. The duration of each search is measured.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from topobus.controller.commit.refusal_backoff import RefusalBackoff
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.cluster_state import ClusterState
from topobus.controller.state.result_cache import RequestShape, ResultCache
from topobus.engine.allocation.admission import has_heavy_selector
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.suggestions import ADVICE_STEPS, would_fit
from topobus.engine.allocation.values import (
    Allocated,
    AllocationInput,
    DeviceId,
    Fault,
    GaveUp,
    Mode,
    Outcome,
)
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.scheduling.aligned_allocation import allocate_near
from topobus.engine.scheduling.closer_devices import bring_closer, has_closer, our_devices
from topobus.engine.scheduling.node_trials import (
    WantedClaim,
    aligned_claims,
    failed_node,
    is_aligned,
    nearest_miss,
    specs_of,
    within_limits,
)
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import TopobusError
from topobus.values.outcome import Reason
from topobus.values.request import PodRequest

__all__ = ["CHEAP_STEPS", "LONGEST_S", "NodeSearch"]

T = TypeVar("T")

CHEAP_STEPS = 5_000
"""Steps of one claim, or of one pod's claims, on all nodes together while cheaper ones wait: some
ten milliseconds."""
# Some ten milliseconds of search.
_QUICK_STEPS = 1000
LONGEST_S = 10.0
"""As long as kube-scheduler tries a pod. A longer search gives up, so that other claims are
searched, and the nodes left are reported as given up."""


class NodeSearch:
    """Searches nodes, one at a time."""

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        state: ClusterState,
        results: ResultCache,
        compiler: SelectorCompiler,
        metrics: ControllerMetrics,
    ) -> None:
        self._mode = settings.mode
        self._prefers_near = settings.nearness == "prefer" and settings.mode is not Mode.COMPATIBLE
        self._state = state
        self._metrics = metrics
        self._budget = settings.step_budget
        self._clock = clock
        self._compiler = compiler
        self._failed: dict[str, str] = {}
        self.results = results
        """Results of searches by the claims' shape and the node."""
        self.spent = 0
        """Steps of all searches so far: what a round may spend is measured by it, not by time."""
        self.refusals: RefusalBackoff[DeviceId] = RefusalBackoff(clock, settings.retry_s)
        """Devices that nodes refused, by the claim's key or the pod's uid."""
        self.quarantined: dict[DeviceId, str] = {}
        """Devices whose owner was deleted by force, with that owner. They are excluded until their
        node has released them."""

    async def search_cached(
        self,
        node: str,
        claims: Sequence[WantedClaim],
        shape: RequestShape,
        excluded: Mapping[DeviceId, str],
        *,
        is_cheap: bool,
    ) -> tuple[Outcome, int]:
        """Search one node, or return the cached result for claims of this shape.

        A miss comes without reasons. The result includes the steps taken now, 0 for a cached
        result.

        Shapes: shape — of claims that differ in nothing from others with the same specs.
        """
        cache_key = self.results.key_of(shape, node)
        cached = self.results.find(cache_key)
        if cached is not None:
            return cached, 0
        outcome = await self.search(node, claims, excluded, is_brief=True, is_cheap=is_cheap)
        if not (is_cheap and isinstance(outcome, GaveUp)):
            self.results.put(cache_key, outcome)
        return outcome, outcome.steps

    async def search(
        self,
        node: str,
        claims: Sequence[WantedClaim],
        excluded: Mapping[DeviceId, str],
        *,
        pod: PodRequest | None = None,
        is_brief: bool = False,
        is_cheap: bool = False,
    ) -> Outcome:
        """Search one node now, without the cache.

        An allocation that would exceed a limit of the API does not fit.

        Shapes: excluded — devices that the claims must not get now, and why; pod — the claims' pod,
        when it wishes for their alignment with it; is_brief — a miss comes without reasons;
        is_cheap — give up where more than a short search is needed.
        """
        given = self.given(node, claims, excluded)
        if not is_aligned(claims, pod):
            outcome = await self.search_given(given, is_brief=is_brief, is_cheap=is_cheap)
        elif is_cheap:
            return GaveUp(0)  # some hundred searches, place after place
        else:
            wished, view, started = aligned_claims(claims), self._state.view_of(node), self._clock.monotonic()
            near = partial(allocate_near, given, wished, view, self._compiler, pod=pod, step_budget=self._budget)
            # It ends with its current place when its caller is cancelled.
            outcome = await _in_thread(lambda is_abandoned: near(is_abandoned=is_abandoned))
            self._measure(started, outcome.steps)
        self.spent += outcome.steps
        return within_limits(node, claims, outcome)

    async def bring_closer(
        self,
        node: str,
        claims: Sequence[WantedClaim],
        excluded: Mapping[DeviceId, str],
        outcome: Allocated,
        *,
        pod: PodRequest | None = None,
    ) -> Allocated:
        """Exchange the devices found on a node for equal ones that lie closer together.

        Claims with an alignment request are left as they are.
        """
        if not self._prefers_near or not has_closer(outcome.results) or is_aligned(claims, pod):
            return outcome
        if self._state.lie_together(node, our_devices(outcome.results, node)):
            return outcome  # most are: this check costs a thousandth of what follows
        view = self._state.view_of(node)
        if view is None:
            return outcome
        started = self._clock.monotonic()
        try:
            given = self.given(node, claims, excluded)
            closer = await _in_thread(
                lambda is_abandoned: bring_closer(given, outcome, view, self._compiler, is_abandoned=is_abandoned)
            )
        except Exception as err:  # noqa: BLE001 - boundary: one node; the outcome found before is kept
            self.node_failed(node, err)
            return outcome
        self._measure(started, closer.steps - outcome.steps)
        self.spent += closer.steps - outcome.steps
        limited = within_limits(node, claims, closer)
        return limited if isinstance(limited, Allocated) else outcome

    async def search_given(self, given: AllocationInput, *, is_brief: bool, is_cheap: bool) -> Outcome:
        """Search the input that `given` collected, without the claims' alignment requests.

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
        self._measure(started, outcome.steps)
        return outcome

    async def advise(
        self,
        nodes: Sequence[str],
        outcomes: Sequence[Outcome],
        claims: Sequence[WantedClaim],
        excluded: Mapping[DeviceId, str],
        *,
        pod: PodRequest | None = None,
    ) -> tuple[Reason, ...]:
        """Name the nearest miss, and what would fit there instead.

        Claims that wish for alignment, alone or with their pod, get only the nearest miss. What
        would fit is found by a few dozen short searches in a thread.
        """

        def search(changed: AllocationInput) -> Outcome:
            return allocate(changed, self._compiler, step_budget=ADVICE_STEPS, is_brief=True)

        miss, node = nearest_miss(nodes, outcomes, claims, pod)
        if not node:
            return miss
        return (*miss, *await asyncio.to_thread(would_fit, self.given(node, claims, excluded), search))

    def given(
        self,
        node: str,
        claims: Sequence[WantedClaim],
        excluded: Mapping[DeviceId, str],
        *,
        ignoring: Collection[str] = (),
    ) -> AllocationInput:
        """Collect what a search for the claims on a node depends on.

        Shapes: ignoring — uids of claims whose intents are ignored here.
        """
        given = self._state.input_for(node, specs_of(claims), mode=self._mode, excluded=excluded, ignoring=ignoring)
        if not self.quarantined.keys() & given.usage.holders.keys():
            return given
        holders = {device: self.quarantined.get(device, holder) for device, holder in given.usage.holders.items()}
        return replace(given, usage=replace(given.usage, holders=holders))

    def node_failed(self, node: str, err: Exception) -> Fault:
        """Log and count a node whose search failed in an unforeseen way, once while the failure
        stays the same.

        Returns the fault that is reported for the node.
        """
        fault = failed_node(node, err)
        if self._failed.get(node) != fault.reason.message:
            self._failed[node] = fault.reason.message
            self._metrics.set_aside.labels("nodes").inc()
            get_logger().error(
                "node.set-aside", node=node, error=str(err), exc_info=None if isinstance(err, TopobusError) else err
            )
        return fault

    def keep(self, nodes: Collection[str]) -> None:
        """Forget the failures of nodes that are gone."""
        self._failed = {node: text for node, text in self._failed.items() if node in nodes}

    def _measure(self, started: float, steps: int) -> None:
        self._metrics.searches.observe(self._clock.monotonic() - started)
        self._metrics.steps.inc(steps)


async def _in_thread(work: Callable[[Callable[[], bool]], T]) -> T:
    """Run a search in a thread. It is given the question whether its caller was cancelled."""
    abandoned = threading.Event()
    try:
        return await asyncio.to_thread(work, abandoned.is_set)
    finally:
        abandoned.set()
