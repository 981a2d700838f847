"""What real services have at /metrics is what they declare, and docs/reference/metrics.md says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from prometheus_client import Metric

from docpages.metrics import metrics_of, series_of
from support.metric_pages import families_of, read_page, types_of
from support.running import SERVICES, all_services, until_all_ready
from topobus.process.metric_descriptors import MetricDescriptor
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets in it."""
    with TemporaryDirectory(prefix="tb-") as folder:
        yield Path(folder)


async def test_metric_pages_have_what_is_declared_when_all_services_run(
    nats_server: NatsServer, short_folder: Path
) -> None:
    """Each service has each metric that it declares and no other one, of the declared type, with
    the declared labels and values.
    """
    async with all_services(nats_server.url, short_folder) as running:
        await until_all_ready(running)
        pages = {name: await read_page(service.port) for name, service in running.items()}

    declared = {name: {metric.name: metric.kind for metric in metrics_of(name)} for name in SERVICES}
    assert {name: types_of(page) for name, page in pages.items()} == declared
    odd = {name: _odd_labels(families_of(page), metrics_of(name)) for name, page in pages.items()}
    assert not any(odd.values()), odd
    values = {
        name: {sample.name for family in families_of(page) for sample in family.samples if sample.value}
        for name, page in pages.items()
    }
    assert "topobus_topology_ledger_writes_total" in values["topology"]
    assert {"topobus_device_inventory_devices", "topobus_device_driver_call_seconds_count"} <= values["gpu"]
    assert all(f'topobus_build_info{{service="{name}"' in page for name, page in pages.items())


def _odd_labels(families: tuple[Metric, ...], metrics: tuple[MetricDescriptor, ...]) -> list[str]:
    """Tell samples whose labels, or whose values of them, are not declared."""
    by_series = {series: metric for metric in metrics for series in series_of(metric)}
    odd: list[str] = []
    for family in families:
        for sample in family.samples:
            labels = {label: value for label, value in sample.labels.items() if label != "le"}
            declared = by_series[sample.name].labels
            if labels.keys() != declared.keys():
                odd.append(f"{sample.name}: labels {sorted(labels)}, declared {sorted(declared)}")
            for label, value in labels.items():
                values = declared.get(label, ())
                if isinstance(values, tuple) and value not in values:
                    odd.append(f"{sample.name}: {label}={value!r}, declared {values}")
    return odd
