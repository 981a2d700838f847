"""Measures what the readings of a node's devices cost: `python -m lab.bench readings [--json]
[--libraries FOLDER]`.

The drivers of GPUs and NICs read a recorded machine in this process, and their lines are written as
at a scrape. Processor time is counted, not time on the wall. NVML is asked where the folder has it:
the machine's own, or the library of a profile (`python tests/support/fake_nvml.py FOLDER
ADDRESS...`), of which each call reads the profile again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, structs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from topobus.devicekit.host.device_readings import ClassReadings
from topobus.devicekit.host.driver_poller import READ_EVERY_S
from topobus.devicekit.host.metrics import DeviceSeries
from topobus.devicekit.registry import load_drivers
from topobus.simulation.machines import build
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.readings import Reading

__all__ = ["ReadingCost", "main", "measure"]

_CLASSES = ("gpu", "nic")
_ROUNDS = 50
# What Prometheus asks by default in deploy/monitoring.
_SCRAPE_EVERY_S = 15.0
_BUDGET_PERCENT = 0.5


class ReadingCost(Struct, frozen=True, kw_only=True):
    """What the readings of one class cost."""

    device_class: str
    devices: int
    lines: int
    reading_ms: float
    """Processor time of one reading of all devices."""
    scrape_ms: float
    """Processor time of writing their lines once."""

    @property
    def percent(self) -> float:
        """Share of a core of both, at their pauses."""
        return (self.reading_ms / READ_EVERY_S + self.scrape_ms / _SCRAPE_EVERY_S) / 10


def measure(machine: str, libraries: str, rounds: int = _ROUNDS) -> list[ReadingCost]:
    """Measure each class of a recorded machine."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        build(machine, Path(folder) / "machine")
        tree = Tree(HardwareSettings(root=str(Path(folder) / "machine"), library_path=libraries), is_revisited=True)
        return [_measure_class(name, tree, rounds) for name in _CLASSES]


def main(argv: Sequence[str]) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench readings", description="Measure the readings' cost.")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--libraries", default="", metavar="FOLDER", help="a folder with libnvidia-ml.so.1")
    parser.add_argument("--machine", default="dgx", metavar="NAME", help="the recorded machine (dgx: 8 GPUs, 8 NICs)")
    arguments = parser.parse_args(argv)
    costs = measure(arguments.machine, arguments.libraries)
    if arguments.json:
        print(json.dumps([{**structs.asdict(cost), "percent": cost.percent} for cost in costs], indent=2))
        return 0
    for cost in costs:
        print(
            f"{cost.device_class}: {cost.devices} devices, {cost.lines} lines, {cost.reading_ms:.2f} ms a reading, "
            f"{cost.scrape_ms:.2f} ms a scrape: {cost.percent:.3f} % of a core at {READ_EVERY_S:g} and "
            f"{_SCRAPE_EVERY_S:g} s; budget {'kept' if cost.percent <= _BUDGET_PERCENT else 'MISSED'}: "
            f"{_BUDGET_PERCENT:g} %"
        )
    return 0


def _measure_class(device_class: str, tree: Tree, rounds: int) -> ReadingCost:
    machine = read_machine(tree, "bench-node")
    drivers = [
        (driver, tuple(driver.discover(tree, machine).devices))
        for driver in load_drivers(device_class).drivers
        if driver.capabilities.measures
    ]

    def read() -> dict[str, Sequence[Reading]]:
        return {name: seen for driver, own in drivers for name, seen in driver.measure(tree, own).items()}

    devices = tuple(device for _, own in drivers for device in own)
    readings = read()
    registry = CollectorRegistry()
    seen = ClassReadings(node="bench-node", devices=devices, readings=readings, ledger=None)
    DeviceSeries(registry).of(device_class).export_readings(lambda: seen)
    return ReadingCost(
        device_class=device_class,
        devices=len(devices),
        lines=sum(map(len, readings.values())),
        reading_ms=_processor_ms(read, rounds),
        scrape_ms=_processor_ms(lambda: generate_latest(registry), rounds),
    )


def _processor_ms(work: Callable[[], object], rounds: int) -> float:
    began_s = time.process_time()
    for _ in range(rounds):
        work()
    return (time.process_time() - began_s) * 1000 / rounds
