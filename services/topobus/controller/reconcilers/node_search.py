"""Searches one node for devices of claims that are served together, for both homes, and remembers what the like of the claims got there.

Flows in: a node, claims with what they wish, devices that must not be given now. Flows out: the search's outcome, or what of the node keeps it from being searched. Which
nodes are searched, and in which order, is each home's own: `Allocator` stand-alone, `NodeChooser` in a cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from topobus.cel.seam import SelectorCompiler
from topobus.controller.allocation.suggestions import nearest
from topobus.controller.allocation.values import (
    Allocated,
    AllocationInput,
    DeviceId,
    Fault,
    GaveUp,
    Outcome,
)
from topobus.controller.claims.claim_admission import objection_to_results
from topobus.controller.claims.objects import Claim
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.allocation_runner import AllocationRunner
from topobus.controller.scheduling.aligned_allocation import AlignedClaims
from topobus.controller.state.cluster_state import ClusterState
from topobus.controller.state.result_cache import RequestShape, ResultCache
from topobus.domain.errors import TopobusError
from topobus.domain.outcome import Reason
from topobus.domain.request import PodRequest
from topobus.kubernetes.api.alignment_request import AlignmentRequest
from topobus.kubernetes.api.resource import ClaimSpec
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["NodeSearch", "WantedClaim"]

# An error's own words, as far as a condition shows them.
_MAX_ERROR = 500


class WantedClaim(Protocol):
    """A claim that is to be allocated, alone or with others."""

    @property
    def claim(self) -> Claim:
        """The claim as stored."""
        ...

    @property
    def spec(self) -> ClaimSpec:
        """What it asks for."""
        ...

    @property
    def wishes(self) -> AlignmentRequest | None:
        """What it wishes of its alignment; None for nothing."""
        ...


class NodeSearch:
    """Searches nodes, one at a time."""

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        world: ClusterState,
        results: ResultCache,
        compiler: SelectorCompiler,
        metrics: ControllerMetrics,
    ) -> None:
        self._mode = settings.mode
        self._state = world
        self._metrics = metrics
        self._runner = AllocationRunner(settings, clock, compiler, metrics)
        self._failed: dict[str, str] = {}
        self.results = results
        """What the like of a claim got on a node."""
        self.spent = 0
        """Steps of all searches so far: what a round may spend is measured by it, not by time."""
        self.quarantined: dict[DeviceId, str] = {}
        """Devices whose owner was deleted by force, and who that was: held until their node has let go."""

    async def recall_or_search(
        self, node: str, claims: Sequence[WantedClaim], question: RequestShape, excluded: Mapping[DeviceId, str], *, is_cheap: bool
    ) -> tuple[Outcome, int]:
        """Search one node, unless it is known what the like of these claims gets there; a miss comes without reasons. Gives the steps that it took now as well.

        Shapes: question — what is asked, of claims that nothing tells from others with the same specs.
        """
        ticket = self.results.ticket(question, node)
        known = self.results.recall(ticket)
        if known is not None:
            return known, 0
        outcome = await self.search(node, claims, excluded, is_brief=True, is_cheap=is_cheap)
        if not (is_cheap and isinstance(outcome, GaveUp)):
            self.results.remember(ticket, outcome)
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
        """Search one node now, whatever is remembered of it; what would break a limit of the API is no fit.

        Shapes: excluded — devices that the claims must not get now, and why; pod — the claims' pod, when it wishes for their alignment with it; is_brief — a miss comes
        without reasons; is_cheap — give up where more than a short search is needed.
        """
        given = self.given(node, claims, excluded)
        if pod is None and all(wanted.wishes is None for wanted in claims):
            outcome = await self._runner.search(given, is_brief=is_brief, is_cheap=is_cheap)
        elif is_cheap:
            return GaveUp(0)  # some hundred searches, place after place
        else:
            wished = [AlignedClaims(wanted.claim, wanted.wishes) for wanted in claims]
            outcome = await self._runner.search_near(given, wished, self._state.view_of(node), pod=pod)
        self.spent += outcome.steps
        if isinstance(outcome, Allocated):
            specs = [(wanted.claim, wanted.spec) for wanted in claims]
            return objection_to_results(node, specs, outcome.results, steps=outcome.steps) or outcome
        return outcome

    async def search_only(self, given: AllocationInput, *, is_cheap: bool) -> Outcome:
        """Search what was collected by `given`, and say only whether something fits."""
        return await self._runner.search(given, is_brief=True, is_cheap=is_cheap)

    async def advise(
        self,
        nodes: Sequence[str],
        outcomes: Sequence[Outcome],
        claims: Sequence[WantedClaim],
        excluded: Mapping[DeviceId, str],
        *,
        is_aligned: bool = False,
    ) -> tuple[Reason, ...]:
        """Name the nearest miss, and what would fit there instead; claims with wishes of their alignment are only told the first.

        Shapes: is_aligned — the claims' pod wishes for their alignment with it.
        """
        found = nearest(nodes, outcomes)
        if found is None:
            return ()
        node, reason = found
        if is_aligned or any(wanted.wishes is not None for wanted in claims):
            return (reason,)
        return reason, *await self._runner.advise(self.given(node, claims, excluded))

    def given(
        self, node: str, claims: Sequence[WantedClaim], excluded: Mapping[DeviceId, str], *, ignoring: Collection[str] = ()
    ) -> AllocationInput:
        """Collect what a search for the claims on a node depends on.

        Shapes: ignoring — uids of claims whose intents count for nothing here.
        """
        specs = [(wanted.claim, wanted.spec) for wanted in claims]
        given = self._state.input_for(node, specs, mode=self._mode, excluded=excluded, ignoring=ignoring)
        if not self.quarantined.keys() & given.usage.holders.keys():
            return given
        holders = {device: self.quarantined.get(device, holder) for device, holder in given.usage.holders.items()}
        return replace(given, usage=replace(given.usage, holders=holders))

    def node_failed(self, node: str, err: Exception) -> Fault:
        """Log and count a node whose search failed in a way that nobody thought of, once as long as it stays the same; gives what is told of the node."""
        text = str(err) if isinstance(err, TopobusError) else f"{type(err).__name__}: {err}"
        if self._failed.get(node) != text:
            self._failed[node] = text
            self._metrics.set_aside.labels("nodes").inc()
            get_logger().error("node.set-aside", node=node, error=text, exc_info=None if isinstance(err, TopobusError) else err)
        message = f"node {node}: what it says of itself cannot be worked with: {text[:_MAX_ERROR]}"
        return Fault(Reason(code="node-failed", message=message, facts={"node": node}), 0, is_local=True)

    def keep(self, nodes: Collection[str]) -> None:
        """Forget the failures of nodes that are gone."""
        self._failed = {node: text for node, text in self._failed.items() if node in nodes}
