"""Chooses what to measure: the first word of `python -m lab.bench` names a group, and the rest are
its options.

Without a group, `merge` is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from lab.bench import allocate, cluster, fleet, gateway, health, idle, leaves, merge, readings, why

__all__ = ["main"]

_GROUPS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "allocate": allocate.main,
    "cluster": cluster.main,
    "fleet": fleet.main,
    "gateway": gateway.main,
    "health": health.main,
    "idle": idle.main,
    "leaves": leaves.main,
    "merge": merge.main,
    "readings": readings.main,
    "why": why.main,
}
_DEFAULT = "merge"
_JOBS = """\
  allocate  the allocator alone: one claim against many nodes, full clusters, puzzles
  cluster   the controller in a Kubernetes cluster
  fleet     the controller with a whole fleet
  gateway   the gateway at kubelet's sockets
  health    how long a fault takes to be known
  idle      what a node's services cost while nothing happens
  leaves    a hub with many nodes that have servers of their own
  merge     the alignment engine
  readings  what the readings of a node's devices cost
  why       `topobus why` on a cluster of 5,000 nodes

Each has options of its own: `python -m lab.bench GROUP --help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a group. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, _DEFAULT)
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench",
        usage="%(prog)s [GROUP] [OPTION...]",
        description="Measure what the architecture gives budgets for.",
        epilog=_JOBS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("group", choices=sorted(_GROUPS), metavar="GROUP", help=f"what to measure ({_DEFAULT})")
    return _GROUPS[parser.parse_args(words[:1]).group](words[1:])
