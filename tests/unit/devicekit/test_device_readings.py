"""The lines of devices at /metrics: one for each reading, with the holder of the moment, bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric

from support.toy_driver import ToyDriver
from topobus.devicekit.driver import DeviceDriver
from topobus.devicekit.host.device_readings import ClassReadings
from topobus.devicekit.host.driver_poller import DriverPoller
from topobus.devicekit.host.isolation import IsolatedDriver
from topobus.devicekit.host.metrics import DeviceSeries
from topobus.devicekit.journal.journal import Journal
from topobus.devicekit.settings import DeviceServiceSettings, DriverSettings
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.clock import ManualClock
from topobus.values.device import Device
from topobus.values.ledger import Allocation, Holders, Holding
from topobus.values.machine import Machine
from topobus.values.readings import Quantity, Reading
from topobus.values.request import Owner, OwnerKind

POWER = Reading(quantity=Quantity.POWER, value=71.5)
HOLDER = {"namespace": "team", "pod": "trainer", "container": "main", "claim": ""}
NO_HOLDER = dict.fromkeys(HOLDER, "")


def _pod(name: str = "trainer") -> Owner:
    return Owner(kind=OwnerKind.POD, namespace="team", name=name, uid="u")


def _held(*owners: Owner) -> Holders:
    holdings = (Holding(container="main", devices={"gpu": ("gpu-0",)}),)
    return Holders(node="n1", allocations={owner.key: Allocation(owner=owner, holdings=holdings) for owner in owners})


def _lines(registry: CollectorRegistry, name: str) -> list[tuple[dict[str, str], float]]:
    metrics: list[Metric] = list(registry.collect())
    return [(sample.labels, sample.value) for metric in metrics for sample in metric.samples if sample.name == name]


def _exported(
    readings: Mapping[str, Sequence[Reading]], ledger: Holders | None = None, count: int = 1
) -> CollectorRegistry:
    registry = CollectorRegistry()
    devices = [Device(name=f"gpu-{number}", device_class="gpu", uuid=f"GPU-{number}") for number in range(count)]
    seen = ClassReadings(node="n1", devices=devices, readings=readings, ledger=ledger)
    DeviceSeries(registry).of("gpu").export_readings(lambda: seen)
    return registry


def test_line_names_device_and_holder_when_one_pod_has_it() -> None:
    """By the labels that users of dcgm-exporter know."""
    registry = _exported({"gpu-0": [POWER]}, _held(_pod()))

    device = {"node": "n1", "class": "gpu", "device": "gpu-0", "uuid": "GPU-0"}
    assert _lines(registry, "topobus_device_power_watts") == [({**device, **HOLDER}, 71.5)]
    assert _lines(registry, "topobus_device_held") == [({**device, **HOLDER, "state": "healthy"}, 1)]


def test_device_of_several_pods_has_one_line_of_its_power_and_one_for_each_holder() -> None:
    """A sum over pods has the power once."""
    registry = _exported({"gpu-0": [POWER]}, _held(_pod("a"), _pod("b")))

    ((labels, _),) = _lines(registry, "topobus_device_power_watts")
    assert {name: labels[name] for name in HOLDER} == NO_HOLDER
    assert [labels["pod"] for labels, _ in _lines(registry, "topobus_device_held")] == ["a", "b"]


def test_free_device_has_readings_and_no_holder() -> None:
    """Before the ledger is read every device looks free."""
    for ledger in (None, Holders(node="n1")):
        registry = _exported({"gpu-0": [POWER]}, ledger)

        ((labels, _),) = _lines(registry, "topobus_device_power_watts")
        assert {name: labels[name] for name in HOLDER} == NO_HOLDER
        assert _lines(registry, "topobus_device_held") == []


def test_counter_and_part_have_names_and_labels_of_their_own() -> None:
    """A reading of several parts has a label for them, and what counts ends in `_total`."""
    readings = [
        Reading(quantity=Quantity.SENT, part="nvlink", value=5),
        Reading(quantity=Quantity.TEMPERATURE, part="memory", value=80),
    ]

    registry = _exported({"gpu-0": readings})

    ((sent, _),) = _lines(registry, "topobus_device_sent_bytes_total")
    ((temperature, _),) = _lines(registry, "topobus_device_temperature_celsius")
    assert (sent["path"], temperature["part"]) == ("nvlink", "memory")


@pytest.mark.parametrize("quantity", Quantity)
def test_every_quantity_has_a_metric(quantity: Quantity) -> None:
    """Its name ends as the quantity says."""
    parts = ("", "core", "pcie", "corrected", "received")

    registry = _exported({"gpu-0": [Reading(quantity=quantity, part=part, value=1) for part in parts]})

    assert len(_lines(registry, f"topobus_device_{quantity}")) == 1


def test_lines_are_bounded_and_what_is_left_out_is_counted() -> None:
    """Whatever a third party's driver or a busy node brings: 1,024 devices, 16 holders, and readings
    that are numbers of what exists.
    """
    odd = [POWER, Reading(quantity=Quantity.POWER, value=math.nan), Reading(quantity=Quantity.SENT, part="x", value=1)]
    pods = tuple(_pod(f"p{number}") for number in range(20))

    registry = _exported({"gpu-0": odd}, _held(*pods), count=1030)

    assert len(_lines(registry, "topobus_device_held")) == 16
    assert len(_lines(registry, "topobus_device_power_watts")) == 1
    assert {labels["what"]: value for labels, value in _lines(registry, "topobus_device_lines_left_out")} == {
        "devices": 6,
        "holders": 4,
        "readings": 2,
    }


class _Meter(ToyDriver):
    """A driver that measures, and counts how often."""

    reads = 0
    fault: Exception | None = None
    garbage: Any = None

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Give the number of this reading as the power."""
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        if self.garbage is not None:
            return self.garbage
        return {device.name: [Reading(quantity=Quantity.POWER, value=self.reads)] for device in devices}


