"""`python -m topobus.simulation.machines`: builds, lists and plays recorded machines, and changes
one by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from topobus.simulation.machines.profile import PROFILES, load_profile
from topobus.simulation.machines.recorded import RecordedMachine, build
from topobus.values.errors import ConfigError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command line.

    Shapes: argv — without the program's name; None: the process's own. Result — the exit status: 0
    done, 78 for a mistake of the caller, described on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m topobus.simulation.machines", description="Recorded machines on disk."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="name the profiles")
    argument_parser = verbs.add_parser("build", help="write a profile's machine into a folder")
    argument_parser.add_argument("profile", help=f"one of {', '.join(PROFILES)}, or a TOML file")
    argument_parser.add_argument("folder", type=Path)
    argument_parser.add_argument(
        "--if-absent", action="store_true", help="leave a machine that is there already as it is"
    )
    argument_parser.add_argument(
        "--device-nodes", action="store_true", help="real device nodes below dev, for a container runtime (root)"
    )
    argument_parser = verbs.add_parser("play", help="play the faults that the profile scripts")
    argument_parser.add_argument("folder", type=Path)
    argument_parser.add_argument("--speed", type=float, default=1.0)
    for verb, what in (
        ("remove", "take a PCI function away"),
        ("restore", "bring it back"),
        ("offline", "a CPU"),
        ("online", "a CPU"),
    ):
        argument_parser = verbs.add_parser(verb, help=what)
        argument_parser.add_argument("folder", type=Path)
        argument_parser.add_argument("target")
    chosen = parser.parse_args(argv)
    try:
        for line in _run(chosen):
            print(line)  # noqa: T201 - this is a command
    except (ConfigError, ValueError) as err:
        print(err, file=sys.stderr)  # noqa: T201
        return 78
    return 0


def _run(chosen: argparse.Namespace) -> Sequence[str]:
    if chosen.verb == "list":
        return [f"{name:12} {load_profile(name).title}" for name in PROFILES]
    if chosen.verb == "build":
        if chosen.if_absent and (chosen.folder / "sys").is_dir():
            return [f"{chosen.folder}: there is a machine already"]
        made = build(chosen.profile, chosen.folder, has_device_nodes=chosen.device_nodes)
        return [f"{made.root}: {made.profile.title}"]
    machine = RecordedMachine.open(chosen.folder)
    if chosen.verb == "play":
        return asyncio.run(machine.play(speed=chosen.speed))
    if chosen.verb == "remove":
        machine.remove_pci(chosen.target)
    elif chosen.verb == "restore":
        machine.restore_pci(chosen.target)
    else:
        machine.set_cpu_online(int(chosen.target), chosen.verb == "online")
    return []


if __name__ == "__main__":
    sys.exit(main())
