"""Metrics are declared once, with names and labels that Prometheus' users expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from topobus.devicekit.host.metrics import DeviceSeries
from topobus.process.metric_descriptors import (
    CounterDescriptor,
    GaugeDescriptor,
    HistogramDescriptor,
    MetricDescriptor,
)
from topobus.process.metrics import BusMetrics
from topobus.values.device import Device
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.request import Owner, OwnerKind

_ROOT = Path(__file__).resolve().parents[3]
_DESCRIPTORS = "shared/topobus/process/metric_descriptors.py"


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        pytest.param(GaugeDescriptor, "topobus_test_things_total", {}, id="a gauge with a counter's name"),
        pytest.param(CounterDescriptor, "topobus_test_things", {}, id="a counter with a gauge's name"),
        pytest.param(GaugeDescriptor, "test_things", {}, id="not ours"),
        pytest.param(GaugeDescriptor, "topobus_Test_things", {}, id="a capital letter"),
        pytest.param(GaugeDescriptor, "topobus_test_things", {"uid": "a claim's"}, id="a uid"),
        pytest.param(GaugeDescriptor, "topobus_test_things", {"pod": "a pod's"}, id="a pod"),
    ],
)
def test_descriptor_is_refused_when_it_breaks_the_conventions(
    kind: type[MetricDescriptor], name: str, labels: dict[str, str]
) -> None:
    """A name or a label that breaks the conventions fails where it is declared."""
    with pytest.raises(ValueError, match=name):
        kind(name=name, meaning="Things.", labels=labels)


def test_metrics_are_made_from_descriptors_alone() -> None:
    """No module of a service makes a metric that is not declared: what is not declared is in no
    page and in no check.
    """
    made = [
        str(path.relative_to(_ROOT))
        for room in ("shared", "services", "examples")
        for path in (_ROOT / room).rglob("*.py")
        if re.search(
            r"from prometheus_client import .*\b(Counter|Gauge|Histogram|Summary|Info)\b",
            text := path.read_text(encoding="utf-8"),
        )
        and re.search(r"\b(Counter|Gauge|Histogram|Summary|Info)\(\s*f?\"", text)
    ]

    assert made == []


def test_lines_of_a_counter_begin_at_zero_when_all_values_of_its_labels_are_listed() -> None:
    """Prometheus sees the first failure as an increase; a label without a list has no line yet."""
    registry = CollectorRegistry()
    CounterDescriptor(
        name="topobus_test_writes_total", meaning="Writes.", labels={"outcome": ("written", "failed")}
    ).register(registry)
    HistogramDescriptor(
        name="topobus_test_write_seconds", meaning="Writes.", labels={"outcome": ("written", "failed")}, buckets=(1.0,)
    ).register(registry)
    CounterDescriptor(
        name="topobus_test_asks_total", meaning="Asks.", labels={"noun": "a noun", "outcome": ("answered",)}
    ).register(registry)

    lines = {
        (sample.name, sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith(("_total", "_count"))
    }

    assert lines == {
        ("topobus_test_writes_total", "written"): 0,
        ("topobus_test_writes_total", "failed"): 0,
        ("topobus_test_write_seconds_count", "written"): 0,
        ("topobus_test_write_seconds_count", "failed"): 0,
    }


def test_device_metrics_follow_the_inventory_when_a_device_gets_sick_and_well() -> None:
    """A device stands under its state and reason, and under no other one afterwards."""
    registry = CollectorRegistry()
    metrics = DeviceSeries(registry).of("gpu")
    sick = DeviceHealth(
        state=HealthState.UNHEALTHY,
        conditions=(
            Condition(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc", message="", since=""),
        ),
    )

    def lines() -> dict[tuple[str, str], float]:
        name = "topobus_device_inventory_devices"
        samples = [sample for metric in registry.collect() for sample in metric.samples if sample.name == name]
        return {(sample.labels["state"], sample.labels["reason"]): sample.value for sample in samples if sample.value}

    metrics.set_devices([_device("g0", sick), _device("g1", DeviceHealth())])
    when_sick = lines()
    metrics.set_devices([_device("g0", DeviceHealth()), _device("g1", DeviceHealth())])

    assert when_sick == {("unhealthy", "ecc"): 1, ("healthy", ""): 1}
    assert lines() == {("healthy", ""): 2}


def test_affected_pods_are_counted_once_when_they_use_several_sick_devices() -> None:
    """A pod with two sick devices is one pod, and who uses a healthy device is not affected."""
    registry = CollectorRegistry()
    metrics = DeviceSeries(registry).of("gpu")
    condition = Condition(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason="ecc")
    sick = DeviceHealth(state=HealthState.UNHEALTHY, conditions=(condition,))
    pod, other = (Owner(kind=OwnerKind.POD, name=name, uid=name) for name in ("trainer", "other"))
    claimed = Owner(kind=OwnerKind.CLAIM, name="training", uid="c1")

    metrics.set_affected(
        [_device("g0", sick), _device("g1", sick), _device("g2", DeviceHealth())],
        lambda name: (claimed,) if name == "g0" else (pod,),
        lambda name: (other,) if name == "g2" else (pod,),
    )

    def sample(what: str) -> float | None:
        return registry.get_sample_value(f"topobus_device_affected_{what}", {"class": "gpu", "state": "unhealthy"})

    assert (sample("pods"), sample("claims")) == (1, 1)


def test_reasons_share_a_line_when_a_driver_makes_them_up() -> None:
    """A driver that gives each device a reason of its own fills no more
    than 64 lines and `other`.
    """
    registry = CollectorRegistry()
    metrics = DeviceSeries(registry).of("gpu")
    for number in range(100):
        condition = Condition(dimension=Dimension.MEMORY, state=HealthState.UNHEALTHY, reason=f"made-up-{number}")
        metrics.count_event(_device("g0", DeviceHealth(state=HealthState.UNHEALTHY, conditions=(condition,))))

    name = "topobus_device_health_events_total"
    reasons = {
        sample.labels["reason"] for metric in registry.collect() for sample in metric.samples if sample.name == name
    }
    others = registry.get_sample_value(name, {"class": "gpu", "state": "unhealthy", "reason": "other"})
    assert (len(reasons), others) == (65, 36)


def _device(name: str, health: DeviceHealth) -> Device:
    return Device(name=name, device_class="gpu", driver="toy", health=health)


def test_bus_counts_nothing_when_no_registry_is_given() -> None:
    """The same lines that count in a service do nothing in a process that exports no metrics.

    Another process's numbers are not touched.
    """
    registry = CollectorRegistry()
    counted, uncounted = BusMetrics(registry), BusMetrics(None)

    for metrics in (counted, uncounted):
        metrics.connects.inc()
        metrics.is_connected.set(1)
        metrics.echo_s.observe(0.1)
        metrics.losses.labels("closed").inc()

    assert registry.get_sample_value("topobus_bus_connects_total") == 1
    assert registry.get_sample_value("topobus_bus_losses_total", {"reason": "closed"}) == 1
