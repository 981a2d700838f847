"""A dry run as a process: reads the situation from standard input and writes the answers to
standard output.

`topobus allocate --dry-run` starts it, since only the controller has a CEL evaluator and a dry run
needs neither NATS nor a running controller. With `--cluster` the slices, classes, claims and nodes
come from an API server instead. An error is one JSON object on standard error. The exit codes are
those of sysexits.h.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from topobus.controller.dry_run.rules.run import DryRun
from topobus.controller.dry_run.rules.situation import DryAnswer, Situation
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.messages.codec import decode, encode
from topobus.values.errors import ConfigError, ContractError, PeerUnavailable, TopobusError

__all__ = ["main"]

_EXITS: tuple[tuple[type[TopobusError], int], ...] = ((ConfigError, 78), (ContractError, 65), (PeerUnavailable, 69))


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The document on standard output."""

    answers: tuple[DryAnswer, ...]
    faults: tuple[str, ...] = ()
    """What is wrong with other objects that cannot be read. They count as absent."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one situation, and return the exit code."""
    parser = argparse.ArgumentParser(prog="topobus-controller dry run", description=__doc__)
    parser.add_argument(
        "--cluster", action="store_true", help="take slices, classes, claims and nodes from an API server"
    )
    parser.add_argument(
        "--kubeconfig", default="", help="kubeconfig file; empty: $KUBECONFIG, ~/.kube/config or the pod's own account"
    )
    parser.add_argument("--context", default="", help="context of that file")
    asked = parser.parse_args(arguments)
    try:
        situation = decode(sys.stdin.buffer.read(), Situation, where="standard input")
        if asked.cluster:
            # Imported here, as only this option needs a Kubernetes client.
            from topobus.controller.dry_run.cluster_listing import list_situation

            situation = asyncio.run(list_situation(situation, asked.kubeconfig, asked.context))
        run = DryRun(situation, CelCompiler())
        sys.stdout.buffer.write(encode(Answers(answers=run.answer_all(situation.wanted), faults=run.faults)))
    except TopobusError as err:
        sys.stderr.buffer.write(msgspec.json.encode({"error": err.message, "next_step": err.next_step}) + b"\n")
        return next((code for kind, code in _EXITS if isinstance(err, kind)), 70)
    return 0


if __name__ == "__main__":
    sys.exit(main())
