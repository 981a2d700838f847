"""Laws of what the controller keeps between claims: it gives the answers that a look at everything
would give.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from support.laws import examples
from topobus.controller.state.result_cache import ResultCache
from topobus.controller.state.slice_index import SliceIndex
from topobus.controller.state.standalone_state import StandaloneState
from topobus.engine.allocation import search
from topobus.engine.allocation.pools import Pool, Slice, gather_pools
from topobus.engine.allocation.search import allocate
from topobus.engine.allocation.values import ALL_GATES, Allocated, Mode, Outcome, node_of
from topobus.engine.claims.attempts import Attempt, with_attempt
from topobus.engine.claims.lifecycle import with_allocation
from topobus.engine.claims.objects import Claim
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.formats.kubernetes.resource import ClaimSpec, SliceSpec
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.messages import ApiObject
from topobus.values.machine import Machine
from unit.controller.allocation import COMPILER

DRIVER = "gpu.example.com"
NODES = ("n1", "n2", "n3", "n4")
COUNTERS = ("parts", "other", "third")
MODEL = f"device.attributes['{DRIVER}'].model == 'a'"


def _object(kind: str, name: str, spec: dict[str, Any], namespace: str = "") -> ApiObject:
    metadata = {"name": name, "uid": f"uid-{name}"} | ({"namespace": namespace} if namespace else {})
    return ApiObject(api_version="resource.k8s.io/v1", kind=kind, metadata=metadata, spec=spec)


@st.composite
def slice_specs(draw: st.DrawFn, node: str, number: int, generation: int) -> dict[str, Any]:
    """Draw one of a node's slices: mostly its own, now and then one that every node may reach, with
    counters, or of an unfinished pool.
    """
    devices = []
    for index in range(draw(st.integers(0, 3))):
        attributes: dict[str, Any] = {
            "model": {"string": draw(st.sampled_from("ab"))},
            "id": {"string": f"{node}-{number}-{index}"},
        }
        if draw(st.booleans()):
            attributes["root"] = draw(
                st.sampled_from([{"int": 1}, {"int": 2}, {"string": "1"}, {"ints": [1, 2]}, {"bool": True}])
            )
        device: dict[str, Any] = {"name": f"d{number}-{index}", "attributes": attributes}
        if draw(st.integers(0, 4)) == 0:
            device["taints"] = [{"key": "k", "effect": "NoSchedule"}]
        if draw(st.integers(0, 3)) == 0:
            device["capacity"] = {"memory": {"value": draw(st.sampled_from(["2Gi", "4Gi"]))}}
            device["allowMultipleAllocations"] = draw(st.booleans())
        devices.append(device)
    pool = {
        "name": draw(st.sampled_from([node, "everybodys"])),
        "generation": generation,
        "resourceSliceCount": draw(st.sampled_from([1, 1, 2])),
    }
    where: dict[str, Any] = draw(
        st.sampled_from([{"nodeName": node}, {"nodeName": node}, {"nodeName": node}, {"allNodes": True}])
    )
    spec: dict[str, Any] = {
        "driver": draw(st.sampled_from([DRIVER, "nic.example.com"])),
        "pool": pool,
        **where,
        "devices": devices,
    }
    if draw(st.integers(0, 5)) == 0:
        spec |= {"devices": [], "sharedCounters": [{"name": "c", "counters": {"n": {"value": "1"}}}]}
    return spec


@st.composite
def publications(draw: st.DrawFn) -> list[tuple[str, dict[str, Any] | None]]:
    """Draw what drivers publish and withdraw, in order: slice names with their content, None for
    one that is gone.
    """
    published: list[tuple[str, dict[str, Any] | None]] = []
    for _ in range(draw(st.integers(1, 10))):
        node, number = draw(st.sampled_from(NODES)), draw(st.integers(0, 1))
        is_gone = draw(st.integers(0, 4)) == 0
        spec = None if is_gone else draw(slice_specs(node, number, draw(st.sampled_from([1, 1, 2]))))
        published.append((f"{node}-{number}", spec))
    return published


def _described(pools: tuple[Pool, ...]) -> object:
    return [
        (
            pool.id,
            pool.state,
            pool.why,
            [candidate.id for candidate in pool.candidates],
            sorted(candidate.id for candidate in pool.elsewhere),
        )
        for pool in pools
        # A pool that only tells this node of its counters has nothing to give here.
        if pool.candidates or pool.state != "ready"
    ]


@settings(deadline=None, max_examples=examples(200))
@for_all(publications())
def test_slice_book_shows_what_a_look_at_all_slices_shows(published: list[tuple[str, dict[str, Any] | None]]) -> None:
    """After any changes a node's pools are those that upstream's walk over all slices of the
    cluster finds.
    """
    book, stored = SliceIndex(), dict[str, Slice]()
    for name, spec in published:
        for node in NODES:
            book.table(node_of(node))  # so that there is something to be outdated
        if spec is None:
            stored.pop(name, None)
        else:
            stored[name] = Slice(name, read_as(spec, SliceSpec, where=name))
        book.put((1, name), (stored[name],) if name in stored else ())

        for node in NODES:
            fresh = gather_pools([stored[key] for key in sorted(stored)], node_of(node), ALL_GATES)
            assert _described(book.table(node_of(node)).pools) == _described(fresh)


@st.composite
def clusters(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw nodes of two kinds: one slice each, or a slice with partitions and one with the counters
    that they share.
    """
    first = draw(st.lists(devices(), min_size=1, max_size=5))
    # The other kind differs in little, for that is where two nodes may wrongly be taken for alike.
    place, root = (
        draw(st.integers(0, len(first) - 1)),
        draw(st.sampled_from([{"int": 1}, {"int": 2}, {"int": 3}, {"ints": [1, 2]}])),
    )
    changed = draw(
        st.sampled_from([first[place] | {"attributes": first[place]["attributes"] | {"root": root}}, draw(devices())])
    )
    kinds = [first, [*first[:place], changed, *first[place + 1 :]]]
    slices = []
    for node in NODES:
        content = [dict(device) for device in draw(st.sampled_from(kinds))]
        for index, device in enumerate(content):
            device["name"] = f"{node}-d{index}"
            device["attributes"] = device["attributes"] | {"id": {"string": f"{node}-{index}"}}
        has_counters = any("consumesCounters" in device for device in content)
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1 + has_counters}
        slices.append({"driver": DRIVER, "pool": pool, "nodeName": node, "devices": content})
        if has_counters:
            counters = [{"name": "card", "counters": {name: {"value": "3"} for name in COUNTERS}}]
            slices.append({"driver": DRIVER, "pool": pool, "nodeName": node, "sharedCounters": counters})
    return slices


