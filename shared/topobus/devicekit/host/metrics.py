"""What a device service counts, for Prometheus. The class is a label.

Reasons are counted by name up to a number, because a third-party driver could invent them.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry

from topobus.devicekit.host.device_readings import ClassReadings, ReadingSeries
from topobus.process.metric_descriptors import CounterDescriptor, GaugeDescriptor, HistogramDescriptor
from topobus.values.device import Device
from topobus.values.health import HealthState
from topobus.values.request import Owner, OwnerKind

__all__ = ["DeviceMetrics", "DeviceSeries"]

# So many reasons have a series of their own. A driver that invents reasons must not fill the memory
# of a metrics server.
_REASONS = 64
# Seconds; from a look at files in memory to the longest work of a driver (a bitstream, a reset).
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

_CLASS = "the device class of this service"
_STATES = tuple(str(state) for state in HealthState)
_REASON = (
    f"a code of docs/reference/health-reasons.md or of a plugin; empty: none; `other`: beyond {_REASONS} different ones"
)
_DRIVER = "a plugin's driver"

DEVICES = GaugeDescriptor(
    name="topobus_device_inventory_devices",
    meaning="Devices in the published inventory, by health and the reason that decides.",
    labels={"class": _CLASS, "state": _STATES, "reason": _REASON},
)
AFFECTED_PODS = GaugeDescriptor(
    name="topobus_device_affected_pods",
    meaning="Pods that use a device in this state; healthy ones are not counted.",
    labels={"class": _CLASS, "state": _STATES},
)
AFFECTED_CLAIMS = GaugeDescriptor(
    name="topobus_device_affected_claims",
    meaning="Claims that hold a device in this state; healthy ones are not counted.",
    labels={"class": _CLASS, "state": _STATES},
)
UNPUBLISHED = GaugeDescriptor(
    name="topobus_device_inventory_unpublished",
    meaning="1 while the newest inventory cannot be published and readers have an older one.",
    labels={"class": _CLASS},
)
HEALTH_EVENTS = CounterDescriptor(
    name="topobus_device_health_events_total",
    meaning="Health events, by the state and the reason that decides; healthy ones have no reason.",
    labels={"class": _CLASS, "state": _STATES, "reason": _REASON},
)
DRIVER_CALL_SECONDS = HistogramDescriptor(
    name="topobus_device_driver_call_seconds",
    meaning="How long a driver's methods ran, and with them the vendor's library (NVML); a look repeats `observe` "
    "and, when due, `discover`.",
    labels={"class": _CLASS, "driver": _DRIVER, "call": "the method, `look`, `undo` or `long work`"},
    buckets=_BUCKETS,
)
DRIVER_FAILURES = CounterDescriptor(
    name="topobus_device_driver_failures_total",
    meaning="Polls of a driver that failed or hung.",
    labels={"class": _CLASS, "driver": _DRIVER, "call": "the method, or `a look`", "outcome": ("failed", "hung")},
)
PLUGINS_SKIPPED = CounterDescriptor(
    name="topobus_device_plugins_skipped_total",
    meaning="Plugins that could not be loaded.",
    labels={"class": _CLASS, "plugin": "an installed entry point"},
)


class DeviceSeries:
    """The series of all device classes that a process serves, made once per registry: a gateway
    serves a class for each foreign plugin.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.devices = DEVICES.register(registry)
        self.affected_pods = AFFECTED_PODS.register(registry)
        self.affected_claims = AFFECTED_CLAIMS.register(registry)
        self.unpublished = UNPUBLISHED.register(registry)
        self.events = HEALTH_EVENTS.register(registry)
        self.calls_s = DRIVER_CALL_SECONDS.register(registry)
        self.failures = DRIVER_FAILURES.register(registry)
        self.skips = PLUGINS_SKIPPED.register(registry)
        self.readings = ReadingSeries(registry)
        self._classes: dict[str, DeviceMetrics] = {}

    def of(self, device_class: str) -> DeviceMetrics:
        """Return a class's metrics.

        They are the same each time, because a restarted service of the class removes the lines of
        its previous run.
        """
        if device_class not in self._classes:
            self._classes[device_class] = DeviceMetrics(self, device_class)
        return self._classes[device_class]


class DeviceMetrics:
    """All metrics of one class's service."""

    def __init__(self, series: DeviceSeries, device_class: str) -> None:
        self._class = device_class
        self._series = series
        self._reasons: set[str] = set()
        """Those that have a line of their own."""
        self._lines: set[tuple[str, str]] = set()
        """States and reasons of which the inventory has a line now."""
        self.set_unpublished(is_unpublished=False)

    def set_unpublished(self, *, is_unpublished: bool) -> None:
        """Record whether an older inventory is published in place of the newest."""
        self._series.unpublished.labels(self._class).set(is_unpublished)

    def count_event(self, device: Device) -> None:
        """Count a published health event."""
        self._series.events.labels(self._class, str(device.health.state), self._reason_of(device)).inc()

    def count_failure(self, driver: str, call: str, outcome: str) -> None:
        """Count a poll that failed or hung."""
        self._series.failures.labels(self._class, driver, call, outcome).inc()

    def count_skipped(self, plugin: str) -> None:
        """Count a plugin that is not loaded."""
        self._series.skips.labels(self._class, plugin).inc()

    def note_call(self, driver: str, call: str, elapsed_s: float) -> None:
        """Record how long a driver's method ran. Callable from any thread."""
        self._series.calls_s.labels(self._class, driver, call).observe(elapsed_s)

    def export_readings(self, source: Callable[[], ClassReadings]) -> None:
        """Have the class's devices, their readings and their holders read at each scrape."""
        self._series.readings.add(self._class, source)

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Record the devices of the published inventory."""
        counts = Count((str(device.health.state), self._reason_of(device)) for device in devices)
        # Each state has a line at any time, so that an alert on it does
        # not wait for the first device.
        lines = {**{(state, ""): 0 for state in _STATES}, **counts}
        for (state, reason), count in lines.items():
            self._series.devices.labels(self._class, state, reason).set(count)
        for state, reason in self._lines - lines.keys():
            self._series.devices.remove(self._class, state, reason)
        self._lines = set(lines)

    def set_affected(
        self,
        devices: Iterable[Device],
        owners: Callable[[str], Iterable[Owner]],
        pods: Callable[[str], Iterable[Owner]],
    ) -> None:
        """Record the users of devices that are not Healthy."""
        users = {state: set[str]() for state in _STATES}
        claims = {state: set[str]() for state in _STATES}
        for device in devices:
            if device.health.state is not HealthState.HEALTHY:
                users[str(device.health.state)] |= {pod.key for pod in pods(device.name)}
                claims[str(device.health.state)] |= {
                    owner.key for owner in owners(device.name) if owner.kind is OwnerKind.CLAIM
                }
        for state in _STATES:
            self._series.affected_pods.labels(self._class, state).set(len(users[state]))
            self._series.affected_claims.labels(self._class, state).set(len(claims[state]))

    def _reason_of(self, device: Device) -> str:
        worst = device.health.worst
        reason = worst.reason if worst is not None else ""
        if reason and len(self._reasons) < _REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons or not reason else "other"
