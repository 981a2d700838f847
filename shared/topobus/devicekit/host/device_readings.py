"""Exports the readings of devices, and who holds each of them, for Prometheus.

The lines are made at each scrape from the newest readings, the published devices and the newest
ledger, so a line has the holder of the moment, and a device that is gone has none. A device has one
line for each reading, whoever holds it: sums over devices are right. The line names the holder
where there is exactly one. `topobus_device_held` has a line for each of several.
"""

from __future__ import annotations

import math
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct, structs
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from topobus.engine.ledger.device_users import DeviceHolder, holders_of_devices
from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, MetricDescriptor
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.ledger import Holders
from topobus.values.readings import Quantity, Reading

__all__ = ["DEVICE_LABELS", "ClassReadings", "ReadingSeries", "is_exported"]

# So many devices of a class have lines, and so many holders of one device: a node's cards with all
# their virtual functions, and the replicas of a device that people share.
_MOST_DEVICES = 1024
_MOST_HOLDERS = 16

DEVICE_LABELS: dict[str, str | tuple[str, ...]] = {
    "node": "the service's node",
    "class": "the device class of this service",
    "device": f"a device of the inventory; {_MOST_DEVICES} of a class at most",
    "uuid": "the device's own id; empty: it has none",
    "namespace": "of the pod, or of the claim",
    "pod": "the one pod that has the device; empty: none, or several",
    "container": "the one container that has it; empty: none, several, or not listed by kubelet yet",
    "claim": "the claim by which it has the device; empty: it has it otherwise",
}
_STATES = tuple(str(state) for state in HealthState)
_PARTS = ("core", "memory")
_PATHS = ("pcie", "nvlink", "network", "rdma")
_DIRECTIONS = ("received", "sent")


def _gauge(quantity: Quantity, meaning: str, **own: tuple[str, ...]) -> GaugeDescriptor:
    name = f"topobus_device_{quantity}"
    return GaugeDescriptor(name=name, meaning=meaning, labels={**DEVICE_LABELS, **own}, is_per_device=True)


def _counter(quantity: Quantity, meaning: str, **own: tuple[str, ...]) -> CounterDescriptor:
    name = f"topobus_device_{quantity}"
    return CounterDescriptor(name=name, meaning=meaning, labels={**DEVICE_LABELS, **own}, is_per_device=True)


HELD = GaugeDescriptor(
    name="topobus_device_held",
    meaning="Always 1: a holder of a device, and the device's health; of a class whose drivers give readings.",
    labels={**DEVICE_LABELS, "pod": f"a pod that has it, {_MOST_HOLDERS} of a device at most", "state": _STATES},
    is_per_device=True,
)
LEFT_OUT = GaugeDescriptor(
    name="topobus_device_lines_left_out",
    meaning="What has no line at this scrape: devices and holders beyond the limits, and readings of a driver that "
    "are no finite number or of no part that is listed here.",
    labels={"class": "the device class of this service", "what": ("devices", "holders", "readings")},
)
UTILIZATION = _gauge(Quantity.UTILIZATION, "Share of the last moments in which the device computed, from 0 to 1.")
MEMORY_UTILIZATION = _gauge(
    Quantity.MEMORY_UTILIZATION, "Share of the last moments in which its memory was read or written, from 0 to 1."
)
MEMORY_USED = _gauge(Quantity.MEMORY_USED, "Its own memory in use, with what the driver keeps for itself.")
MEMORY_SIZE = _gauge(Quantity.MEMORY_SIZE, "Its own memory.")
POWER = _gauge(Quantity.POWER, "Power that it takes.")
ENERGY = _counter(Quantity.ENERGY, "Energy that it took since its driver was loaded; the rate is its power.")
TEMPERATURE = _gauge(Quantity.TEMPERATURE, "Its temperature.", part=_PARTS)
CLOCK = _gauge(Quantity.CLOCK, "Its clocks now.", part=_PARTS)
RECEIVED = _counter(Quantity.RECEIVED, "Bytes that it received.", path=_PATHS)
SENT = _counter(Quantity.SENT, "Bytes that it sent.", path=_PATHS)
MEMORY_ERRORS = _counter(
    Quantity.MEMORY_ERRORS, "ECC errors since its driver was loaded.", kind=("corrected", "uncorrected")
)
LINK_ERRORS = _counter(Quantity.LINK_ERRORS, "Frames of its interfaces that were damaged.", direction=_DIRECTIONS)
LINK_DROPS = _counter(Quantity.LINK_DROPS, "Frames of its interfaces that were dropped.", direction=_DIRECTIONS)

