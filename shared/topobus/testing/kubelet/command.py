"""`python -m topobus.testing.kubelet serve|replay`: the kubelet simulator as a program, for plugins
in any language.

Commands come on standard input. Each call and each answer is one JSON line on standard output, in
the words of the recorded transcript.
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

import msgspec

from topobus.simulation.kubelet.simulator import (
    Admission,
    ClaimReference,
    Container,
    KubeletSimulator,
    KubeletTimings,
    Pod,
    Rejection,
)
from topobus.testing.kubelet.replay import replay
from topobus.testing.kubelet.transcript import read_transcript
from topobus.values.idset import NodeSet
from topobus.values.request import Policy, Scope
from topobus.values.view import AlignmentOptions

__all__ = ["main"]

_EXIT_DIFFERENT = 1
_EXIT_USAGE = 64
_HELP = """commands on standard input, one on each line:
  admit POD RESOURCE=COUNT ...           a pod with one container
  admit POD claim=NAME:UID:DRIVER ...    a pod with claims; both may be mixed
  remove POD | restart-container POD     its claims are unprepared | PreStartContainer again
  restart | stop | start                 kubelet itself
  capacity | drivers                     what the node would report
  quit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m topobus.testing.kubelet",
        description="A kubelet for tests of device plugins and DRA drivers, without a cluster.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve", help="serve the sockets and run the commands from standard input", epilog=_HELP
    )
    serving.formatter_class = argparse.RawDescriptionHelpFormatter
    serving.add_argument(
        "--root",
        type=Path,
        required=True,
        help="used as /var/lib/kubelet; keep it short, since a socket's path has at most 107 bytes",
    )
    serving.add_argument("--numa", default="0", help="the machine's NUMA nodes, as 0-1")
    serving.add_argument("--policy", choices=[policy.value for policy in Policy], default=Policy.BEST_EFFORT.value)
    serving.add_argument("--scope", choices=[scope.value for scope in Scope], default=Scope.CONTAINER.value)
    replaying = commands.add_parser(
        "replay", help="do again what a recorded transcript holds, and fail on a difference"
    )
    replaying.add_argument("transcript", type=Path)
    replaying.add_argument(
        "--dial-s", type=float, default=KubeletTimings().dial_s, help="kubelet's patience with a plugin's socket"
    )
    given = parser.parse_args(arguments)
    if given.command == "replay":
        return _replay(given.transcript, given.dial_s)
    try:
        nodes = NodeSet.parse(given.numa)
    except ValueError as err:
        _complain(f"--numa {given.numa}: {err}")
        return _EXIT_USAGE
    options = AlignmentOptions(policy=Policy(given.policy), scope=Scope(given.scope))
    try:
        return asyncio.run(_serve(KubeletSimulator(given.root, numa_nodes=nodes, options=options)))
    except (OSError, ValueError) as err:
        _complain(f"--root {given.root}: {err}")
        return _EXIT_USAGE


def _replay(path: Path, dial_s: float) -> int:
    try:
        sessions = read_transcript(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        _complain(str(err))
        return _EXIT_USAGE
    with tempfile.TemporaryDirectory(prefix="kl") as root:
        differences = asyncio.run(replay(sessions, Path(root), timings=KubeletTimings(dial_s=dial_s)))
    for line in differences:
        _complain(line)
    count = sum(len(session.lines) for session in sessions)
    _print_entry({"transcript": str(path), "sessions": len(sessions), "lines": count, "is_same": not differences})
    return _EXIT_DIFFERENT if differences else 0


async def _serve(kubelet: KubeletSimulator) -> int:
    pods: dict[str, Pod] = {}
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with kubelet:
        telling = asyncio.create_task(_print_events(kubelet))
        _print_entry(
            {
                "serving": str(kubelet.root),
                "device_plugins": str(kubelet.device_plugin_dir),
                "plugins_registry": str(kubelet.plugins_registry_dir),
            }
        )
        try:
            while (line := (await reader.readline()).decode()) and (words := line.split() or ["pass"]) != ["quit"]:
                try:
                    await _obey(kubelet, pods, words)
                except ValueError as err:
                    _complain(f"{line.strip()}: {err}")
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
    return 0


async def _print_events(kubelet: KubeletSimulator) -> None:
    shown = 0
    while True:
        events = await kubelet.wait_for_more(shown)
        for event in events[shown:]:
            _print_entry(msgspec.to_builtins(event))
        shown = len(events)


async def _obey(kubelet: KubeletSimulator, pods: dict[str, Pod], words: list[str]) -> None:
    match words:
        case ["pass"]:
            return
        case ["admit", name, *wishes]:
            pod = _pod(name, wishes)
            answer = await kubelet.admit(pod)
            if isinstance(answer, Admission) or not answer.is_final:
                pods[name] = pod
            _print_entry(_answer(answer))
        case ["remove", name]:
            _print_entry({"removed": name, "errors": await kubelet.remove(_known(pods, name))})
            del pods[name]
        case ["restart-container", name]:
            _print_entry({"restarted": name, "error": await kubelet.restart_container(_known(pods, name), "main")})
        case ["restart"]:
            await kubelet.restart()
        case ["stop"]:
            await kubelet.stop()
        case ["start"]:
            await kubelet.start(is_restart=True)
        case ["capacity"]:
            _print_entry({"capacity": msgspec.to_builtins(kubelet.capacity())})
        case ["drivers"]:
            _print_entry({"drivers": list(kubelet.drivers())})
        case _:
            raise ValueError(f"no such command; {_HELP}")


def _pod(name: str, wishes: list[str]) -> Pod:
    """Read a pod from words.

    >>> _pod("p", ["example.com/x=2"]).containers[0].resources
    {'example.com/x': 2}
    """
    resources: dict[str, int] = {}
    claims: list[ClaimReference] = []
    for wish in wishes:
        key, equals, value = wish.partition("=")
        if key == "claim" and len(parts := value.split(":")) == 3:
            claims.append(ClaimReference(name=parts[0], uid=parts[1], drivers=(parts[2],)))
        elif equals and value.isdecimal() and "/" in key:
            resources[key] = int(value)
        else:
            raise ValueError(f"got {wish!r}, wanted RESOURCE=COUNT or claim=NAME:UID:DRIVER")
    return Pod(
        name=name, uid=f"uid-of-{name}", containers=(Container(name="main", resources=resources),), claims=tuple(claims)
    )


def _known(pods: dict[str, Pod], name: str) -> Pod:
    if name not in pods:
        raise ValueError(f"no such pod; there are {', '.join(sorted(pods)) or 'none'}")
    return pods[name]


def _answer(answer: Admission | Rejection) -> dict[str, Any]:
    plain = msgspec.to_builtins(answer, str_keys=True, enc_hook=str)
    return {
        "admitted" if isinstance(answer, Admission) else "rejected": answer.pod.name,
        **{k: v for k, v in plain.items() if k != "pod"},
    }


def _print_entry(entry: dict[str, Any]) -> None:
    print(json.dumps(entry), flush=True)  # noqa: T201  (the answer of a program)


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  (the answer of a program)
