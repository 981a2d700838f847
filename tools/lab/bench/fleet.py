"""Measures the real controller over a real nats-server with a whole fleet: `python -m lab.bench
fleet [--nodes 1000] [--claims 2000] [--json]`.

One process plays all nodes from a recorded machine (`lab.fleet`). A figure includes three confirmed
writes for each claim (attempt, the node's ledger, status), one request and one event. All processes
share this machine's processors, so compare processor times and ratios to the floor. At the end all
claims and ledgers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.bench.figures import machine_facts
from lab.fleet.fleet_claims import GPUS_OF_FOUR
from lab.fleet.fleet_node import node_template
from lab.fleet.fleet_run import FleetRun, measure_run
from lab.leaves.node_content import kept_content
from topobus.values.errors import PeerUnavailable

__all__ = ["main"]

_CLASSES = "gpu,nic,fpga,cpu"


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench fleet", description="Measure the controller with a whole fleet."
    )
    parser.add_argument("--nodes", type=int, default=1000, metavar="N", help="nodes of the fleet (1000)")
    parser.add_argument(
        "--claims", type=int, default=2000, metavar="N", help="claims that are stored when the controller starts (2000)"
    )
    parser.add_argument(
        "--singles", type=int, default=100, metavar="N", help="claims one after the other after these (100)"
    )
    parser.add_argument("--machine", default="dgx", metavar="NAME", help="the recorded machine (dgx)")
    parser.add_argument(
        "--classes", default=_CLASSES, metavar="A,B", help=f"the device classes of each node ({_CLASSES})"
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="controllers (1)")
    parser.add_argument(
        "--kill",
        type=int,
        default=0,
        metavar="N",
        help="kill a controller so often during the fill, and start another (0)",
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="how long the fill may take (600)"
    )
    parser.add_argument(
        "--content",
        type=Path,
        metavar="FILE",
        help="store what the recorded machine's services published in this file, or read it again",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    if arguments.content is None or not arguments.content.exists():
        report(f"recording what the services of one node publish on the machine {arguments.machine!r}")
    content = kept_content(arguments.content, arguments.machine)
    classes = frozenset(arguments.classes.split(","))
    gpus = (
        sum(len(inventory.devices) for inventory in node_template(content, classes & {"gpu"}).inventories)
        * arguments.nodes
    )
    most = gpus * 4 // GPUS_OF_FOUR
    problems = [
        f"--{name} is {value}, wanted {wanted}"
        for name, value, wanted, is_right in (
            ("nodes", arguments.nodes, "1 or more", arguments.nodes >= 1),
            ("claims", arguments.claims, "2 or more", arguments.claims >= 2),
            ("replicas", arguments.replicas, "1 or more", arguments.replicas >= 1),
            ("kill", arguments.kill, "0 or more", arguments.kill >= 0),
            (
                "claims and --singles together",
                arguments.claims + arguments.singles,
                f"at most {most}: {arguments.nodes} nodes have {gpus} GPUs",
                arguments.claims + arguments.singles <= most,
            ),
        )
        if not is_right
    ]
    if problems:
        print(f"bench fleet: {'; '.join(problems)}", file=sys.stderr)
        return 64
    run = FleetRun(
        nodes=arguments.nodes,
        claims=arguments.claims,
        content=content,
        classes=classes,
        replicas=arguments.replicas,
        kills=arguments.kill,
        singles=arguments.singles,
        limit_s=arguments.limit,
    )
    try:
        row = {**asyncio.run(measure_run(run, report)), **machine_facts()}
    except (PeerUnavailable, RuntimeError) as err:
        print(f"bench fleet: {err}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"group": "fleet", "rows": [row]}, indent=2))
    else:
        width = max(map(len, row))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in row.items()))
    return 0
