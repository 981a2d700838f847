"""Finds devices for claims of the stand-alone home that are allocated together, with or without a
pod.

It excludes devices that their node refused and quarantined devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from topobus.controller.commit.node_search import CHEAP_STEPS, LONGEST_S, NodeSearch
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.result_cache import RequestShape, ResultCache
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.admission import asks_admin, has_heavy_selector
from topobus.engine.allocation.explanations import SHOWN_NODES
from topobus.engine.allocation.values import (
    Allocated,
    DeviceId,
    Fault,
    GaveUp,
    NoFit,
    Outcome,
)
from topobus.engine.cel.seam import SelectorCompiler
from topobus.engine.claims.claim_admission import objection_to_claims
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.scheduling.aligned_allocation import read_alignment_request
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.resource import ClaimSpec, DeviceClassSpec
from topobus.process.service import Runtime
from topobus.values.dra_names import DRIVER, node_of_pool
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.outcome import Reason
from topobus.values.request import PodRequest

__all__ = ["Allocator", "Member", "member"]


# Some five milliseconds.
_WARMED_AT_ONCE = 20


class Member(NamedTuple):
    """A claim that is allocated together with others."""

    key: ObjectKey
    stored: Stored
    spec: ClaimSpec
    wishes: AlignmentRequest | None

    @property
    def claim(self) -> Claim:
        """The claim as stored."""
        return self.stored.claim


def member(key: ObjectKey, stored: Stored, classes: Mapping[str, DeviceClassSpec] | None = None) -> Member:
    """Read a claim that is to be allocated.

    Shapes: classes — by name; their alignment request counts where the claim itself has none.

    Errors: raises ContractError.
    """
    spec = stored.claim.spec
    return Member(key, stored, spec, read_alignment_request(spec, stored.shown, classes))


class Allocator(NodeSearch):
    """Searches the nodes of the stand-alone home, and caches the results by the claims' shape."""

    def __init__(
        self,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        compiler: SelectorCompiler,
        metrics: ControllerMetrics,
    ) -> None:
        results = ResultCache(state.stock, state.nodes, lambda: state.classes, compiler, settings.mode)
        super().__init__(settings, runtime.clock, state, results, compiler, metrics)
        self._state: StandaloneState = state
        self._warmed: tuple[str, ...] = ()
        self._asked: tuple[Sequence[Member], int, RequestShape | None] = (), -1, None

    async def warm(self) -> None:
        """Evaluate selectors on new nodes before a claim has to wait for that.

        Yields to other tasks between nodes, for it takes a second for some thousand nodes.
        """
        nodes = self._state.nodes()
        if nodes is self._warmed:
            return
        self._warmed = nodes
        self.keep(nodes)
        for place, node in enumerate(nodes):
            try:
                self._state.stock.table_of(node).warm()
            except Exception as err:  # noqa: BLE001 - boundary: one node; its search reports the failure
                self.node_failed(node, err)
            if place % _WARMED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def search_on(
        self, node: str, members: Sequence[Member], *, pod: PodRequest | None = None, is_cheap: bool = False
    ) -> Outcome:
        """Search one node, or return the cached result for claims of this shape.

        A miss may come without reasons (see `refresh`). What a node publishes must not affect other
        nodes: an unforeseen failure of the search is a fault of this node only, and the other nodes
        are searched.

        Shapes: pod — the claims' pod, when it wishes for their alignment with it (see `together`);
        is_cheap — give up where more than a short search is needed.
        """
        try:
            return await self._look(node, members, pod=pod, is_cheap=is_cheap)
        except (ContractError, PeerUnavailable):
            raise  # the claim's own fault, which its loop reports
        except Exception as err:  # noqa: BLE001 - boundary: one node of a search
            return self.node_failed(node, err)

    async def _look(self, node: str, members: Sequence[Member], *, pod: PodRequest | None, is_cheap: bool) -> Outcome:
        if pod is not None or not self._are_plain(members) or self._are_barred(members, node):
            return await self.search_members(node, members, pod=pod, is_cheap=is_cheap)
        # Such claims exclude no device of this node.
        outcome, _ = await self.search_cached(node, members, self._shape(members), {}, is_cheap=is_cheap)
        return outcome

    async def first(
        self, nodes: Sequence[str], members: Sequence[Member], *, is_cheap: bool = False
    ) -> tuple[str, Allocated] | list[Outcome]:
        """Find the first node that fits, or return the outcome of each node.

        A node on which claims of this shape did not fit is not searched again before something
        becomes free there. A cheap search ends at the first node on which it gives up, or when all
        nodes together took too many steps. The same claims must then be searched in full, for a
        node before the one that fits may fit as well.

        Shapes: nodes — in order, by name when there are several; result — with the node, or one
        outcome per node, only one for a fault on all nodes.
        """
        is_everywhere = nodes is self._state.nodes() and self._are_plain(members)
        shape = self._shape(members) if is_everywhere else None
        outcomes: dict[str, Outcome] = {}
        end = self._clock.monotonic() + LONGEST_S
        spent = self.spent
        for node in nodes if shape is None else self.results.open_nodes(shape):
            outcome = (
                await self.search_on(node, members, is_cheap=is_cheap) if self._clock.monotonic() < end else GaveUp(0)
            )
            if isinstance(outcome, Allocated):
                return node, await self.bring_closer(node, members, self._excluded(members), outcome)
            if is_cheap and (isinstance(outcome, GaveUp) or self.spent - spent > CHEAP_STEPS):
                return [GaveUp(self.spent - spent)]
            if isinstance(outcome, Fault) and not outcome.is_local:
                return [outcome]  # a fault on every node: the others would only repeat it
            outcomes[node] = outcome
            # A miss because this node refused one of their devices does not apply to other claims
            # of this shape.
            if shape is not None and isinstance(outcome, NoFit) and not self._are_barred(members, node):
                self.results.close(shape, node)
        return [outcomes.get(node, NoFit((), 0)) for node in nodes]

    def _shape(self, members: Sequence[Member]) -> RequestShape:
        """Return the shape of the request. It is computed once, as the same claims are searched on
        node after node.
        """
        asked, epoch, request_shape = self._asked
        if request_shape is None or asked is not members or epoch != self._state.class_epoch:
            request_shape = self.results.shape([each_member.spec for each_member in members])
            self._asked = members, self._state.class_epoch, request_shape
        return request_shape

    def _wrong(self, members: Sequence[Member]) -> Fault | None:
        """Return the fault for which an API server would have refused these claims: admin access
        outside of a namespace for it, or a selector that may cost too much.
        """
        return objection_to_claims(
            [(each_member.stored.claim, each_member.spec) for each_member in members],
            self._state.labels_of,
            self._compiler,
        )

    def _are_plain(self, members: Sequence[Member]) -> bool:
        """Say whether these claims differ in nothing from others with the same specs, and can be
        searched at once.
        """
        return self._wrong(members) is None and not any(
            each_member.wishes is not None
            or asks_admin(each_member.spec)
            or has_heavy_selector(each_member.spec, self._compiler)
            or not self._state.stock.is_new(each_member.key, each_member.stored.claim.owner)
            for each_member in members
        )

    def _are_barred(self, members: Sequence[Member], node: str) -> bool:
        """Say whether a node may have devices that are excluded for these claims: our own devices
        are on the node that names their pool, others' may be on any.

        One refused device must not cause a new search of all other nodes: two replicas that fill a
        fleet choose the same node now and then.
        """
        return any(
            device.driver != DRIVER or node_of_pool(device.pool) == node
            for each_member in members
            for device in self.refusals.refused(each_member.key)
        )

    async def search_members(
        self, node: str, members: Sequence[Member], *, pod: PodRequest | None = None, is_cheap: bool = False
    ) -> Outcome:
        """Search one node now, without the cache."""
        return self._wrong(members) or await self.search(
            node, members, self._excluded(members), pod=pod, is_cheap=is_cheap
        )

    async def refresh(
        self, nodes: Sequence[str], outcomes: list[Outcome], members: Sequence[Member], *, pod: PodRequest | None = None
    ) -> None:
        """Search the first nodes that miss again: a cached miss may be an old one of another claim,
        and the reasons shown to users must be current.
        """
        for index, node in enumerate(nodes[: min(SHOWN_NODES, len(outcomes))]):
            if isinstance(outcomes[index], NoFit):
                try:
                    outcomes[index] = await self.search_members(node, members, pod=pod)
                except (ContractError, PeerUnavailable):
                    raise
                except Exception as err:  # noqa: BLE001 - boundary: one node of a search
                    outcomes[index] = self.node_failed(node, err)

    async def advise_members(
        self, nodes: Sequence[str], outcomes: Sequence[Outcome], members: Sequence[Member]
    ) -> tuple[Reason, ...]:
        """Name the nearest miss, and what would fit there instead."""
        return await self.advise(nodes, outcomes, members, self._excluded(members))

    async def brought_closer(
        self, node: str, members: Sequence[Member], outcome: Allocated, *, pod: PodRequest | None
    ) -> Allocated:
        """Exchange the devices found on a node for equal ones that lie closer together, where there
        are some.
        """
        return await self.bring_closer(node, members, self._excluded(members), outcome, pod=pod)

    def _excluded(self, members: Sequence[Member]) -> dict[DeviceId, str]:
        """Map the devices that nodes lately refused to one of the claims to the reasons."""
        return {
            device: why for each_member in members for device, why in self.refusals.refused(each_member.key).items()
        }
