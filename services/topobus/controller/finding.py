"""Finds devices on one node for claims that are served together; claims on their own and those of pods go the same way.

Flows in: the world, claims as stored, devices that must not be given now (refused by their node, or quarantined). Flows out: the search's outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from topobus.contracts.codec import encode
from topobus.contracts.kubernetes import limits
from topobus.contracts.kubernetes.objects import name_of
from topobus.contracts.kubernetes.resource import ClaimSpec
from topobus.contracts.kubernetes.wishes import Wishes
from topobus.controller.config import ControllerSettings
from topobus.controller.core import claims
from topobus.controller.core.answers import SHOWN_NODES
from topobus.controller.core.misses import KnownMisses
from topobus.controller.core.nearness import Wished, read_wishes
from topobus.controller.core.refusals import Refusals
from topobus.controller.core.selectors import SelectorCompiler
from topobus.controller.core.values import Allocated, AllocationInput, DeviceId, Fault, Mode, NoFit, Outcome
from topobus.controller.core.world import ObjectKey, Stored, World
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.searching import Searcher
from topobus.domain.outcome import Reason
from topobus.runtime.service import Runtime

__all__ = ["Finder", "Member", "member"]


class Member(NamedTuple):
    """A claim that is allocated together with others."""

    key: ObjectKey
    stored: Stored
    spec: ClaimSpec
    wishes: Wishes | None


def member(key: ObjectKey, stored: Stored) -> Member:
    """Read a claim that is to be allocated.

    Errors: raises ContractError.
    """
    spec = claims.read_claim(stored.value)
    return Member(key, stored, spec, read_wishes(spec, name_of(stored.value)))


class Finder:
    """Looks at nodes, and remembers where the like of a claim does not fit."""

    def __init__(
        self, settings: ControllerSettings, runtime: Runtime, world: World, compiler: SelectorCompiler, metrics: ControllerMetrics
    ) -> None:
        self._settings = settings
        self._world = world
        self._searcher = Searcher(settings, runtime.clock, compiler, metrics)
        self._misses = KnownMisses()
        self.refusals: Refusals[DeviceId] = Refusals(settings.retry_s)
        self.quarantined: dict[DeviceId, str] = {}
        """Devices whose owner was deleted by force, and who that was: held until their node has let go."""

    async def look(self, node: str, members: Sequence[Member]) -> Outcome:
        """Search one node, unless the like of these claims is known not to fit there."""
        is_plain = self._settings.mode is Mode.CORRECTED and not any(
            self.refusals.refused(one.key) or self._world.holds_devices(one.stored.value) or one.wishes is not None for one in members
        )
        asked = tuple(encode(one.spec) for one in members)
        freedom = self._world.freedom_of(node)
        known = self._misses.find(asked, node, freedom) if is_plain else None
        if known is not None:
            return known
        outcome = await self.search(node, members)
        if is_plain and isinstance(outcome, NoFit):
            self._misses.remember(asked, node, freedom, outcome)
        return outcome

    async def search(self, node: str, members: Sequence[Member]) -> Outcome:
        """Search one node now, whatever is remembered of it; what would break a limit of the API is no fit."""
        given = self._input(node, members)
        if all(one.wishes is None for one in members):
            outcome = await self._searcher.search(given)
        else:
            wished = [Wished(one.stored.value, one.wishes) for one in members]
            outcome = await self._searcher.search_near(given, wished, self._world.view_of(node))
        if isinstance(outcome, Allocated):
            problem = next((str(one) for result in outcome.results for one in limits.check_allocation(result)), None)
            if problem is not None:
                return Fault(Reason(code="result-too-large", message=f"node {node}: {problem}"), outcome.steps)
        return outcome

    async def refresh(self, nodes: Sequence[str], outcomes: list[Outcome], members: Sequence[Member]) -> None:
        """Look again at the first nodes that miss: what is remembered may be another claim's miss, of some time ago, and people are told how it is now."""
        for index, node in enumerate(nodes[: min(SHOWN_NODES, len(outcomes))]):
            if isinstance(outcomes[index], NoFit):
                outcomes[index] = await self.search(node, members)

    def _input(self, node: str, members: Sequence[Member]) -> AllocationInput:
        excluded = {device: why for one in members for device, why in self.refusals.refused(one.key).items()}
        wanted = [(one.stored.value, one.spec) for one in members]
        given = self._world.input_for(node, wanted, mode=self._settings.mode, excluded=excluded)
        if not self.quarantined.keys() & given.usage.holders.keys():
            return given
        holders = {device: self.quarantined.get(device, holder) for device, holder in given.usage.holders.items()}
        return replace(given, usage=replace(given.usage, holders=holders))