class _Measured:
    def __init__(self, root: Path, driver: DeviceDriver) -> None:
        settings = DeviceServiceSettings(
            node="n", hardware=HardwareSettings(root=str(root)), drivers=DriverSettings(timeout_s=60.0)
        )
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        isolated = IsolatedDriver(driver, timeout_s=60.0, clock=self.clock)
        metrics = DeviceSeries(self.registry).of("gpu")
        self.poller = DriverPoller(
            isolated, Tree(settings.hardware), settings, self.clock, metrics, Journal(root / "journal")
        )

    async def look(self, after_s: float = 1.0) -> float | None:
        """Look once, and give the power of the one device."""
        self.clock.advance(after_s)
        await self.poller.poll(Machine(node="n", generation=1, numa_nodes=(), cpus=()), ())
        return next((reading.value for seen in self.poller.readings.values() for reading in seen), None)


async def test_readings_are_taken_each_ten_seconds_with_a_look_at_health(tmp_path: Path) -> None:
    """Looks come each second; the readings between two are those of the last time."""
    measured = _Measured(tmp_path, _Meter(count=1))

    seen = [await measured.look() for _ in range(21)]

    assert seen == [1.0] * 10 + [2.0] * 10 + [3.0]


async def test_devices_stay_healthy_when_a_driver_fails_to_measure(tmp_path: Path) -> None:
    """The failure is counted, the readings are gone, and they come back with the next time."""
    driver = _Meter(count=1)
    measured = _Measured(tmp_path, driver)
    driver.fault = RuntimeError("no sensor")
    without = await measured.look()
    labels = {"class": "gpu", "driver": "toy", "call": "measure", "outcome": "failed"}
    failures = measured.registry.get_sample_value("topobus_device_driver_failures_total", labels)
    view = measured.poller.view
    driver.fault = None

    assert (without, failures, view.silence) == (None, 1, None)
    assert await measured.look(after_s=10.0) == 2.0


@pytest.mark.parametrize(
    "garbage",
    [None, 5, {"gpu-toy-0": 5}, {"gpu-toy-0": [7]}, {"gpu-toy-0": [Reading(quantity="speed", value="x")]}],  # type: ignore[arg-type]  # what a vendor's plugin may do
    ids=["nothing", "no mapping", "no readings", "a number", "no quantity"],
)
async def test_scrape_goes_on_when_a_driver_measures_garbage(tmp_path: Path, garbage: object) -> None:
    """It counts as a failure of the driver, and the lines of its neighbours are written."""
    driver = _Meter(count=1)
    driver.garbage = garbage if garbage is not None else {"gpu-toy-0": None}
    measured = _Measured(tmp_path, driver)

    assert await measured.look() is None
    labels = {"class": "gpu", "driver": "toy", "call": "measure", "outcome": "failed"}
    assert measured.registry.get_sample_value("topobus_device_driver_failures_total", labels) == 1


async def test_readings_are_gone_while_a_driver_is_silent(tmp_path: Path) -> None:
    """What it measured before it failed is no reading of now."""
    driver = _Meter(count=1)
    measured = _Measured(tmp_path, driver)
    before = await measured.look()
    driver.error = RuntimeError("gone")

    assert (before, await measured.look()) == (1.0, None)


async def test_driver_without_the_verb_is_never_measured(tmp_path: Path) -> None:
    """The verb is optional."""
    assert await _Measured(tmp_path, ToyDriver(count=1)).look() is None