@st.composite
def devices(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a device, plain, partitioned, tainted or shared."""
    attributes: dict[str, Any] = {"model": {"string": draw(st.sampled_from("ab"))}}
    if draw(st.integers(0, 3)):
        attributes["root"] = draw(st.sampled_from([{"int": 1}, {"int": 2}, {"ints": [1, 2]}]))
    device: dict[str, Any] = {"attributes": attributes}
    kind = draw(st.integers(0, 9))
    if kind == 0:
        device["taints"] = [{"key": "k", "effect": "NoSchedule"}]
    elif kind in (1, 2):
        names = draw(st.lists(st.sampled_from(COUNTERS), min_size=1, max_size=2, unique=True))
        counters = {name: {"value": draw(st.sampled_from("123"))} for name in names}
        device["consumesCounters"] = [{"counterSet": "card", "counters": counters}]
        if kind == 2 and draw(st.booleans()):
            device |= {"capacity": {"memory": {"value": "4Gi"}}, "allowMultipleAllocations": True}
    elif kind == 3:
        device |= {"capacity": {"memory": {"value": "4Gi"}}, "allowMultipleAllocations": True}
    return device


@st.composite
def wanted(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a claim of few kinds, so that some are alike."""
    requests = []
    for index in range(draw(st.integers(1, 2))):
        selectors = [{"cel": {"expression": MODEL}}] if draw(st.booleans()) else []
        exactly: dict[str, Any] = {"deviceClassName": "gpu", "selectors": selectors}
        kind = draw(st.integers(0, 5))
        exactly |= {"allocationMode": "All"} if kind == 0 else {"count": draw(st.integers(1, 2))}
        if kind == 1:
            exactly["capacity"] = {"requests": {"memory": "1Gi"}}
        requests.append({"name": f"r{index}", "exactly": exactly})
    some = (
        [{"matchAttribute": f"{DRIVER}/root"}],
        [{"distinctAttribute": f"{DRIVER}/root"}],
        [{"matchAttribute": f"{DRIVER}/id"}],
    )
    constraints = draw(st.sampled_from([[], [], *some]))
    return {"devices": {"requests": requests, "constraints": constraints}}


def _state(slices: list[dict[str, Any]]) -> StandaloneState:
    state = StandaloneState()
    expression = f"device.driver == '{DRIVER}'"
    _put(state, _object("DeviceClass", "gpu", {"selectors": [{"cel": {"expression": expression}}]}))
    for node in NODES:
        state.put_machine(Machine(node=node, numa_nodes=(), cpus=()))
    for index, spec in enumerate(slices):
        _put(state, _object("ResourceSlice", f"s{index}", spec))
    return state


def _put(state: StandaloneState, api_object: ApiObject) -> None:
    state.put_object(
        ObjectKey(api_object.kind.lower(), api_object.metadata.get("namespace", "_"), api_object.metadata["name"]),
        Stored(1, api_object),
    )


def _plain(outcome: Outcome) -> object:
    """What must be equal: what is given; of a miss only that it is one."""
    return outcome.results if isinstance(outcome, Allocated) else type(outcome)


@settings(deadline=None, max_examples=examples(250))
@for_all(clusters(), st.lists(st.tuples(wanted(), st.booleans()), min_size=1, max_size=12), st.sampled_from(Mode))
def test_judgements_give_what_fresh_searches_give(
    slices: list[dict[str, Any]], asked: list[tuple[dict[str, Any], bool]], mode: Mode
) -> None:
    """Claim by claim, with devices taken and given back: each node's answer, and the first node
    that fits, are those of searches that remember nothing.
    """
    state = _state(slices)
    judgements = ResultCache(state.stock, state.nodes, lambda: state.classes, COMPILER, mode)
    held: list[ApiObject] = []
    for number, (raw, gives_back) in enumerate(asked):
        claim = _object("ResourceClaim", f"c{number}", raw, "default")
        spec = read_as(raw, ClaimSpec, where="claim")

        def find(node: str, claim: ApiObject = claim, spec: ClaimSpec = spec) -> Outcome:
            return allocate(state.input_for(node, [(Claim(claim), spec)], mode=mode), COMPILER)

        request_shape = judgements.shape([spec])
        fresh = {node: find(node) for node in NODES}
        first = next((node for node in NODES if isinstance(fresh[node], Allocated)), None)
        first_open = None
        for node in judgements.open_nodes(request_shape):
            if isinstance(judgements.get_or_search(request_shape, node, partial(find, node)), Allocated):
                first_open = node
                break
            judgements.close(request_shape, node)

        assert first_open == first
        for node in NODES:
            assert _plain(judgements.get_or_search(request_shape, node, partial(find, node))) == _plain(fresh[node])
        outcome = fresh[first] if first is not None else None
        if isinstance(outcome, Allocated) and first is not None:
            attempted = with_attempt(claim, Attempt(number=1, node=first, allocation=outcome.results[0]))
            _put(state, attempted)
            held.append(with_allocation(attempted, outcome.results[0], now="t"))
            _put(state, held[-1])
        if gives_back and held:
            gone = held.pop(0)
            state.drop_object(ObjectKey("resourceclaim", "default", gone.metadata["name"]))


@settings(deadline=None, max_examples=examples(400))
@for_all(clusters(), st.lists(wanted(), min_size=1, max_size=3), st.sampled_from(Mode))
def test_search_leaves_out_only_what_must_fail_when_devices_share(
    slices: list[dict[str, Any]], asked: list[dict[str, Any]], mode: Mode
) -> None:
    """With counters, shares and lists, too, going back past choices that have no part in a miss
    loses no solution and finds none that is not there.
    """
    state = _state(slices)
    objects = [_object("ResourceClaim", f"c{number}", raw, "default") for number, raw in enumerate(asked)]
    specs = [(Claim(api_object), read_as(api_object.spec, ClaimSpec, where="claim")) for api_object in objects]
    given = state.input_for("n1", specs, mode=mode)

    plain = allocate(given, COMPILER, is_clever=False)
    with patch.object(search, "_HARD_STEPS", 0):
        clever = allocate(given, COMPILER)

    assert _plain(clever) == _plain(plain)
    assert clever.steps <= plain.steps
