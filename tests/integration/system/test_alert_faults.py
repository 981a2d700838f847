"""Each alert's fault, seeded: the metric that the alert reads says what its expression waits for.

The other alerts have their tests beside the code that is at fault; docs/reference/runbooks.md names
all of them. Whether an expression fires on such samples: deploy/monitoring/alerts-test.yaml.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from lab.memory_nats.fates import FatedBus, Fates, Unconfirmed
from support.claim_manifests import claim
from support.cli_process import run_cli
from support.device_bench import NODE, PROFILES, DeviceBench
from support.dra_claims import claim_rig, prepare
from support.gateway_rig import IMPATIENT
from support.looks import next_look, until, until_scraped
from support.metric_pages import families_of, read_page
from support.running import Service, all_services, until_all_ready
from support.topology_node import publish_node
from support.toy_driver import ToyDriver
from topobus.bus.bus import Bus
from topobus.devicekit.host import driver_poller
from topobus.formats.messages.catalogue import LEDGER
from topobus.gateway import metrics as gateway_metrics
from topobus.process.clock import SystemClock
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.tree import Tree
from topobus.topology.config import TopologySettings
from topobus.topology.service import serve
from topobus.values.device import Device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.readings import Quantity, Reading
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_SERVICES = ("discovery", "gpu", "topology", "controller")
_GPU = "gpu-toy-0"


def _sum(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Add up the samples with these labels."""
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def _on_page(service: Service, name: str, **labels: str) -> float:
    """Add up the samples with these labels at a service's /metrics."""
    return sum(
        sample.value
        for family in families_of(await read_page(service.port))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def _until_on_page(service: Service, value: float, name: str, **labels: str) -> None:
    """Wait until a service's page has so much."""
    while await _on_page(service, name, **labels) < value:
        await next_look()


@pytest_asyncio.fixture
async def services(own_nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[dict[str, Service]]:
    """The GPUs of a recorded machine, with a controller, on a server of their own."""
    async with all_services(own_nats_server.url, tmp_path, order=_SERVICES) as running:
        await until_all_ready(running)
        yield running


async def test_page_is_gone_and_its_class_is_silent_when_a_service_is_killed(services: dict[str, Service]) -> None:
    """TopobusServiceDown: Prometheus has nobody to read.

    TopobusServiceSilent: topology counts the class.
    """
    before = await _on_page(services["topology"], "topobus_topology_silent_classes")
    services["gpu"].process.kill()
    await services["gpu"].process.wait()
    with pytest.raises(OSError, match="Connect call failed"):
        await read_page(services["gpu"].port)
    await _until_on_page(services["topology"], 1, "topobus_topology_silent_classes", **{"class": "gpu"})

    assert before == 0


async def test_service_tells_that_it_has_no_nats_when_the_server_is_gone(
    services: dict[str, Service], own_nats_server: NatsServer
) -> None:
    """TopobusBusLost: the page is still served."""
    before = await _on_page(services["topology"], "topobus_bus_connected")
    await own_nats_server.kill()
    while await _on_page(services["topology"], "topobus_bus_connected"):
        await next_look()

    assert before == 1


async def test_claims_are_counted_while_they_wait_for_devices(
    services: dict[str, Service], own_nats_server: NatsServer, tmp_path: Path
) -> None:
    """TopobusClaimsWaiting: nine GPUs of eight."""
    manifest = tmp_path / "claim.yaml"
    manifest.write_text(claim("too-much", 9))
    before = await _on_page(services["controller"], "topobus_controller_claims_waiting")
    code, _, _ = await run_cli(own_nats_server, "apply", "-f", str(manifest))
    await _until_on_page(services["controller"], 1, "topobus_controller_claims_waiting")

    assert (before, code) == (0, 0)


async def test_asks_of_a_node_are_late_when_its_topology_is_frozen(
    services: dict[str, Service], own_nats_server: NatsServer, tmp_path: Path
) -> None:
    """TopobusAllocationsSlow: an ask that is not answered is none within half a second."""
    manifest = tmp_path / "claim.yaml"
    manifest.write_text(claim("training", 1))
    topology = services["topology"].process
    topology.send_signal(signal.SIGSTOP)
    await run_cli(own_nats_server, "apply", "-f", str(manifest))
    asks = "topobus_bus_ask_seconds"
    await _until_on_page(services["controller"], 1, f"{asks}_count", noun="place")
    good = await _on_page(services["controller"], f"{asks}_bucket", noun="place", outcome="answered", le="0.5")
    topology.send_signal(signal.SIGCONT)

    assert good == 0


class _Idler(ToyDriver):
    """GPUs that do nothing."""

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read their use."""
        return {device.name: [Reading(quantity=Quantity.UTILIZATION, value=0.0)] for device in devices}


@pytest.fixture
def bench(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> DeviceBench:
    """Give a bench whose GPUs are of a driver of the test's."""
    return DeviceBench(bus, nats_server.url, build(PROFILES / "h100-pair.toml", tmp_path / "machine"))


async def test_holder_of_a_device_is_named_when_it_is_idle_and_when_it_is_sick(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TopobusDeviceHeldIdle and TopobusDeviceSickUnderPods: each line has the pod."""
    monkeypatch.setattr(driver_poller, "READ_EVERY_S", 0.0)
    trainer, driver = Owner(kind=OwnerKind.POD, namespace="team", name="trainer", uid="u"), _Idler(count=1)
    allocation = Allocation(owner=trainer, holdings=(Holding(container="main", devices={"gpu": (_GPU,)}),))
    await bench.publish_machine()

    def use_of(pod: str) -> list[float]:
        return [
            sample.value
            for metric in bench.metrics.collect()
            for sample in metric.samples
            if sample.name == "topobus_device_utilization_ratio" and sample.labels["pod"] == pod
        ]

    async with bench.service(driver):
        await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        await bench.bus.put(LEDGER, Ledger(node=NODE, sequence=1, allocations={trainer.key: allocation}), node=NODE)
        await until_scraped(
            lambda: _sum(bench.metrics, "topobus_device_held", device=_GPU, pod="trainer", state="healthy")
        )
        # The first reading comes after the first look, on its own.
        await until_scraped(lambda: use_of("trainer") == [0])
        driver.faults = {
            _GPU: (Observation(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus"),)
        }
        await until_scraped(
            lambda: _sum(bench.metrics, "topobus_device_held", device=_GPU, pod="trainer", state="unhealthy")
        )
        await until_scraped(lambda: _sum(bench.metrics, "topobus_device_affected_pods", state="unhealthy") == 1)


async def test_class_is_named_when_its_inventory_cannot_be_published(bench: DeviceBench) -> None:
    """TopobusInventoryUnpublished: more devices than an inventory may have."""
    driver = ToyDriver(count=1)
    await bench.publish_machine()
    async with bench.service(driver):
        await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        before = _sum(bench.metrics, "topobus_device_inventory_unpublished")
        driver.names = tuple(f"gpu-toy-{number}" for number in range(8193))
        await until(lambda: _sum(bench.metrics, "topobus_device_inventory_unpublished", **{"class": "gpu"}))

    assert before == 0


async def test_polls_are_counted_when_a_driver_fails(bench: DeviceBench) -> None:
    """TopobusDriverFails, and TopobusFaultsSeenLate: a look that failed is none in time."""
    driver = ToyDriver(count=1)
    await bench.publish_machine()
    async with bench.service(driver):
        await bench.inventory(lambda inventory: len(inventory.devices) == 1)
        await until(lambda: _sum(bench.metrics, "topobus_device_driver_call_seconds_bucket", call="look", le="1.0"))
        before = _sum(bench.metrics, "topobus_device_driver_failures_total")
        driver.error = OSError("no such device")
        await until(lambda: _sum(bench.metrics, "topobus_device_driver_failures_total", outcome="failed") > 3)
        driver.error = None

    assert before == 0


async def test_prepares_are_counted_when_the_device_service_does_not_answer(nats_server: NatsServer) -> None:
    """TopobusPrepareBudgetBurns and TopobusPreparesFail: the failure is ours, not a refusal."""
    async with claim_rig(nats_server) as rig:
        rig.plane.asks.hung.add("prepare")
        async with rig.kubelet, rig.gateway(deadlines=IMPATIENT):
            failed = await prepare(rig)
            ours = _sum(rig.registry, "topobus_gateway_claim_prepares_total") - sum(
                _sum(rig.registry, "topobus_gateway_claim_prepares_total", outcome=outcome)
                for outcome in ("prepared", "refused")
            )
            rig.plane.asks.hung.clear()

    assert failed.error
    assert ours == 1


async def test_prepare_is_late_when_it_takes_over_a_second(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TopobusPreparesSlow: it is counted, and not among those within a second."""
    async with claim_rig(nats_server) as rig, rig.kubelet, rig.gateway():
        monkeypatch.setattr(gateway_metrics, "monotonic", count(0.0, 2.0).__next__)
        prepared = await prepare(rig)
        seconds = "topobus_gateway_claim_prepare_seconds"
        counts = _sum(rig.registry, f"{seconds}_count"), _sum(rig.registry, f"{seconds}_bucket", le="1.0")

    assert prepared.error == ""
    assert counts == (1, 0)


@pytest.mark.memory_bus
async def test_writes_of_the_ledger_are_counted_when_the_server_does_not_confirm_them(bus: Bus) -> None:
    """TopobusLedgerWritesFail: each try that is neither done nor undone."""
    registry = CollectorRegistry()
    fates = Fates(
        lambda step: (
            Unconfirmed(is_done=False) if (step.operation, step.noun) == ("compare_and_set", "ledger") else None
        )
    )
    runtime = Runtime(
        name="topology",
        node="demo-node",
        bus=FatedBus(bus, fates),
        clock=SystemClock(),
        readiness=Readiness(),
        registry=registry,
    )
    await publish_node(bus)
    serving = asyncio.create_task(serve(TopologySettings(node="demo-node"), runtime))
    await until(lambda: _sum(registry, "topobus_topology_ledger_writes_total", outcome="ambiguous") > 2)
    serving.cancel()
    (end,) = await asyncio.gather(serving, return_exceptions=True)

    assert isinstance(end, asyncio.CancelledError)
    assert _sum(registry, "topobus_topology_ledger_writes_total", outcome="written") == 0
