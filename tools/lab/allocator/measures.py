"""The measurements of the allocator: fills a controller state with the objects of a case and
allocates claims as the controller does.

A figure includes reading the claim, the search on each node that is tried, writing the allocation
into the claim's status, and the update of the state for the new claim. It excludes writes to a
store and requests to the node (`python -m lab.bench fleet` includes these). Times are processor
times of this process, so other load on the machine changes them little.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from lab.allocator import cases
from lab.allocator.cases import Cluster, Puzzle
from topobus.controller.state.result_cache import ResultCache
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation.pools import Slice
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import Allocated, AllocationInput, ClaimToAllocate, Mode, Outcome, node_of
from topobus.engine.cel.selector import CelCompiler
from topobus.engine.claims.attempts import Attempt, with_attempt
from topobus.engine.claims.lifecycle import with_allocation
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
    DevicesAllocated,
    GrantedDevice,
    SliceSpec,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.machine import Machine

__all__ = ["Bench", "Filled", "Solved", "fill", "median_ms", "solve"]

_TIME = "2026-01-01T00:00:00Z"


class Filled(NamedTuple):
    """How a cluster was filled."""

    claims: int
    seconds: float
    tenths: tuple[float, ...]
    """Claims a second in each tenth of the way."""
    is_full: bool

    @property
    def rate(self) -> float:
        """Claims a second."""
        return self.claims / self.seconds


class Solved(NamedTuple):
    """The result of a puzzle."""

    outcome: str
    steps: int
    elapsed_ms: float


class Bench:
    """A controller's state, with what the controller keeps beside it."""

    def __init__(self, cluster: Cluster, mode: Mode = Mode.CORRECTED) -> None:
        gc.collect()  # garbage of the case before must not cost time in this one
        self.cluster = cluster
        self.mode = mode
        self.compiler = CelCompiler()
        self.state = StandaloneState()
        self.judgements = ResultCache(
            self.state.stock, self.state.nodes, lambda: self.state.classes, self.compiler, mode
        )
        self._revision = 0
        self._put(cases.device_class())
        for index in range(cluster.nodes):
            self.state.put_machine(Machine(node=cases.node_name(index), numa_nodes=(), cpus=()))
            for resource_slice in cases.slices(cluster, index):
                self._put(resource_slice)
        if cluster.taken:
            for index in range(cluster.nodes):
                self._put(_holder(cluster, index))

    def judge_all(self, raw: dict[str, Any], *, is_shared: bool = True) -> list[Outcome]:
        """Search every node for a claim, as scheduling does."""
        claim = Claim(_object(raw))
        spec = claim.spec
        request_shape = self.judgements.shape([spec])
        nodes = self.state.nodes()
        if is_shared:
            return [
                self.judgements.get_or_search(request_shape, node, partial(self._search, node, claim, spec))
                for node in nodes
            ]
        return [self._search(node, claim, spec) for node in nodes]

    def warm(self) -> None:
        """Do the controller's work at its start."""
        for node in self.state.nodes():
            self.state.stock.table_of(node).warm()

    def warming_ms(self) -> float:
        """Measure the time of that."""
        return median_ms(lambda _: self.warm(), rounds=1)

    def judging_ms(self, make: Callable[[int], dict[str, Any]], *, rounds: int, is_shared: bool = True) -> float:
        """Measure the time of searching every node for claims, the median of several."""
        return median_ms(lambda number: self.judge_all(make(number), is_shared=is_shared), rounds=rounds)

    def place(self, raw: dict[str, Any]) -> bool:
        """Allocate a claim on the first node where it fits, and record it."""
        claim = Claim(_object(raw))
        spec = claim.spec
        request_shape = self.judgements.shape([spec])
        for node in self.judgements.open_nodes(request_shape):
            outcome = self.judgements.get_or_search(request_shape, node, partial(self._search, node, claim, spec))
            if isinstance(outcome, Allocated):
                # Both writes of the controller: the attempt, then the status.
                attempted = with_attempt(claim.object, Attempt(number=1, node=node, allocation=outcome.results[0]))
                self._store(attempted)
                self._store(with_allocation(attempted, outcome.results[0], now=_TIME))
                return True
            self.judgements.close(request_shape, node)
        return False

    def _search(self, node: str, claim: Claim, spec: ClaimSpec) -> Outcome:
        return allocate(self.state.input_for(node, [(claim, spec)], mode=self.mode), self.compiler, is_brief=True)

    def _put(self, raw: dict[str, Any]) -> None:
        self._store(_object(raw))

    def _store(self, api_object: ApiObject) -> None:
        self._revision += 1
        self.state.put_object(ObjectKey(**object_parts(api_object)), Stored(self._revision, api_object))


def fill(bench: Bench, claim: Callable[[int], dict[str, Any]], *, most: int) -> Filled:
    """Allocate claims in a cluster one after the other until one fits nowhere, or until there are
    enough.
    """
    raws = [claim(number) for number in range(most)]
    done, tenths = 0, []
    started = last = time.process_time()
    is_full = False
    for number, raw in enumerate(raws, start=1):
        if not bench.place(raw):
            is_full = True
            break
        done = number
        if number % max(most // 10, 1) == 0:
            now = time.process_time()
            tenths.append(max(most // 10, 1) / (now - last))
            last = now
    return Filled(done, time.process_time() - started, tuple(tenths), is_full)


def median_ms(run: Callable[[int], object], *, rounds: int) -> float:
    """Measure the median time of a call, which gets its number, over several calls."""
    spent = []
    for number in range(rounds):
        started = time.process_time()
        run(number)
        spent.append((time.process_time() - started) * 1000)
    return statistics.median(spent)


def solve(puzzle: Puzzle, *, mode: Mode, step_budget: int, is_clever: bool = True) -> Solved:
    """Search for one puzzle."""
    node = cases.node_name(0)
    slices = [
        Slice(raw["metadata"]["name"], read_as(raw["spec"], SliceSpec, where="slice"))
        for raw in cases.puzzle_slices(puzzle, node)
    ]
    claims = [
        ClaimToAllocate(
            f"bench/{index}", read_as(spec, ClaimSpec, where="claim"), is_one_of_several=len(puzzle.claims) > 1
        )
        for index, spec in enumerate(puzzle.claims)
    ]
    bench = Bench(Cluster(nodes=0))
    given = AllocationInput(node_of(node), tuple(claims), bench.state.classes, tuple(slices), mode=mode)
    started = time.process_time()
    outcome = allocate(given, bench.compiler, step_budget=step_budget, is_clever=is_clever, is_brief=True)
    return Solved(type(outcome).__name__, outcome.steps, (time.process_time() - started) * 1000)


def _object(raw: dict[str, Any]) -> ApiObject:
    return decode(encode(raw), ApiObject, where="bench")


def _holder(cluster: Cluster, index: int) -> dict[str, Any]:
    """Make the claim that holds what is taken on a node already."""
    node = cases.node_name(index)
    devices = tuple(
        GrantedDevice(request="gpus", driver=cases.DRIVER, pool=node, device=taken_device)
        for taken_device in cases.taken_devices(cluster, index)
    )
    raw = cases.claim(900_000 + index, uid=f"held-{index}")
    held = with_allocation(_object(raw), AllocationResult(devices=DevicesAllocated(results=devices)), now=_TIME)
    return decode(encode(held), dict[str, Any], where="bench")
