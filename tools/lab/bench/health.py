"""Measures how long a fault takes to be known everywhere: `python -m lab.bench health [--json]`.

Real processes (nats-server, discovery, all device services, topology, gateway) with their default
settings on the machine of `device_faults`, a simulated kubelet and API server. Each recorded fault
is triggered by itself. The times run from the file's change to the health event at a subscriber, to
kubelet's pod status, to the taint in the ResourceSlice, and to the metric. A device that is only
degraded may still be allocated, so kubelet and slices do not report it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct, structs

from lab.bench.figures import machine_facts
from lab.bench.node_processes import NODE, BenchNode, bench_node
from lab.device_faults import FAULTS, PlacedFault, build_faulty, place_faults
from topobus.formats.messages.catalogue import HEALTH, INVENTORY
from topobus.formats.messages.messages import HealthEvent
from topobus.simulation.machines import RecordedMachine
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.device import Device, Inventory
from topobus.values.dra_names import DRIVER, class_of_device, pool_of_class
from topobus.values.health import HealthState

__all__ = ["Taken", "main"]

_CLASSES = ("gpu", "nic", "fpga", "cpu")
_SERVICES = ("discovery", *_CLASSES, "topology", "gateway")
_TARGET_S = 2.0
# A path on which nothing arrives by then is reported as such.
_LIMIT_S = 30.0
_SCRAPE_PAUSE_S = 0.02
_KUBELET_STATES = {HealthState.UNHEALTHY: "Unhealthy", HealthState.UNKNOWN: "Unknown"}


class Taken(Struct, frozen=True, kw_only=True):
    """The times of one fault on each path, in milliseconds from the file's change.

    None: that path does not report it.
    """

    code: str
    driver: str
    state: HealthState
    event_ms: float
    metric_ms: float
    pod_status_ms: float | None
    taint_ms: float | None

    @property
    def longest_ms(self) -> float:
        """The time of the slowest path."""
        return max(
            value for value in (self.event_ms, self.metric_ms, self.pod_status_ms, self.taint_ms) if value is not None
        )


class _Listener:
    """Records when each event of the stream came."""

    def __init__(self) -> None:
        self._came: list[tuple[float, HealthEvent]] = []
        self._has_come = asyncio.Condition()

    async def listen(self, node: BenchNode) -> None:
        """Follow the stream until cancelled."""
        async for received in node.bus.follow(HEALTH, node=NODE):
            async with self._has_come:
                self._came.append((time.perf_counter(), received.value))
                self._has_come.notify_all()

    async def arrival(self, devices: Sequence[str], reason: str, after: float) -> float:
        """Wait until all these devices have an event with the reason.

        Returns when the last of them came.
        """

        def first(device: str) -> float | None:
            return next(
                (
                    at
                    for at, event in self._came
                    if at > after
                    and event.device == device
                    and any(part.reason == reason for part in event.health.conditions)
                ),
                None,
            )

        async with self._has_come:
            await self._has_come.wait_for(lambda: all(first(device) is not None for device in devices))
            return max(first(device) or 0.0 for device in devices)


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status: 1 when a path took longer than 2 s."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench health", description="Measure the time from a fault until each reader knows of it."
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    facts = machine_facts()
    rows = asyncio.run(_measure())
    longest = max(rows, key=lambda row: row.longest_ms)
    if arguments.json:
        cases = [{**structs.asdict(row), "longest_ms": row.longest_ms} for row in rows]
        summary = {"code": longest.code, "longest_ms": longest.longest_ms, "target_ms": _TARGET_S * 1000}
        print(
            json.dumps(
                {"group": "health", "unit": "ms", "machine": facts, "longest": summary, "cases": cases}, indent=2
            )
        )
    else:
        print(" ".join(f"{key}={value}" for key, value in facts.items()))
        for row in rows:
            print(_line(row))
        for column in ("event_ms", "metric_ms", "pod_status_ms", "taint_ms"):
            values = [value for row in rows if (value := getattr(row, column)) is not None]
            print(f"{column:<16} median {statistics.median(values):7.0f}  largest {max(values):7.0f}  of {len(values)}")
        print(
            f"largest of all: {longest.code} of {longest.driver}, {longest.longest_ms:.0f} ms (target "
            f"{_TARGET_S * 1000:.0f})"
        )
    return 0 if longest.longest_ms <= _TARGET_S * 1000 else 1


async def _measure() -> list[Taken]:
    with tempfile.TemporaryDirectory(prefix="tbh") as folder:
        async with ApiServerSimulator(token="bench") as server, _node(server, Path(folder)) as node:
            machine = RecordedMachine.open(node.folder / "machine")
            devices = [device for device_class in _CLASSES for device in await _devices(node, server, device_class)]
            placed = place_faults(machine, devices, [fault for fault in FAULTS if fault.act != "tell"])
            listener = _Listener()
            listening = asyncio.create_task(listener.listen(node))
            try:
                return [await _strike(placed_fault, node, server, listener) for placed_fault in placed]
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


@asynccontextmanager
async def _node(server: ApiServerSimulator, folder: Path) -> AsyncIterator[BenchNode]:
    server.put({"kind": "Node", "metadata": {"name": NODE}})
    environment = {
        "TOPOBUS_GATEWAY__CLUSTER__MODE": "kubeconfig",
        "TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG": str(server.write_kubeconfig(folder / "kubeconfig")),
        **{f"TOPOBUS_{device_class.upper()}__JOURNAL__DIR": str(folder / device_class) for device_class in _CLASSES},
    }
    async with bench_node(_SERVICES, make_machine=lambda _, into: build_faulty(into), environment=environment) as node:
        yield node


async def _devices(node: BenchNode, server: ApiServerSimulator, device_class: str) -> Sequence[Device]:
    """Wait until a class is known everywhere, and return its devices."""

    def is_well(inventory: Inventory | None) -> bool:
        return (
            inventory is not None
            and bool(inventory.devices)
            and all(device.health.state is HealthState.HEALTHY for device in inventory.devices)
        )

    pool = pool_of_class(NODE, device_class)
    async with asyncio.timeout(_LIMIT_S):
        async for change in node.bus.watch(INVENTORY, node=NODE, device_class=device_class):
            if change.value is not None and is_well(change.value):
                for device in change.value.devices:
                    await node.kubelet.wait_for_health(DRIVER, pool, device.name, "Healthy")
                await _until_published(server, device_class, {device.name for device in change.value.devices})
                return change.value.devices
    raise AssertionError("the watch ended")


async def _until_published(server: ApiServerSimulator, device_class: str, names: set[str]) -> None:
    await server.until(lambda: names <= _tainted_by_device(server, device_class).keys(), what="all devices in slices")


async def _strike(placed: PlacedFault, node: BenchNode, server: ApiServerSimulator, listener: _Listener) -> Taken:
    fault, names = placed.fault, placed.names
    service = node.services[fault.device_class]
    metric = f'topobus_device_health_events_total{{class="{fault.device_class}",reason="{fault.code}",state="{fault.state}"}}'  # noqa: E501
    wanted = await _sample(service.port, metric) + len(names)
    kubelet_state = _KUBELET_STATES.get(fault.state)
    pool = pool_of_class(NODE, fault.device_class)

    async def pod_status() -> None:
        for name in names:
            await node.kubelet.wait_for_health(DRIVER, pool, name, kubelet_state or "", timeout_s=_LIMIT_S)

    async def taint() -> None:
        await server.until(
            lambda: all(_tainted_by_device(server, fault.device_class).get(name) for name in names),
            timeout_s=_LIMIT_S,
            what="all taints",
        )

    async def counted() -> None:
        # As a reader of metrics does, only more often.
        while await _sample(service.port, metric) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(_SCRAPE_PAUSE_S)

    began = time.perf_counter()
    placed.strike()
    # The file has changed by now, and not before, so no time is measured too short.
    began = max(began, time.perf_counter() - 0.001)

    async def taken(wait: Callable[[], Awaitable[object]]) -> float:
        await wait()
        return round((time.perf_counter() - began) * 1000, 1)

    async with _limit(fault.code):
        event_at, metric_ms, pod_status_ms, taint_ms = await asyncio.gather(
            listener.arrival(names, fault.code, began),
            taken(counted),
            taken(pod_status) if kubelet_state else _nothing(),
            taken(taint) if kubelet_state else _nothing(),
        )
    return Taken(
        code=fault.code,
        driver=fault.driver,
        state=fault.state,
        event_ms=round((event_at - began) * 1000, 1),
        metric_ms=metric_ms or 0.0,
        pod_status_ms=pod_status_ms,
        taint_ms=taint_ms,
    )


@asynccontextmanager
async def _limit(code: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_LIMIT_S):
            yield
    except TimeoutError as err:
        raise TimeoutError(f"{code} did not arrive by all ways within {_LIMIT_S:g} s") from err


async def _nothing() -> None:
    return None


async def _sample(port: int, metric: str) -> float:
    """Read one line of a service's /metrics. 0 when it is not there yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await writer.drain()
        text = (await reader.read()).decode("utf-8", errors="replace")
    finally:
        writer.close()
    match = re.search(rf"^{re.escape(metric)} (\S+)$", text, re.MULTILINE)
    return float(match.group(1)) if match is not None else 0.0


def _tainted_by_device(server: ApiServerSimulator, device_class: str) -> dict[str, bool]:
    """Map each device of the class in slices to whether its health taints it."""
    return {
        device["name"]: any(taint["key"] == "topobus.dev/health" for taint in device.get("taints", ()))
        for resource_slice in server.objects("ResourceSlice")
        for device in resource_slice["spec"].get("devices", ())
        if class_of_device(resource_slice["spec"]["driver"], device["name"]) == device_class
    }


def _line(row: Taken) -> str:
    times = [
        f"{'-' if value is None else format(value, '.0f'):>7}"
        for value in (row.event_ms, row.metric_ms, row.pod_status_ms, row.taint_ms)
    ]
    return (
        f"{row.code:<30} {row.driver:<12} {row.state:<10} event {times[0]}  metric {times[1]}  pod status "
        f"{times[2]}  taint {times[3]}"
    )
