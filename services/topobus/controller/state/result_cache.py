"""Caches results of searches by kind of node, and the nodes worth trying for a request.

Claims of one template differ only in their names, and so do most nodes. Results are cached by
(fingerprint of what the claim can observe of the node, devices in use). The fingerprint is
`NodeTable.fingerprint`. Another node with the same key gets the cached result with its own device
names substituted. A node on which a request did not fit is skipped until a device becomes free
there.

Misses are cached without their reasons, because reasons name devices. A caller that needs the
reasons searches again.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from topobus.controller.state.free_devices import FreeDevices, Mark
from topobus.engine.allocation.bitset_allocator import BitsetPlan, make_bitset_plan
from topobus.engine.allocation.node_table import NodeTable
from topobus.engine.allocation.values import (
    Allocated,
    DeviceId,
    GaveUp,
    Mode,
    NoFit,
    Outcome,
)
from topobus.engine.cel.seam import Reads, SelectorCompiler, SelectorError
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    DeviceClassSpec,
    ExactRequest,
    NodeRequirement,
    NodeSelector,
    NodeSelectorTerm,
    SubRequest,
)
from topobus.formats.messages.codec import encode

__all__ = ["CacheKey", "RequestShape", "ResultCache"]

# Different requests remembered. Beyond that all are dropped and searched again. Each keeps the list
# of its nodes: 512 of 5,000 nodes are 20 MB.
_MOST_SHAPES = 512
# Results remembered, some 500 bytes each.
_MOST_RESULTS = 100_000


@dataclass(eq=False)
class _Frontier:
    """The nodes that are worth trying, in order."""

    mark: Mark = (0, -1)
    nodes: tuple[str, ...] = ()
    open: list[str] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class RequestShape:
    """The specs of claims to be allocated together, without their names: claims with equal specs
    share one shape.
    """

    number: int
    reads: tuple[Reads, ...] | None
    """What their selectors read. None when that is unknown: then no result is shared between
    nodes."""
    attributes: tuple[str, ...]
    """What their constraints compare."""
    specs: tuple[ClaimSpec, ...] = ()
    plans: dict[int, BitsetPlan | None] = field(default_factory=dict)
    """By kind of node. None where a search is needed."""
    samples: list[Allocated] = field(default_factory=list)
    """Any one allocation: where the bit masks choose the devices, the rest of the result is as in
    this one."""
    frontier: _Frontier = field(default_factory=_Frontier)


@dataclass(frozen=True, eq=False)
class CacheKey:
    """The key of a result: a request shape on one node in its present state."""

    table: NodeTable
    key: Hashable = None
    """None when the result holds for this node alone."""
    shape: RequestShape | None = None
    plan: BitsetPlan | None = None
    taken: int = 0


@dataclass(frozen=True, eq=False)
class _CachedResult:
    outcome: Allocated | NoFit | GaveUp
    places: tuple[tuple[int, ...], ...] = ()
    """For each claim, the places of its devices in the node's table."""


