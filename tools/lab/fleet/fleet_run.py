"""One run of the fleet benchmark: nodes start, claims are stored, the real controller allocates
them, and what is stored at the end is checked.

The result is one flat record of figures, whose names have the units. All processes are real except
the nodes, which one process plays. All have ended at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lab.bench.child_processes import child_process, read_line
from lab.bench.figures import percentile, processor_ms
from lab.bench.node_processes import bench_service
from lab.bench.process_use import processor_s, read_counts
from lab.bench.service_process import ServiceProcess, wait_ready
from lab.fleet.allocation_floor import measure_floor
from lab.fleet.fill_outcome import faults_of, left_at_nodes
from lab.fleet.fleet_claims import NAMESPACE, claim_name, fleet_claim
from lab.fleet.fleet_node import node_template
from lab.fleet.player import READY
from lab.leaves.node_content import NodeContent, node_name
from topobus.bus.bus import Bus
from topobus.formats.kubernetes.objects import object_parts
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import PeerUnavailable

__all__ = ["FleetRun", "measure_run"]

_START_LIMIT_S = 1800.0
_FLOOR_CLAIMS = 1000
_PUTS_AT_ONCE = 64
# docs/explanation/large-fleets.md: what a fleet of DGX needs, with all revisions that buckets keep.
_STORE_MIB_A_NODE = 11
_LEAST_STORE_MIB = 2400
_PROGRESS_CLAIMS = 500

Report = Callable[[str], None]


class FleetRun(Struct, frozen=True, kw_only=True):
    """What to measure."""

    nodes: int
    claims: int
    content: NodeContent
    classes: frozenset[str]
    """The device classes that each node has."""
    replicas: int = 1
    kills: int = 0
    """How often a controller is killed during the fill. Another one starts at once."""
    singles: int = 100
    """Claims that are stored one after the other, when all others are allocated."""
    limit_s: float = 600.0
    """How long the fill may take."""


async def measure_run(run: FleetRun, report: Report) -> dict[str, Any]:
    """Measure one run.

    Errors: raises PeerUnavailable when a process ends by itself or the fill takes too long;
    RuntimeError names the faults found by the check at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="topobus-fleet-"))
    store_mib = max(_LEAST_STORE_MIB, run.nodes * _STORE_MIB_A_NODE)
    try:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(NatsServer(store_limit=f"{4 * store_mib}MB"))
            settings = NatsSettings(url=server.url, store_mib=store_mib)
            bus = await stack.enter_async_context(Bus.session(settings, name="topobus-cli"))
            await bus.provision()
            began = time.monotonic()
            player = await stack.enter_async_context(_player(run, server.url, folder, report))
            row: dict[str, Any] = {
                "nodes": run.nodes,
                "claims": run.claims,
                "a node's devices": sum(
                    len(inventory.devices) for inventory in node_template(run.content, run.classes).inventories
                ),
                "all nodes have come_s": time.monotonic() - began,
            }
            report("measuring the floor: bare messages")
            watched = {"nats-server": server.pid, "nodes": player.pid}
            spent = _processors(watched)
            row["floor: claims a second"] = await measure_floor(
                bus, node_name(0), min(run.classes), min(run.claims, _FLOOR_CLAIMS)
            )
            floor_ms = processor_ms(spent, _processors(watched), min(run.claims, _FLOOR_CLAIMS))
            row |= {f"floor: processor_ms a claim, {name}": value for name, value in floor_ms.items()}
            fill = _Fill(run, bus, server, player.pid, folder, store_mib, report)
            row |= await fill.measure(stack)
            row["claims a second, part of the floor"] = row["claims a second"] / row["floor: claims a second"]
            report("checking what is stored")
            await _check(bus)
            row["devices given twice, claims lost"] = 0
            return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Fill:
    """Stores claims, runs controllers, and waits until each claim is allocated."""

    def __init__(
        self, run: FleetRun, bus: Bus, server: NatsServer, player_pid: int, folder: Path, store_mib: int, report: Report
    ) -> None:
        self._run = run
        self._bus = bus
        self._url = server.url
        self._pids = {"nats-server": server.pid, "nodes": player_pid}
        self._folder = folder
        self._report = report
        self._environment = {
            "TOPOBUS_ALL__NATS__STORE_MIB": str(store_mib),
            "TOPOBUS_ALL__LOG__LEVEL": "warning",
        }
        self._controllers: list[ServiceProcess] = []
        self._allocated: dict[str, float] = {}
        """When each claim was first seen allocated, by the monotonic clock."""
        self._waiting: dict[str, str] = {}
        """The condition of each claim that is not allocated."""
        self._changed = asyncio.Event()

    async def measure(self, stack: AsyncExitStack) -> dict[str, Any]:
        """Fill, then allocate single claims."""
        run = self._run
        self._report(f"storing {run.claims} claims")
        slots = asyncio.Semaphore(_PUTS_AT_ONCE)

        async def store(number: int) -> None:
            async with slots:
                await self._put(fleet_claim(number))

        await asyncio.gather(*(store(number) for number in range(run.claims)))
        is_following = asyncio.Event()
        following = asyncio.create_task(self._follow(is_following))
        stack.push_async_callback(_cancel, following)
        await is_following.wait()
        self._report(f"starting {run.replicas} controller{'s' if run.replicas > 1 else ''}")
        began = time.monotonic()
        for _ in range(run.replicas):
            await self._start(stack)
        await self._reached(1, limit_s=_START_LIMIT_S)
        first_s = time.monotonic() - began
        spent = self._processors()
        gaps_s = [await self._kill(stack, turn) for turn in range(run.kills)]
        await self._reached(run.claims, limit_s=run.limit_s)
        used = self._processors()
        times = sorted(self._allocated.values())
        count = max(run.claims - 1, 1)
        row = {
            "from the controller's start to the first_s": first_s,
            **{
                f"processor_s to the first, {name}": value
                for name, value in spent.items()
                if name.startswith("controller")
            },
            "claims a second": count / max(times[-1] - times[0], 1e-9),
            "all allocated, from the controller's start_s": times[-1] - began,
            "controllers killed": run.kills,
            **({"longest pause after a kill_s": max(gaps_s)} if any(gaps_s) else {}),
        }
        common = {name: value for name, value in used.items() if name in spent}
        row |= {
            f"processor_ms a claim, {name}": value
            for name, value in processor_ms({name: spent[name] for name in common}, common, count).items()
        }
        await wait_ready((service for service in self._controllers if service.is_running), limit_s=run.limit_s)
        row |= await self._singles()
        row |= {
            f"resident_mib, {service.name}": read_counts(service.pid).resident_mib
            for service in self._controllers
            if service.is_running
        }
        row |= {f"resident_mib, {name}": read_counts(pid).resident_mib for name, pid in self._pids.items()}
        return row

    async def _singles(self) -> dict[str, Any]:
        """Store claims one after the other, and return the times until each was seen allocated."""
        run = self._run
        if not run.singles:
            return {}
        self._report(f"{run.singles} single claims")
        spent_s: list[float] = []
        for number in range(run.claims, run.claims + run.singles):
            began = time.monotonic()
            await self._put(fleet_claim(number))
            await self._reached(number + 1, limit_s=run.limit_s)
            spent_s.append(self._allocated[claim_name(number)] - began)
        return {
            "a single claim_ms, median": statistics.median(spent_s) * 1000,
            "a single claim_ms, p99": percentile(spent_s, 0.99) * 1000,
        }

    async def _put(self, api_object: ApiObject) -> None:
        await self._bus.put(catalogue.OBJECT, api_object, **object_parts(api_object))

    async def _follow(self, is_following: asyncio.Event) -> None:
        async with aclosing(self._bus.watch(catalogue.OBJECT)) as changes:
            async for change in changes:
                if change.value is None:
                    is_following.set()
                elif not change.value.status.get("allocation"):
                    conditions = change.value.status.get("conditions") or [{}]
                    self._waiting[change.parts["name"]] = str(conditions[0].get("message", ""))
                elif change.parts["name"] not in self._allocated:
                    self._allocated[change.parts["name"]] = time.monotonic()
                    self._waiting.pop(change.parts["name"], None)
                    self._changed.set()
                    if len(self._allocated) % _PROGRESS_CLAIMS == 0:
                        self._report(f"{len(self._allocated)} of {self._run.claims} claims allocated")

    async def _reached(self, count: int, *, limit_s: float) -> None:
        """Wait until so many claims are allocated.

        Errors: raises PeerUnavailable when that takes too long, with a waiting claim's condition
        and the end of each controller's log.
        """
        try:
            async with asyncio.timeout(limit_s):
                while len(self._allocated) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as err:
            logs = "\n".join(service.read_log() for service in self._controllers)
            name, why = min(self._waiting.items(), default=("", ""))
            waiting = f"; claim {name} says: {why}" if why else ""
            raise PeerUnavailable(
                f"{len(self._allocated)} of {count} claims are allocated after {limit_s:g} s{waiting}\n{logs}"
            ) from err

    async def _kill(self, stack: AsyncExitStack, turn: int) -> float:
        """Kill a controller when its part of the claims is allocated, and start another.

        Returns the longest pause between two consecutive allocations that follow, 0 for none.
        """
        await self._reached(self._run.claims * (turn + 1) // (self._run.kills + 1), limit_s=self._run.limit_s)
        doomed = next(service for service in self._controllers if service.is_running)
        await doomed.kill()
        killed_at = time.monotonic()
        self._report(f"killed {doomed.name} with {len(self._allocated)} claims allocated")
        await self._start(stack)
        left = min(self._run.claims, len(self._allocated) + self._run.claims // (2 * (self._run.kills + 1)))
        await self._reached(left, limit_s=self._run.limit_s)
        times = [killed_at, *sorted(at for at in self._allocated.values() if at > killed_at)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    async def _start(self, stack: AsyncExitStack) -> None:
        label = f"controller-{len(self._controllers)}"
        starting = bench_service("controller", self._url, self._folder, self._environment, label=label)
        self._controllers.append(await stack.enter_async_context(starting))

    def _processors(self) -> dict[str, float]:
        running = [service for service in self._controllers if service.is_running]
        # The killed controller and its replacement are two processes: neither has a time for all
        # claims.
        is_single = len(self._controllers) == 1
        controllers = {"controller" if is_single else f"controller {service.pid}": service.pid for service in running}
        return _processors({**controllers, **self._pids}) | {"benchmark": time.process_time()}


async def _check(bus: Bus) -> None:
    """Compare claims and ledgers.

    Errors: raises RuntimeError with what is wrong.
    """
    claims = [
        {"metadata": entry.value.metadata, "status": entry.value.status}
        for entry in await bus.list(catalogue.OBJECT)
        if entry.value.metadata.get("namespace") == NAMESPACE
    ]
    ledgers = [entry.value for entry in await bus.list(catalogue.LEDGER)]
    faults = faults_of(claims, ledgers, are_reserved=False)
    faults += [f"{device} is held, and no claim has it" for device in left_at_nodes(claims, ledgers)]
    if faults:
        raise RuntimeError(f"{len(faults)} faults in what is stored: " + "; ".join(faults[:10]))


def _processors(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: processor_s(pid) for name, pid in pids.items()}


@asynccontextmanager
async def _player(run: FleetRun, url: str, folder: Path, report: Report) -> AsyncIterator[asyncio.subprocess.Process]:
    content = folder / "content.json"
    content.write_bytes(msgspec.json.encode(run.content))
    arguments = (url, str(run.nodes), str(content), ",".join(sorted(run.classes)))
    async with child_process("lab.fleet.player", *arguments) as process:
        while (line := await read_line(process)) != READY:
            report(f"{line} of {run.nodes} nodes have come")
        yield process


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
