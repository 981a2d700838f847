"""The cases that the allocator is measured with: they are what they say, and the measures count
what happened.
"""

from __future__ import annotations

import gc
import json

import pytest

from lab.allocator.cases import Cluster, claim, puzzle_slices, puzzles, slices, taken_devices
from lab.allocator.measures import Bench, fill, solve
from lab.bench import allocate, groups
from topobus.engine.allocation.node_table import NodeTable, Numbers
from topobus.engine.allocation.pools import Slice, gather_pools
from topobus.engine.allocation.values import ALL_GATES, Allocated, Mode, node_of
from topobus.formats.kubernetes import limits
from topobus.formats.kubernetes.resource import ClaimSpec, SliceSpec
from topobus.formats.kubernetes.shape import read_as


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """Leave all that the tests before made out of what each case collects first."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    "cluster",
    [Cluster(2), Cluster(2, kinds=2), Cluster(2, partitions=True), Cluster(2, partitions=True, is_plain=True)],
)
def test_cases_keep_the_limits_of_the_api(cluster: Cluster) -> None:
    """What is measured could be stored in a cluster, and is the same every time."""
    for index in range(cluster.nodes):
        published = list(slices(cluster, index))
        assert published == list(slices(cluster, index))
        for resource_slice in published:
            spec = read_as(resource_slice["spec"], SliceSpec, where=resource_slice["metadata"]["name"])
            assert limits.check_slice(spec) == []
            assert spec.pool.resource_slice_count == len(published)


@pytest.mark.parametrize("size", [16, 64])
def test_puzzles_keep_the_limits_of_the_api(size: int) -> None:
    """A puzzle is hard, not malformed."""
    for puzzle in puzzles(size):
        for puzzle_slice in puzzle_slices(puzzle, "n"):
            assert limits.check_slice(read_as(puzzle_slice["spec"], SliceSpec, where=puzzle.name)) == []
        for spec in puzzle.claims:
            assert limits.check_claim(read_as(spec, ClaimSpec, where=puzzle.name)) == []


def test_taken_devices_are_scattered_and_as_many_as_said() -> None:
    """Half taken is half of every node, by other cards on each."""
    cluster = Cluster(8, taken=0.5)

    taken = [taken_devices(cluster, index) for index in range(8)]

    assert {len(set(devices)) for devices in taken} == {4}
    assert len(set(taken)) > 4


def test_fill_ends_with_the_last_device() -> None:
    """Three nodes of eight cards take twelve claims of two; a thirteenth fits nowhere."""
    done = fill(Bench(Cluster(3, kinds=2)), claim, most=20)

    assert (done.claims, done.is_full) == (12, True)


def test_fill_takes_what_counters_allow_when_cards_come_in_parts() -> None:
    """A card has seven compute slices: eight cards hold 56 small parts, though whole cards and
    bigger parts are offered, too.
    """
    bench_of_parts = Bench(Cluster(1, partitions=True))

    def smallest(number: int) -> dict[str, object]:
        return claim(number, count=1, match=None, where="device.attributes['gpu.example.com'].profile == '1g'")

    assert fill(bench_of_parts, smallest, most=60).claims == 56


def test_judge_all_answers_for_every_node_when_some_are_taken() -> None:
    """With and without memory the same nodes fit."""
    bench = Bench(Cluster(6, kinds=3, taken=0.5))

    cached = [isinstance(outcome, Allocated) for outcome in bench.judge_all(claim(0))]
    fresh = [isinstance(outcome, Allocated) for outcome in bench.judge_all(claim(0), is_shared=False)]

    assert cached == fresh
    assert True in cached
    assert False in cached


@pytest.mark.parametrize("mode", Mode)
def test_solve_gives_upstreams_answer_when_both_come_to_an_end(mode: Mode) -> None:
    """What the walk without short cuts answers in mode, the search answers with them."""
    for puzzle in puzzles(8):
        plain = solve(puzzle, mode=mode, step_budget=200_000, is_clever=False)

        assert solve(puzzle, mode=mode, step_budget=200_000).outcome == plain.outcome


def test_bench_prints_all_tables_when_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m lab.bench allocate --json` runs the group `allocate` and gives one document."""
    monkeypatch.setattr(allocate, "_NODES", 20)
    monkeypatch.setattr(allocate, "_MANY_NODES", 20)
    monkeypatch.setattr(allocate, "_GROWTH", (20, 40))
    monkeypatch.setattr(allocate, "_PARTITIONED", 10)
    monkeypatch.setattr(allocate, "_PUZZLES", (8,))

    assert groups.main(["allocate", "--json", "--quick"]) == 0

    tables = json.loads(capsys.readouterr().out)
    assert {"latency", "fill", "partitions", "growth_nodes", "growth_taken", "equal", "puzzles"} <= tables.keys()
    assert all(row for table in tables.values() if isinstance(table, list) for row in table)
    assert "<svg" in allocate.draw_growth(tables["growth_nodes"], tables["growth_taken"])


def test_warm_leaves_nothing_for_the_first_claim_to_make() -> None:
    """What selectors see of a device is there before a claim asks, and one device with an amount
    that is none keeps nobody from starting.
    """
    state = Bench(Cluster(2)).state
    table = state.stock.table_of("node-00001")
    assert not any("facts" in candidate.__dict__ for candidate in table.candidates)

    table.warm()

    assert all("facts" in candidate.__dict__ for candidate in table.candidates)
    broken = NodeTable(node_of("n"), gather_pools([_slice_with_amount("lots")], node_of("n"), ALL_GATES), Numbers())
    broken.warm()


def _slice_with_amount(amount: str) -> Slice:
    device = {"name": "d", "capacity": {"memory": {"value": amount}}}
    pool = {"name": "n", "resourceSliceCount": 1}
    return Slice(
        "s",
        read_as({"driver": "d.example.com", "pool": pool, "nodeName": "n", "devices": [device]}, SliceSpec, where="s"),
    )