_BY_QUANTITY: Mapping[Quantity, MetricDescriptor] = {
    Quantity(metric.name.removeprefix("topobus_device_")): metric
    for metric in (
        *(UTILIZATION, MEMORY_UTILIZATION, MEMORY_USED, MEMORY_SIZE, POWER, ENERGY, TEMPERATURE, CLOCK),
        *(RECEIVED, SENT, MEMORY_ERRORS, LINK_ERRORS, LINK_DROPS),
    )
}
_OWN_LABEL = {
    quantity: next((label for label in descriptor.labels if label not in DEVICE_LABELS), "")
    for quantity, descriptor in _BY_QUANTITY.items()
}


class ClassReadings(Struct, frozen=True, kw_only=True):
    """What a class's service knows of its devices at one moment."""

    node: str
    devices: Sequence[Device]
    readings: Mapping[str, Sequence[Reading]]
    """By the device's name."""
    ledger: Holders | None


class ReadingSeries(Collector):
    """The lines of all classes that a process serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sources: dict[str, Callable[[], ClassReadings]] = {}
        registry.register(self)

    def add(self, device_class: str, source: Callable[[], ClassReadings]) -> None:
        """Call this for a class at each scrape, in the thread of the scrape.

        It takes the place of the source of an earlier run.
        """
        self._sources[device_class] = source

    def describe(self) -> Iterator[Metric]:
        """Give the metrics without their lines."""
        yield from (descriptor.family() for descriptor in (HELD, LEFT_OUT, *_BY_QUANTITY.values()))

    def collect(self) -> Iterator[Metric]:
        """Make the lines.

        Cost: O(devices, their readings and what the ledger has).
        """
        families = {family.name: family for family in self.describe()}

        def add(metric: MetricDescriptor, labels: dict[str, str], value: float) -> None:
            families[metric.name.removesuffix("_total")].add_sample(metric.name, labels, value)

        for device_class, source in sorted(self._sources.items()):
            _add_class(add, device_class, source())
        yield from families.values()


def is_exported(reading: Reading) -> bool:
    """Return whether a driver, which may be a third party's, gave a number of a part that exists."""
    own = _OWN_LABEL[reading.quantity]
    parts = _BY_QUANTITY[reading.quantity].labels[own] if own else ("",)
    return reading.part in parts and math.isfinite(reading.value)


def _add_class(
    add: Callable[[MetricDescriptor, dict[str, str], float], None], device_class: str, seen: ClassReadings
) -> None:
    holders = holders_of_devices(seen.ledger, device_class)
    devices = sorted(seen.devices, key=lambda device: device.name)
    left_out = Count(devices=max(0, len(devices) - _MOST_DEVICES))
    for device in devices[:_MOST_DEVICES]:
        labels = {"node": seen.node, "class": device_class, "device": device.name, "uuid": device.uuid}
        having = holders.get(device.name, ())
        for holder in having[:_MOST_HOLDERS]:
            add(HELD, {**labels, **structs.asdict(holder), "state": str(device.health.state)}, 1)
        left_out["holders"] += max(0, len(having) - _MOST_HOLDERS)
        labels |= structs.asdict(having[0] if len(having) == 1 else DeviceHolder())
        given = seen.readings.get(device.name, ())
        kept = {(reading.quantity, reading.part): reading.value for reading in given if is_exported(reading)}
        left_out["readings"] += len(given) - len(kept)
        for (quantity, part), value in kept.items():
            own = _OWN_LABEL[quantity]
            add(_BY_QUANTITY[quantity], {**labels, own: part} if own else labels, value)
    for what in LEFT_OUT.labels["what"]:
        add(LEFT_OUT, {"class": device_class, "what": what}, left_out[what])
