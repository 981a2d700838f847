"""Measures a hub with many nodes that have servers of their own: `python -m lab.bench leaves
[--nodes 1,100,300,1000] [--json] [--plot FILE.svg]`.

One real nats-server is the hub, with the configuration that we ship. Two processes hold the nodes:
connections with nats-server's leaf protocol (`lab.leaves`), each of which sends the messages of a
recorded machine's services. A watcher reads the hub as a controller does, and a real controller
runs for a while. The floor is measured beside it: the same messages put by one plain client. All
share this machine's processors, so compare ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.bench.figures import machine_facts
from lab.leaves.hub_measures import Fleet, draw_growth, measure_fleet
from lab.leaves.node_content import kept_content
from lab.leaves.open_files import check_open_files, raise_open_files
from topobus.values.errors import ConfigError

__all__ = ["main"]

_NODES = "1,100,300,1000"
# A node's connection has two ends, and the kernel counts each. The rest is streams, clients and
# files.
_FILES_A_NODE, _MORE_FILES = 2, 256


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench leaves", description="Measure a hub with many nodes.")
    parser.add_argument("--nodes", default=_NODES, metavar="N,N", help=f"sizes of the fleet ({_NODES})")
    parser.add_argument(
        "--seconds", type=float, default=15.0, metavar="N", help="how long to count while nothing happens (15)"
    )
    parser.add_argument("--machine", default="dgx", metavar="NAME", help="the recorded machine (dgx)")
    parser.add_argument(
        "--cluster", default="", metavar="NAME", help="a cluster name that all nodes' servers share (none)"
    )
    parser.add_argument("--no-controller", action="store_true", help="without the real controller")
    parser.add_argument(
        "--content",
        type=Path,
        metavar="FILE",
        help="store what the recorded machine's services published in this file, or read it again",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="keep the measured sizes here; those that it has are not measured again",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth as SVG")
    arguments = parser.parse_args(argv)
    try:
        sizes = _sizes(arguments.nodes)
        check_open_files(_FILES_A_NODE * max(sizes) + _MORE_FILES, raise_open_files())
    except ConfigError as err:
        print(f"bench leaves: {err}", file=sys.stderr)
        return 78
    except ValueError:
        print(
            f"bench leaves: --nodes is {arguments.nodes!r}, wanted numbers above 0 with commas between them",
            file=sys.stderr,
        )
        return 64
    rows: list[dict[str, Any]] = (
        json.loads(arguments.rows.read_text(encoding="utf-8")) if arguments.rows and arguments.rows.exists() else []
    )
    missing = [size for size in sizes if size not in {row["nodes"] for row in rows}]
    if missing:
        content = kept_content(arguments.content, arguments.machine)
        for size in sorted(missing):
            fleet = Fleet(
                nodes=size,
                content=content,
                rest_s=arguments.seconds,
                cluster=arguments.cluster,
                has_controller=not arguments.no_controller,
            )
            rows.append({**asyncio.run(measure_fleet(fleet)), **machine_facts(), "folder": tempfile.gettempdir()})
            rows.sort(key=lambda row: int(row["nodes"]))
            if arguments.rows:
                arguments.rows.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if arguments.plot:
        arguments.plot.write_text(draw_growth(rows), encoding="utf-8")
    print(json.dumps({"group": "leaves", "rows": rows}, indent=2) if arguments.json else _table(rows))
    return 0


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Write one line per figure, one column per size, as there are more figures than sizes."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    width = max(map(len, names))
    lines = [name.ljust(width) + "".join(_cell(row.get(name)).rjust(14) for row in rows) for name in names]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value if value is not None else "")[:13]