class ResultCache:
    """Caches results for one stock of devices and one mode. It decides nothing.

    Args: nodes — all nodes by name, the same tuple while they are the same; classes — all classes
    as they are now.
    """

    def __init__(
        self,
        stock: FreeDevices,
        nodes: Callable[[], tuple[str, ...]],
        classes: Callable[[], Mapping[str, DeviceClassSpec]],
        compiler: SelectorCompiler,
        mode: Mode,
    ) -> None:
        self._stock = stock
        self._nodes = nodes
        self._classes = classes
        self._compiler = compiler
        self._mode = mode
        self._count = 0
        self._shapes: dict[bytes, RequestShape] = {}
        self._results: dict[Hashable, _CachedResult] = {}

    def shape(self, specs: Sequence[ClaimSpec]) -> RequestShape:
        """Return the shape of these specs.

        The same object for equal specs while their classes are the same.
        """
        classes = self._classes()
        wanted = [
            other_request
            for spec in specs
            for request in spec.devices.requests
            for other_request in (request.exactly, *request.first_available)
            if other_request
        ]
        asked = encode((specs, [classes.get(request.device_class_name) for request in wanted]))
        request_shape = self._shapes.get(asked)
        if request_shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
                self._results.clear()
            attributes = {
                name
                for spec in specs
                for constraint in spec.devices.constraints
                for name in (constraint.match_attribute, constraint.distinct_attribute)
                if name is not None
            }
            self._count += 1
            request_shape = self._shapes[asked] = RequestShape(
                self._count, self._reads(wanted, classes), tuple(sorted(attributes)), tuple(specs)
            )
        return request_shape

    def key_of(self, shape: RequestShape, node: str) -> CacheKey:
        """Build the cache key of a shape on a node in its present state.

        Errors: raises ValueError for a slice with an invalid amount, as a search would.
        """
        table = self._stock.table_of(node)
        if shape.reads is None or not table.is_own:
            return CacheKey(table)
        fingerprint, state = table.fingerprint(shape.reads, shape.attributes), self._stock.state_of(node)
        if fingerprint not in shape.plans:
            shape.plans[fingerprint] = make_bitset_plan(table, shape.specs, self._classes(), self._compiler, self._mode)
        return CacheKey(table, (shape.number, fingerprint, state), shape, shape.plans[fingerprint], state.taken)

    def find(self, cache_key: CacheKey) -> Outcome | None:
        """Return the cached result with this node's device names. None when there is none."""
        if cache_key.plan is not None and cache_key.shape is not None:
            places = cache_key.plan.solve(cache_key.taken)
            if places is None:
                return NoFit((), 0)
            if cache_key.shape.samples:
                return _placed(cache_key.shape.samples[0], places, cache_key.table)
        cached_result = self._results.get(cache_key.key) if cache_key.key is not None else None
        if cached_result is None or not isinstance(cached_result.outcome, Allocated):
            return cached_result.outcome if cached_result is not None else None
        return _placed(cached_result.outcome, cached_result.places, cache_key.table)

    def put(self, cache_key: CacheKey, outcome: Outcome) -> None:
        """Cache a result for all nodes with the same key."""
        if cache_key.key is None:
            return
        if len(self._results) >= _MOST_RESULTS:
            self._results.clear()
        if isinstance(outcome, Allocated):
            table = cache_key.table
            ids = [[DeviceId.of(granted) for granted in result.devices.results] for result in outcome.results]
            self._results[cache_key.key] = _CachedResult(
                outcome, tuple([tuple([table.places[device_id] for device_id in device_ids]) for device_ids in ids])
            )
            if cache_key.plan is not None and cache_key.shape is not None and not cache_key.shape.samples:
                cache_key.shape.samples.append(outcome)
        elif isinstance(outcome, NoFit):
            self._results[cache_key.key] = _CachedResult(NoFit((), outcome.steps))
        elif isinstance(outcome, GaveUp):
            self._results[cache_key.key] = _CachedResult(outcome)

    def get_or_search(self, shape: RequestShape, node: str, search: Callable[[], Outcome]) -> Outcome:
        """Return the cached result, or search and cache it."""
        cache_key = self.key_of(shape, node)
        outcome = self.find(cache_key)
        if outcome is None:
            outcome = search()
            self.put(cache_key, outcome)
        return outcome

    def open_nodes(self, shape: RequestShape) -> Iterator[str]:
        """Iterate over the nodes worth trying for a shape, by name. `close` may be called for the
        current one.

        Cost: O(nodes that changed since the last walk), not O(nodes).
        """
        frontier = shape.frontier
        self._refresh(frontier)
        place = 0
        while place < len(frontier.open):
            node = frontier.open[place]
            yield node
            place = bisect_right(frontier.open, node)

    def close(self, shape: RequestShape, node: str) -> None:
        """Leave a node out until something becomes free there: a request that does not fit will not
        fit when more is taken.

        In mode `compatible` upstream's defects may make it fit then, so any change opens it.
        """
        frontier = shape.frontier
        place = bisect_right(frontier.open, node) - 1
        if place >= 0 and frontier.open[place] == node:
            del frontier.open[place]
            frontier.closed.add(node)

    def _refresh(self, frontier: _Frontier) -> None:
        mark, changed = self._stock.changes_since(frontier.mark)
        nodes = self._nodes()
        frontier.mark = mark
        for node, is_freed in changed or ():
            if node in frontier.closed and (is_freed or self._mode is Mode.COMPATIBLE):
                frontier.closed.remove(node)
                insort(frontier.open, node)
        if changed is None:
            frontier.closed.clear()
        if changed is None or nodes is not frontier.nodes:
            frontier.nodes = nodes
            frontier.open[:] = [node for node in nodes if node not in frontier.closed]

    def _reads(
        self, wanted: Sequence[ExactRequest | SubRequest], classes: Mapping[str, DeviceClassSpec]
    ) -> tuple[Reads, ...] | None:
        """Collect what all selectors read."""
        reads: set[Reads] = set()
        for expression in {expression for request in wanted for expression in _expressions(request, classes)}:
            selector = self._compiler.compile(expression)
            if isinstance(selector, SelectorError) or selector.reads is None:
                return None
            reads.update(selector.reads)
        return tuple(sorted(reads, key=str))


def _expressions(request: ExactRequest | SubRequest, classes: Mapping[str, DeviceClassSpec]) -> list[str]:
    device_class = classes.get(request.device_class_name)
    selectors = (*(device_class.selectors if device_class is not None else ()), *request.selectors)
    return [selector.cel.expression if selector.cel is not None else "" for selector in selectors]


def _placed(cached: Allocated, places: Sequence[tuple[int, ...]], table: NodeTable) -> Allocated:
    """Return an allocation with each claim's devices taken from these places of a node."""
    return Allocated(
        tuple(
            [_renamed(result, claim_places, table) for result, claim_places in zip(cached.results, places, strict=True)]
        ),
        cached.steps,
    )


def _renamed(result: AllocationResult, places: tuple[int, ...], table: NodeTable) -> AllocationResult:
    """Put a node's own names into an allocation that was found on an equal node."""
    devices = []
    for granted, place in zip(result.devices.results, places, strict=True):
        device = table.candidates[place].id
        devices.append(structs.replace(granted, driver=device.driver, pool=device.pool, device=device.device))
    # All devices are the node's own, so the allocation names only the node. Without a device it
    # names no node.
    only = NodeRequirement(key="metadata.name", operator="In", values=(table.node.name,))
    selector = (
        NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(only,)),))
        if result.node_selector is not None
        else None
    )
    return structs.replace(
        result, devices=structs.replace(result.devices, results=tuple(devices)), node_selector=selector
    )
