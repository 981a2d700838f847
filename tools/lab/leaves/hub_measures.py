"""The steps of the leaf benchmark at one size of the fleet, and the resulting figures.

The result is one flat record of figures, whose names have the units. Everything runs on this
machine and has ended at the end.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec import Struct

from lab.bench.node_processes import bench_service
from lab.bench.process_use import read_counts
from lab.bench.service_process import wait_ready
from lab.leaves.crowd import Crowd
from lab.leaves.hub import Hub, HubCounts, hub_use
from lab.leaves.node_content import NodeContent, node_name
from lab.leaves.put_floor import bare_puts
from lab.leaves.simulated_node import stored_messages
from lab.leaves.swarm import Order, Report
from lab.leaves.watcher import Watcher
from lab.line_charts import Line, Panel, draw_charts
from topobus.bus.bus import Bus
from topobus.bus.streams.provision import bucket_subject
from topobus.engine.health.silence import Answered
from topobus.formats.messages.catalogue import LEDGER, PREFER
from topobus.process.config import NatsSettings

__all__ = ["Fleet", "draw_growth", "measure_fleet"]

_NEW_NODES = 20
_ASKS = 200
# A process is at rest if it uses less than this part of a core. One that is not after so long is
# measured as it is.
_REST_PART = 0.03
_REST_LIMIT_S = 120.0
_READY_LIMIT_S = 600.0
_FLOOR_NODES = 20
_FLOOR_WINDOW = 256


_PANELS = (
    (
        "resident memory (MiB)",
        (("idle: hub_mib", "the hub", "#27c"), ("controller_mib", "a controller", "#c52")),
    ),
    (
        "all nodes at the same time (s)",
        (
            ("join: all are known_s", "they come, until each is known whole", "#27c"),
            ("controller: until ready_s", "a controller starts", "#c52"),
            ("restart: all linked again_s", "the hub was restarted, all linked", "#2a7"),
        ),
    ),
    (
        "messages a second at the hub, at rest",
        (
            ("with a controller: hub's messages_per_s", "with a controller", "#c52"),
            ("idle: hub's messages_per_s", "nodes and a watcher alone", "#27c"),
        ),
    ),
)


class Fleet(Struct, frozen=True, kw_only=True):
    """What to measure."""

    nodes: int
    content: NodeContent
    rest_s: float
    """How long to count while nothing happens."""
    cluster: str = ""
    has_controller: bool = True
    change_s: float = 5.0
    parent: Path | None = None
    """Where the hub's folder is made. None: the system's temporary folder. That disk limits a hub
    that syncs each write."""
    settle_s: float = 3.0
    """Pause before a count: effects of the step before have ended by then (acknowledgements, the
    hub's own work, garbage of both)."""


async def measure_fleet(fleet: Fleet) -> dict[str, Any]:
    """Measure one size, with a hub of its own."""
    folder = Path(tempfile.mkdtemp(prefix="topobus-leaves-", dir=fleet.parent))
    try:
        floor = await _measure_floor(fleet, folder)
        async with AsyncExitStack() as stack:
            hub = await stack.enter_async_context(Hub(parent=folder))
            bus = await stack.enter_async_context(Bus.session(NatsSettings(url=hub.url), name="topobus-cli"))
            await bus.provision()
            watcher = await stack.enter_async_context(Watcher(bus, fleet.content))
            crowd = await stack.enter_async_context(Crowd(hub.leaf_port, fleet.content, folder, cluster=fleet.cluster))
            row: dict[str, Any] = {
                "nodes": fleet.nodes,
                "server": ".".join(map(str, hub.version)),
                "a node says_kib": fleet.content.bytes_of() / 1024,
                "a node says_messages": len(fleet.content.sayings),
            }
            row |= await _join(hub, crowd, watcher, fleet)
            row |= await _rest(hub, fleet, "idle")
            row |= await _new_nodes(crowd, watcher, fleet)
            row |= await _ask(hub, bus, fleet)
            row |= await _change(hub, crowd, fleet)
            if fleet.has_controller:
                row |= await _controller(hub, fleet, folder)
            row |= await _restart(hub, crowd, fleet)
            row |= floor
            row["join, times the floor"] = row["join: all acknowledged_s"] / row["floor: all of a fleet put_s"]
            row["changes, part of the floor"] = row["changes_per_s"] / row["floor: ledgers_per_s"]
            return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def draw_growth(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw how a hub grows with its nodes: memory, times and idle messages.

    Shapes: rows — one per size of the fleet; a figure that a row lacks is left out of its line.
    """

    def line(figure: str, text: str, colour: str) -> Line:
        points = [(float(row["nodes"]), float(row[figure])) for row in rows if figure in row]
        return Line(text, colour, points)

    return draw_charts(
        [Panel(title=title, axis="nodes", lines=[line(*each) for each in lines]) for title, lines in _PANELS]
    )


async def _measure_floor(fleet: Fleet, folder: Path) -> dict[str, Any]:
    """Put the messages of some nodes, and the same number of ledgers, by a plain client at a hub of
    its own.
    """
    nodes = min(fleet.nodes, _FLOOR_NODES)
    async with Hub(parent=folder) as hub, Bus.session(NatsSettings(url=hub.url), name="bench") as bus:
        await bus.provision()
        messages = [message for number in range(nodes) for message in stored_messages(node_name(number), fleet.content)]
        spent = read_counts(hub.pid).processor_s
        count, all_s = await bare_puts(hub.port, messages, window=_FLOOR_WINDOW)
        spent = read_counts(hub.pid).processor_s - spent
        ledger = next(
            message for message in messages if message[0] == bucket_subject(LEDGER, LEDGER.key(node=node_name(0)))
        )
        ledgers, ledgers_s = await bare_puts(
            hub.port, [ledger] * max(2000, fleet.nodes), window=min(fleet.nodes, _FLOOR_WINDOW)
        )
    return {
        "floor: all of a fleet put_s": all_s * fleet.nodes / nodes,
        "floor: puts_per_s": count / all_s,
        "floor: hub's processor for a node_ms": spent * 1000 / nodes,
        "floor: ledgers_per_s": ledgers / ledgers_s,
    }


async def _join(hub: Hub, crowd: Crowd, watcher: Watcher, fleet: Fleet) -> dict[str, Any]:
    before = await hub.counts()
    reports = await crowd.order(Order(do="join", count=fleet.nodes))
    names = [node_name(number) for number in range(fleet.nodes)]
    seen_at = await watcher.wait_for(names)
    began_at = min(report.began_at for report in reports)
    await asyncio.sleep(fleet.settle_s)
    after = await hub.counts()
    use = hub_use(before, after)
    counts = _sum_counts(reports)
    return {
        "hub without nodes_mib": before.resident_mib,
        "join: all acknowledged_s": max(report.ended_at for report in reports) - began_at,
        "join: all are known_s": max(seen_at) - began_at,
        "join: hub's processor_s": after.processor_s - before.processor_s,
        "join: hub after it_mib": use.resident_mib,
        "join: interest lines to a leaf": counts.get("Interest in", 0) / fleet.nodes,
        "join: subscriptions at the hub": after.subscriptions,
        "join: links lost meanwhile": sum(report.losses for report in reports),
    }


async def _rest(hub: Hub, fleet: Fleet, what: str) -> dict[str, Any]:
    await asyncio.sleep(fleet.settle_s)
    before = await hub.counts()
    await asyncio.sleep(fleet.rest_s)
    after = await hub.counts()
    use = hub_use(before, after)
    return {
        f"{what}: hub's messages_per_s": use.messages_in_per_s + use.messages_out_per_s,
        f"{what}: with leaves, a node_per_s": use.leaf_messages_per_s / max(after.leaves, 1),
        f"{what}: hub's bytes_per_s": use.bytes_in_per_s + use.bytes_out_per_s,
        f"{what}: hub's processor_%": use.processor_percent,
        f"{what}: hub_mib": use.resident_mib,
    }


async def _new_nodes(crowd: Crowd, watcher: Watcher, fleet: Fleet) -> dict[str, Any]:
    """Start nodes one by one beside all that are there."""
    times_s: list[float] = []
    for number in range(fleet.nodes, fleet.nodes + _NEW_NODES):
        report = await crowd.order_one(Order(do="join", first=number, count=1))
        seen_at = await watcher.wait_for([node_name(number)])
        times_s.append(seen_at[0] - report.began_at)
    return {
        "new node is known_p50_ms": _part(times_s, 0.5) * 1000,
        "new node is known_p99_ms": _part(times_s, 0.99) * 1000,
    }


async def _ask(hub: Hub, bus: Bus, fleet: Fleet) -> dict[str, Any]:
    """Ask nodes for a sign of life, one after the other, as a person's command does."""
    times_s: list[float] = []
    for number in range(_ASKS):
        began = time.monotonic()
        answer = await bus.is_answered(PREFER, timeout_s=30.0, node=node_name(number % fleet.nodes))
        if not isinstance(answer, Answered):
            raise RuntimeError(f"{node_name(number % fleet.nodes)} does not answer: {answer}")
        times_s.append(time.monotonic() - began)
    before = await hub.counts()
    async with Bus.session(NatsSettings(url=hub.url), name="topobus-cli") as other:
        await other.is_answered(PREFER, timeout_s=30.0, node=node_name(0))
    await asyncio.sleep(fleet.settle_s)
    after = await hub.counts()
    return {
        "ask of a node_p50_ms": _part(times_s, 0.5) * 1000,
        "ask of a node_p99_ms": _part(times_s, 0.99) * 1000,
        "a command that connects and asks: hub's processor_ms": (after.processor_s - before.processor_s) * 1000,
    }


async def _change(hub: Hub, crowd: Crowd, fleet: Fleet) -> dict[str, Any]:
    before = await hub.counts()
    reports = await crowd.order(Order(do="change", seconds=fleet.change_s))
    after = await hub.counts()
    times_ms = sorted(each for report in reports for each in report.acknowledged_ms)
    elapsed_s = max(report.ended_at for report in reports) - min(report.began_at for report in reports)
    return {
        "changes_per_s": len(times_ms) / elapsed_s,
        "change is acknowledged_p50_ms": _part(times_ms, 0.5),
        "change is acknowledged_p99_ms": _part(times_ms, 0.99),
        "hub's processor for a change_us": (after.processor_s - before.processor_s) * 1e6 / max(len(times_ms), 1),
    }


async def _controller(hub: Hub, fleet: Fleet, folder: Path) -> dict[str, Any]:
    """Run a real controller over what the nodes published."""
    began = time.monotonic()
    async with bench_service("controller", hub.url, folder) as controller:
        await wait_ready([controller], limit_s=_READY_LIMIT_S)
        ready_s = time.monotonic() - began
        pid = controller.pid
        await _until_rested(pid, fleet)
        rested_s = time.monotonic() - began
        before = read_counts(pid)
        figures = await _rest(hub, fleet, "with a controller")
        after = read_counts(pid)
    return {
        "controller: until ready_s": ready_s,
        "controller: until at rest_s": rested_s,
        "controller: processor until at rest_s": before.processor_s,
        "controller_mib": after.resident_mib,
        "controller: idle, processor_%": (after.processor_s - before.processor_s)
        / (fleet.rest_s + fleet.settle_s)
        * 100,
        **figures,
    }


async def _until_rested(pid: int, fleet: Fleet) -> None:
    """Wait until a process has done the work of its start: it reads, compiles and frees memory for
    a while after it is ready.
    """
    ends_at = time.monotonic() + _REST_LIMIT_S
    used_s = read_counts(pid).processor_s
    while time.monotonic() < ends_at:
        await asyncio.sleep(fleet.settle_s)
        before_s, used_s = used_s, read_counts(pid).processor_s
        if used_s - before_s <= _REST_PART * fleet.settle_s:
            return


async def _restart(hub: Hub, crowd: Crowd, fleet: Fleet) -> dict[str, Any]:
    """Stop the hub and start it again on its store: all nodes connect again at the same time."""
    coming_back = asyncio.create_task(crowd.order(Order(do="rejoin")))
    await asyncio.sleep(fleet.settle_s)
    stopped_at = time.monotonic()
    await hub.stop()
    await hub.start()
    up_at = time.monotonic()
    reports = await coming_back
    back_at = max(report.ended_at for report in reports)
    compared = await crowd.order(Order(do="compare"))
    counts: HubCounts = await hub.counts()
    return {
        "restart: hub stops and reads its store_s": up_at - stopped_at,
        "restart: all linked again_s": back_at - up_at,
        "restart: all compared with the hub_s": max(each.ended_at for each in compared)
        - min(each.began_at for each in compared),
        "restart: hub's processor_s": counts.processor_s,
        "restart: hub_mib": counts.resident_mib,
    }


def _sum_counts(reports: Sequence[Report]) -> dict[str, int]:
    names = {name for report in reports for name in report.counts}
    return {name: sum(report.counts.get(name, 0) for report in reports) for name in names}


def _part(times: Sequence[float], part: float) -> float:
    ordered = sorted(times)
    return statistics.median(ordered) if part == 0.5 else ordered[min(len(ordered) - 1, int(len(ordered) * part))]
