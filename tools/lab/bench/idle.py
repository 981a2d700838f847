"""Measures the cost of a node's idle services: `python -m lab.bench idle [--json] [--seconds N]`.

Real processes (nats-server and the eight services, with a simulated kubelet) on a recorded machine
with 224 CPUs. When all are ready and idle, the processor time, read calls, wake-ups and messages of
each are counted for a while. A floor process runs beside them: Python with asyncio, a NATS client
and the same heartbeats, and nothing else. Processor time is measured, not wall-clock time. Other
work on the machine raises it by its use of the caches, so the ratio to the floor is the number to
compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from lab.bench.child_processes import child_process
from lab.bench.figures import machine_facts
from lab.bench.node_processes import BenchNode, bench_node
from lab.bench.process_use import Counts, Use, count_messages, read_counts, use_between
from topobus.bus.connection.canary import CANARY_EVERY_S
from topobus.process.heartbeat import EVERY_S
from topobus.simulation.nats_server import free_port

__all__ = ["Budget", "budgets", "draw", "main", "total"]

SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
FLOOR = "floor"
NATS = "nats-server"
# Registrations, first observations and their effects. The longest first wait is the gateway's list
# after its start.
_REST_S = 15.0
# The one process that is not a node's: where each node has a server of its own, its messages are
# what the hub sees of a node at rest.
_CONTROLLER = "controller"


class Budget(Struct, frozen=True, kw_only=True):
    """The limit of a use, and the measured use."""

    name: str
    unit: str
    limit: float
    used: float

    @property
    def is_kept(self) -> bool:
        """Say whether the use is within the limit."""
        return self.used <= self.limit


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench idle", description="Measure a node's services at rest.")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="N", help="how long to count (30)")
    parser.add_argument(
        "--machine", default="dgx", metavar="NAME", help="the recorded machine (dgx: 224 CPUs, 8 GPUs, 8 NICs)"
    )
    arguments = parser.parse_args(argv)
    facts = {**machine_facts(), "seconds": arguments.seconds}
    uses = asyncio.run(_measure(max(1.0, arguments.seconds), arguments.machine))
    if arguments.json:
        rows = [structs.asdict(use) for use in (*uses, total(uses))]
        kept = [{**structs.asdict(budget), "is_kept": budget.is_kept} for budget in budgets(uses)]
        document = {
            "group": "idle",
            "machine": facts,
            "processes": rows,
            "times_floor": _times_floor(uses),
            "budgets": kept,
        }
        print(json.dumps(document, indent=2))
    else:
        print(" ".join(f"{key}={value}" for key, value in facts.items()))
        print(draw(uses))
    return 0


def total(uses: Sequence[Use]) -> Use:
    """Add up the services: neither the server nor the floor is one of them."""
    own = [use for use in uses if use.name in SERVICES]
    sums = {name: sum(getattr(use, name) for use in own) for name in Use.__struct_fields__ if name != "name"}
    return Use(name=f"all {len(own)} services", **sums)


def budgets(uses: Sequence[Use]) -> tuple[Budget, ...]:
    """Compare the use with the budgets of a node at rest.

    Shapes: uses — one per process; the resident memory of all except the controller is the node
    plane's, with shared pages counted for each.
    """
    services = [use for use in uses if use.name in SERVICES]
    hub = sum(use.sent_per_s + use.received_per_s for use in services if use.name == _CONTROLLER)
    resident = {use.name: use.resident_mib for use in services}
    largest = max(resident, key=lambda name: resident[name], default="")
    node_plane_mib = sum(mib for name, mib in resident.items() if name != _CONTROLLER)
    return (
        Budget(
            name="processor time of all services", unit="% of a core", limit=1.0, used=total(uses).processor_percent
        ),
        Budget(name="messages on the hub (the controller's)", unit="messages/s", limit=3.0, used=hub),
        Budget(
            name=f"resident memory of the largest service ({largest})",
            unit="MiB",
            limit=60.0,
            used=resident.get(largest, 0.0),
        ),
        Budget(name="resident memory of the node plane", unit="MiB", limit=300.0, used=node_plane_mib),
    )


def draw(uses: Sequence[Use]) -> str:
    """Write the table, the sum, the ratio to the floor and the budgets, as lines of text."""
    heads = (
        "process",
        "% of a core",
        "reads/s",
        "wake-ups/s",
        "sent/s",
        "received/s",
        "resident MiB",
        "own MiB",
        "threads",
    )
    lines = [f"{heads[0]:<16}" + "".join(f"{head:>14}" for head in heads[1:])]
    for use in (*uses, total(uses)):
        numbers = (
            f"{use.processor_percent:.3f}",
            f"{use.reads_per_s:.1f}",
            f"{use.wakeups_per_s:.1f}",
            f"{use.sent_per_s:.2f}",
            f"{use.received_per_s:.2f}",
            f"{use.resident_mib:.1f}",
            f"{use.own_mib:.1f}",
            f"{use.threads}",
        )
        lines.append(f"{use.name:<16}" + "".join(f"{number:>14}" for number in numbers))
    lines.append(f"processor time of the services: {_times_floor(uses):.1f} times the floor's of as many processes")
    lines += [
        f"budget {'kept' if budget.is_kept else 'MISSED'}: {budget.name}: {budget.used:.2f} of "
        f"{budget.limit:g} {budget.unit}"
        for budget in budgets(uses)
    ]
    return "\n".join(lines)


def _times_floor(uses: Sequence[Use]) -> float:
    floor = next((use.processor_percent for use in uses if use.name == FLOOR), 0.0)
    return round(total(uses).processor_percent / (floor * len(SERVICES)), 2) if floor else 0.0


async def _measure(seconds: float, machine: str) -> list[Use]:
    port = free_port()
    async with (
        bench_node(SERVICES, machine=machine, nats_config=f'http: "127.0.0.1:{port}"') as node,
        child_process("lab.bench.idle_floor", node.nats.url, str(EVERY_S), str(CANARY_EVERY_S)) as floor,
    ):
        pids = {name: service.pid for name, service in node.services.items()}
        pids |= {FLOOR: floor.pid, NATS: node.nats.pid}
        await asyncio.sleep(_REST_S)
        before, began = await _count(pids, port), time.monotonic()
        await asyncio.sleep(seconds)
        after, elapsed_s = await _count(pids, port), time.monotonic() - began
        _check(node)
    return [use_between(name, before[name], after[name], elapsed_s) for name in pids]


async def _count(pids: Mapping[str, int], monitor_port: int) -> dict[str, Counts]:
    messages = count_messages(await asyncio.to_thread(_read_connections, monitor_port))
    counts: dict[str, Counts] = {}
    for name, pid in pids.items():
        sent, received = messages.get(name, (0, 0))
        if name == NATS:
            ours = [pair for service, pair in messages.items() if service in SERVICES]
            sent, received = sum(out for _, out in ours), sum(came for came, _ in ours)
        counts[name] = read_counts(pid, sent=sent, received=received)
    return counts


def _read_connections(port: int) -> Mapping[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/connz?limit=1024", timeout=5.0) as answer:
        document: Mapping[str, object] = json.load(answer)
    return document


def _check(node: BenchNode) -> None:
    ended = [name for name, service in node.services.items() if not service.is_running]
    if ended:
        raise RuntimeError(f"ended while they were measured: {', '.join(ended)}")
