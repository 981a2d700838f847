"""Measures the allocator and prints the results: `python -m lab.bench allocate [--json] [--quick]
[--plot FILE.svg]`.

Tables: one claim against many nodes, filling a cluster, partitions against plain devices, growth,
equal devices and puzzles. A figure that has a target is printed beside it. The whole controller
over NATS is measured by `python -m lab.bench fleet`. No test depends on these times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.allocator.cases import DRIVER, Cluster, claim, puzzles
from lab.allocator.measures import Bench, Filled, fill, solve
from lab.line_charts import Line, Panel, draw_charts
from topobus.engine.allocation.values import Mode

__all__ = ["draw_growth", "main"]

Row = dict[str, Any]

# Upstream's limit is 10 s. Its steps take some ten microseconds, ours about as long without short
# cuts.
_PLAIN_STEPS = 200_000
_PUZZLE_STEPS = 100_000
_NODES = 1000
_MANY_NODES = 5000
_PARTITIONED = 200
_GROWTH = (500, 1000, 2000, 4000, 8000)
_PUZZLES = (16, 32, 64)


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench allocate", description="Measure the allocator.")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the nodes: whether it runs, not how fast it is"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth as SVG")
    arguments = parser.parse_args(argv)
    scale = 10 if arguments.quick else 1
    tables: dict[str, list[Row]] = {
        "latency": latency(_NODES // scale),
        "fill": filling(_MANY_NODES // scale),
        "partitions": partitions(_PARTITIONED // scale),
        "growth_nodes": growth_in_nodes([nodes // scale for nodes in _GROWTH]),
        "growth_taken": growth_in_taken(_NODES // scale),
        "equal": equal_devices(),
        "puzzles": puzzled(_PUZZLES[:1] if arguments.quick else _PUZZLES),
    }
    if arguments.plot:
        arguments.plot.write_text(draw_growth(tables["growth_nodes"], tables["growth_taken"]), encoding="utf-8")
    if arguments.json:
        print(json.dumps({"group": "allocate", **tables}, indent=2))
    else:
        for name, rows in tables.items():
            _print(name, rows)
    return 0


def latency(nodes: int) -> list[Row]:
    """One claim for 2 devices with one constraint, searched on every node."""
    rows: list[Row] = []
    for kinds, taken in ((1, 0.0), (4, 0.5), (40, 0.5)):
        started = time.process_time()
        bench = Bench(Cluster(nodes=nodes, kinds=kinds, taken=taken))
        load_ms = (time.process_time() - started) * 1000
        rows.append(
            {
                "nodes": nodes,
                "kinds of nodes": kinds,
                "taken": taken,
                "wanted_ms": 50,
                "like an earlier claim_ms": _rounded(bench.judging_ms(_like, rounds=7)),
                "a new kind of claim_ms": _rounded(bench.judging_ms(_unlike, rounds=7)),
                "nothing remembered_ms": _rounded(bench.judging_ms(_like, rounds=3, is_shared=False)),
                "reading all slices_ms": _rounded(load_ms),
            }
        )
        # The first claim of all, in a state that has only just been read. The controller warms it
        # before it searches for a claim.
        fresh = Bench(Cluster(nodes=nodes, kinds=kinds, taken=taken))
        rows[-1]["warming_ms"] = _rounded(fresh.warming_ms())
        rows[-1]["the very first claim_ms"] = _rounded(fresh.judging_ms(_like, rounds=1))
    return rows


def filling(nodes: int) -> list[Row]:
    """Fill all devices with claims for 2 with one constraint, and with claims for 1 without."""
    rows = []
    for text, count, make in (
        ("2 devices of one root", 2, partial(claim)),
        ("1 device", 1, partial(claim, count=1, match=None)),
    ):
        bench = Bench(Cluster(nodes=nodes, kinds=4))
        done = fill(bench, make, most=nodes * 8 // count)
        rows.append(
            {
                "nodes": nodes,
                "devices": nodes * 8,
                "claims of": text,
                "claims": done.claims,
                **_rates(done),
                "wanted a second": 500,
            }
        )
    return rows


def partitions(nodes: int) -> list[Row]:
    """Fill cards that are offered in parts, by shared counters and without."""
    rows: list[Row] = []
    mixed = ("1g", "2g", "1g", "3g", "1g", "2g")

    def part(number: int) -> dict[str, Any]:
        return claim(
            number,
            count=1,
            match=None,
            where=f"device.attributes['{DRIVER}'].profile == '{mixed[number % len(mixed)]}'",
        )

    for text, is_plain in (("plain", True), ("shared counters", False)):
        cluster = Cluster(nodes=nodes, partitions=True, is_plain=is_plain)
        bench = Bench(cluster)
        search_ms = bench.judging_ms(lambda _: part(0), rounds=3, is_shared=False) / nodes
        done = fill(bench, part, most=nodes * 8 * 3)
        rows.append(
            {
                "nodes": nodes,
                "devices a node": 104,
                "pools": text,
                "claims": done.claims,
                **_rates(done),
                "one search, nothing remembered_ms": _rounded(search_ms),
            }
        )
    plain, parted = rows
    parted["times slower"] = _rounded(plain["claims a second"] / parted["claims a second"])
    parted["times slower, nothing remembered"] = _rounded(
        parted["one search, nothing remembered_ms"] / plain["one search, nothing remembered_ms"]
    )
    parted["wanted at most"] = 3
    return rows


def growth_in_nodes(sizes: Sequence[int]) -> list[Row]:
    """How a claim's cost grows with nodes, half of whose devices are taken."""
    rows: list[Row] = []
    for nodes in sizes:
        bench = Bench(Cluster(nodes=nodes, kinds=4, taken=0.5))
        bench.judge_all(claim(0))
        every = bench.judging_ms(_unlike, rounds=5)
        started = time.process_time()
        count = min(400, nodes)
        done = sum(bench.place(claim(number)) for number in range(count))
        placed = (time.process_time() - started) * 1000 / count
        rows.append(
            {
                "nodes": nodes,
                "judged on every node_ms": _rounded(every),
                "a node_us": _rounded(every * 1000 / nodes),
                "placed on the first that fits_ms": _rounded(placed),
                "placed": done,
            }
        )
    return rows


