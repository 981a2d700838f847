"""The command line of `python -m lab.chaos`."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab.chaos.bulk import BulkOptions, run_bulk
from lab.chaos.faults import CLOCK_FAULTS, HUB_FAULTS, NODE_FAULTS, Fault, possible_faults
from lab.chaos.node import SERVICES, Shape
from lab.chaos.node_run import NodeOptions, run_node
from lab.chaos.reboots import RebootOptions, run_reboots
from lab.chaos.wall_clocks import find_libfaketime
from topobus.process.config import LogSettings
from topobus.process.logging import setup_logging

__all__ = ["main"]

_MOST = 1 << 31
_print_line = partial(print, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments select. Returns 0 when nothing was violated, 1 when something was."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    library = arguments.libfaketime or find_libfaketime()
    possible = possible_faults(has_hub=arguments.leaf, can_move_clocks=library is not None)
    if impossible := sorted({*arguments.only}.difference(possible)):
        needs = (
            "libfaketime (--libfaketime)"
            if impossible[0] in CLOCK_FAULTS
            else "a node with a server of its own (--leaf)"
        )
        parser.error(f"--only: {', '.join(impossible)} cannot happen here: it needs {needs}")
    seed: int = arguments.seed if arguments.seed is not None else secrets.randbelow(_MOST)
    # Our own connection is cut again and again: that is no news.
    setup_logging(LogSettings(level="error"))
    _print_line(f"seed {seed}")
    # Short: a unix socket's path ends at 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tbc"))
    is_well = False
    try:
        if arguments.reboots:
            is_well = _run_reboots(arguments, seed, folder)
        else:
            is_well = (not arguments.steps or _run_node(arguments, seed, folder)) and (
                not arguments.operations or _run_bulk(arguments, seed, folder)
            )
    finally:
        if is_well:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _print_line(f"VIOLATED by seed {seed}; the logs are in {folder}")
    return 0 if is_well else 1


def _run_node(arguments: argparse.Namespace, seed: int, folder: Path) -> bool:
    options = NodeOptions(
        seed=seed,
        steps=arguments.steps,
        seconds=arguments.seconds,
        shape=Shape(
            nats_server=arguments.nats_server,
            is_leaf=arguments.leaf,
            controllers=arguments.controllers,
            libfaketime=arguments.libfaketime or find_libfaketime(),
            programs={arguments.in_place_of: tuple(arguments.program)} if arguments.program else {},
        ),
        only=tuple(arguments.only),
        report=_print_line,
    )
    result = asyncio.run(run_node(options, folder))
    _print_counts((("lives", result.lives), ("faults", result.faults), ("messages", result.messages)))
    if options.shape.is_leaf:
        _print_counts((("at the hub", result.at_hub),))
    _print_line(
        f"{result.steps} steps in {result.seconds:.0f} s: {result.granted} grants, {result.revisions} "
        "revisions of the ledger in "
        f"{result.epochs} epochs, well {result.well_after_s:.1f} s after the last fault"
    )
    return _print_violations(result.violations)


def _run_reboots(arguments: argparse.Namespace, seed: int, folder: Path) -> bool:
    options = RebootOptions(seed=seed, reboots=arguments.reboots, nats_server=arguments.nats_server, report=_print_line)
    result = asyncio.run(run_reboots(options, folder))
    _print_counts((("pods ended", result.ended),))
    _print_line(
        f"{result.reboots} reboots in {result.seconds:.0f} s: {result.ran_again} times a pod ran again, "
        f"{result.deleted_while_off} were deleted while the node was off, kubelet's checkpoint was wrong about "
        f"{result.checkpoint_age}; {result.attached} times an interface was in its pod again"
        f"{f' (none is moved here: {result.why_not_attached})' if result.why_not_attached else ''}; "
        f"the slowest was well after {result.slowest_s:.1f} s"
    )
    return _print_violations(result.violations)


def _print_violations(violations: Sequence[str]) -> bool:
    for violation in violations:
        _print_line(f"VIOLATION: {violation}")
    return not violations


def _run_bulk(arguments: argparse.Namespace, seed: int, folder: Path) -> bool:
    options = BulkOptions(
        seed=seed,
        operations=arguments.operations,
        workers=arguments.workers,
        window=arguments.window,
        faults=arguments.faults,
        seconds=arguments.seconds,
        nats_server=arguments.nats_server,
        program=tuple(arguments.program),
        report=_print_line,
    )
    result = asyncio.run(run_bulk(options, folder))
    _print_counts((("answers", result.outcomes), ("faults", result.faults), ("messages", result.messages)))
    rate = result.operations / result.seconds if result.seconds else 0.0
    _print_line(
        f"{result.operations} operations in {result.seconds:.1f} s, {rate:.0f} a second; checked in "
        f"{result.checked_s:.1f} s"
    )
    _print_line("NOT LINEARIZABLE: " + result.violation.what if result.violation is not None else "linearizable")
    return result.violation is None


def _print_counts(counts: Sequence[tuple[str, Counter[str]]]) -> None:
    for name, each in counts:
        _print_line(f"{name}: {', '.join(f'{key} {count}' for key, count in sorted(each.items())) or 'none'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.chaos", description=__doc__)
    parser.add_argument(
        "--seed", type=int, help="of the schedule; a run that names it again has the same operations and faults"
    )
    parser.add_argument("--steps", type=int, default=40, help="faults that a whole node goes through; 0: no such run")
    parser.add_argument(
        "--reboots",
        type=int,
        default=0,
        help="a node with twenty pods is rebooted so often, in place of the other runs",
    )
    parser.add_argument(
        "--only",
        type=Fault,
        choices=sorted({*NODE_FAULTS, *HUB_FAULTS}),
        nargs="+",
        default=(),
        help="these faults of a whole node alone; those of a hub need --leaf",
    )
    parser.add_argument(
        "--leaf",
        action="store_true",
        help="the node has a nats-server (2.10 or later) and a relay of its own, and a hub is behind it",
    )
    parser.add_argument("--controllers", type=int, default=2, help="how many controllers serve the node")
    parser.add_argument(
        "--libfaketime",
        type=Path,
        help="libfaketimeMT.so.1, to move clocks; else where Debian's package has it, else none is moved",
    )
    parser.add_argument("--operations", type=int, default=20_000, help="operations on the ledger alone; 0: no such run")
    parser.add_argument("--workers", type=int, default=8, help="how many ask at a time")
    parser.add_argument("--window", type=int, default=2500, help="operations between two rests")
    parser.add_argument("--faults", type=int, default=3, help="faults in each window")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no operation and no step begins after so long"
    )
    parser.add_argument(
        "--nats-server", type=Path, help="the server's binary; else TOPOBUS_NATS_SERVER, else that on PATH"
    )
    parser.add_argument(
        "--program",
        nargs="+",
        default=(),
        help="a program of yours (FILE WORD…) in the place of a service: is its defect found?",
    )
    parser.add_argument(
        "--in-place-of",
        default="topology",
        choices=SERVICES,
        help="of which service of a whole node it takes the place",
    )
    return parser