def growth_in_taken(nodes: int) -> list[Row]:
    """How a claim's cost grows with the devices taken already."""
    rows: list[Row] = []
    for taken in (0.0, 0.25, 0.5, 0.75):
        bench = Bench(Cluster(nodes=nodes, kinds=4, taken=taken))
        bench.judge_all(_unlike_single(99))
        every = bench.judging_ms(_unlike_single, rounds=5)
        done = fill(bench, partial(claim, count=1, match=None), most=nodes)
        rows.append({"nodes": nodes, "taken": taken, "judged on every node_ms": _rounded(every), **_rates(done)})
    return rows


def equal_devices() -> list[Row]:
    """n+1 of n equal devices: upstream tries 2^n combinations."""
    rows: list[Row] = []
    for size in (8, 32, 128):
        puzzle = next(iter(puzzles(size)))
        solutions = [solve(puzzle, mode=Mode.COMPATIBLE, step_budget=_PUZZLE_STEPS) for _ in range(5)]
        best = sorted(solutions, key=lambda solution: solution.elapsed_ms)[2]
        rows.append(
            {
                "devices": size,
                "asked": size + 1,
                "outcome": best.outcome,
                "steps": best.steps,
                "ms": _rounded(best.elapsed_ms),
                "wanted_ms": 10,
            }
        )
    return rows


def puzzled(sizes: Sequence[int]) -> list[Row]:
    """Puzzles, with a budget of steps: by upstream's search, and by ours in both modes."""
    rows: list[Row] = []
    for size in sizes:
        for puzzle in puzzles(size):
            plain = solve(puzzle, mode=Mode.COMPATIBLE, step_budget=_PLAIN_STEPS, is_clever=False)
            row: Row = {
                "devices": size,
                "puzzle": puzzle.name,
                "upstream's walk": _ended(plain.outcome),
                "its steps": plain.steps,
            }
            for mode in Mode:
                ours = solve(puzzle, mode=mode, step_budget=_PUZZLE_STEPS)
                row |= {
                    mode.value: _ended(ours.outcome),
                    f"{mode.value} steps": ours.steps,
                    f"{mode.value}_ms": _rounded(ours.elapsed_ms),
                }
            rows.append(row)
    hard = [each_row for each_row in rows if each_row["upstream's walk"] == "gave up"]
    total: Row = {
        "devices": "all",
        "puzzle": f"{len(rows)} puzzles; upstream's walk gives up on {len(hard)} after {_PLAIN_STEPS} steps",
    }
    for mode in Mode:
        total[mode.value] = f"{sum(row[mode.value] != 'gave up' for row in hard)} of these solved"
    return [*rows, total]


def draw_growth(nodes: Sequence[Row], taken: Sequence[Row]) -> str:
    """Draw the time for a claim against the number of nodes, and against the share of devices in
    use.
    """
    every, place = ("judged on every node", "#27c"), ("placed on the first that fits", "#c52")
    return draw_charts(
        [
            Panel(
                title="a claim against nodes, half taken (ms)",
                axis="nodes",
                lines=[
                    Line(*every, [(row["nodes"], row["judged on every node_ms"]) for row in nodes]),
                    Line(*place, [(row["nodes"], row["placed on the first that fits_ms"]) for row in nodes]),
                ],
            ),
            Panel(
                title=f"a claim against what is taken, {taken[0]['nodes']} nodes (ms)",
                axis="% of devices taken",
                lines=[
                    Line(*every, [(row["taken"] * 100, row["judged on every node_ms"]) for row in taken]),
                    Line(*place, [(row["taken"] * 100, 1000 / row["claims a second"]) for row in taken]),
                ],
            ),
        ]
    )


def _like(_: int) -> dict[str, Any]:
    """Make the same claim every time."""
    return claim(0)


def _unlike(number: int) -> dict[str, Any]:
    """Make a claim of another kind every time."""
    return claim(number, where=f"device.attributes['{DRIVER}'].index >= -{number}")


def _unlike_single(number: int) -> dict[str, Any]:
    return claim(number, count=1, match=None, where=f"device.attributes['{DRIVER}'].index >= -{number}")


def _ended(outcome: str) -> str:
    return {"Allocated": "fits", "NoFit": "no fit", "GaveUp": "gave up", "Fault": "fault"}[outcome]


def _rates(done: Filled) -> Row:
    return {
        "claims a second": _rounded(done.rate),
        "first tenth": _rounded(done.tenths[0]) if done.tenths else None,
        "last tenth": _rounded(done.tenths[-1]) if done.tenths else None,
    }


def _rounded(value: float) -> float:
    return round(value, 3) if value < 100 else round(value)


def _print(name: str, rows: Sequence[Row]) -> None:
    print(f"\n{name}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(key, "")) for key in columns] for row in rows]
    widths = [max(len(key), *(len(line[place]) for line in cells)) for place, key in enumerate(columns)]
    for line in (columns, *cells):
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
