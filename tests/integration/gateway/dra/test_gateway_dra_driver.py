"""The gateway's driver as kubelet sees it: registered at the doors that are told, again after a
loss, with the health of its devices.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from support.dra_claims import prepare, service_socket
from support.gateway_rig import SILENCE, Rig
from support.node_plane import NODE, device
from support.shape_names import plain
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import PREPARE
from topobus.formats.messages.messages import PrepareReply, PrepareRequest
from topobus.kubeletpb.drahealth.v1 import api_pb2 as health
from topobus.kubeletpb.drahealth.v1 import api_pb2_grpc as health_rpc
from topobus.process.config import NatsSettings
from topobus.testing.clock import ManualClock
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def test_gateway_streams_health_when_a_device_gets_sick_and_recovers(rig: Rig) -> None:
    """Kubelet sees a device Unhealthy with the reason, and Healthy again."""
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Healthy")
        await rig.plane.show("gpu", device("gpu-0", 0, HealthState.UNHEALTHY), device("gpu-1", 1))
        sick = await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Unhealthy")
        neighbour = rig.kubelet.device_health(DRIVER, NODE, "gpu-1")
        await rig.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await rig.kubelet.wait_for_health(DRIVER, NODE, "gpu-0", "Healthy")

    assert sick.message == "ecc"
    assert neighbour.state == "Healthy"


async def test_gateway_calls_devices_unknown_when_their_service_is_silent(rig: Rig) -> None:
    """Kubelet sees Unknown with the reason at the DRA door, Healthy again with the first answer,
    and never a change in the device plugin's list.
    """
    await rig.plane.show("fpga", device("fpga-0", 0))
    clock = ManualClock()
    where = {"node": NODE, "device_class": "fpga"}

    async def never(_request: PrepareRequest) -> PrepareReply:
        raise AssertionError("a sign of life prepares nothing")

    async with rig.kubelet, rig.gateway(silence=SILENCE, clock=clock), clock.ticking(SILENCE.every_s):
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            await rig.kubelet.wait_for_health(DRIVER, NODE, "fpga-0", "Healthy")
        silent = await rig.kubelet.wait_for_health(DRIVER, NODE, "fpga-0", "Unknown")
        listed = await rig.kubelet.wait_for_resource("topobus.dev/fpga", allocatable=1)
        neighbour = rig.kubelet.device_health(DRIVER, NODE, "gpu-0")
        async with Bus.session(NatsSettings(url=rig.url), name="fpga") as service:
            await service.answer(PREPARE, never, **where)
            await rig.kubelet.wait_for_health(DRIVER, NODE, "fpga-0", "Healthy")

    assert silent.message.startswith("service-silent: ")
    assert listed.allocatable == listed.capacity == 1
    assert neighbour.state == "Healthy"


async def test_gateway_repeats_health_without_news_when_time_passes(rig: Rig) -> None:
    """Kubelet turns silence into Unknown after 30 s, so the same list comes again well before; v1
    is served as v1alpha1 is.
    """
    clock = ManualClock()
    async with rig.kubelet, rig.gateway(clock=clock):
        await rig.kubelet.wait_for_driver(DRIVER)
        async with grpc.aio.insecure_channel(f"unix:{service_socket(rig)}") as channel:
            stream = aiter(
                health_rpc.DRAResourceHealthStub(channel).NodeWatchResources(health.NodeWatchResourcesRequest())
            )
            first = await anext(stream)
            async with clock.ticking(rig.settings.deadlines.health_refresh_s):
                second = await anext(stream)

    assert [plain(device_health.device.device_name) for device_health in first.devices] == [
        "gpu-0",
        "gpu-1",
        "nic-0",
        "nic-1",
        "shape-half-0",
        "shape-half-1",
        "shape-machine",
    ]
    assert [device_health.health for device_health in second.devices] == [health.HEALTHY] * 7
    assert second.devices[0].last_updated_time > 0


async def test_gateway_serves_its_driver_again_when_its_socket_is_removed(rig: Rig) -> None:
    """A registration socket that somebody deleted comes back, and kubelet registers the driver
    anew.
    """
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        next(rig.kubelet.plugins_registry_dir.glob(f"{DRIVER}-*-reg.sock")).unlink()
        await rig.kubelet.wait_for_event("Deregistered", subject=DRIVER)
        await rig.kubelet.wait_for_driver(DRIVER)

        again = await prepare(rig)

    assert again.error == ""


async def test_gateway_registers_its_driver_with_a_kubelet_that_restarts(rig: Rig) -> None:
    """Claims go on after kubelet's restart, without a restart of ours."""
    async with rig.kubelet, rig.gateway():
        first = await prepare(rig)
        await rig.kubelet.restart()
        second = await prepare(rig)

    assert first == second


@pytest.mark.parametrize(
    ("exposure", "plugins", "drivers"),
    [
        pytest.param({"gpu": "dra"}, ["topobus.dev/nic"], [DRIVER], id="one-class-by-claims-alone"),
        pytest.param(
            {"gpu": "device-plugin"}, ["topobus.dev/gpu", "topobus.dev/nic"], [DRIVER], id="the-other-by-claims"
        ),
        pytest.param(
            {"gpu": "device-plugin", "nic": "device-plugin"}, ["topobus.dev/gpu", "topobus.dev/nic"], [], id="no-claims"
        ),
    ],
)
async def test_gateway_opens_only_the_doors_that_are_told(
    rig: Rig, exposure: dict[str, Any], plugins: list[str], drivers: list[str]
) -> None:
    """Exposure decides a class's doors. The driver is registered as long as one class is offered
    through it.
    """
    async with rig.kubelet, rig.gateway(exposure=exposure):
        for plugin in plugins:
            await rig.kubelet.wait_for_resource(plugin, allocatable=2)
        for driver in drivers:
            await rig.kubelet.wait_for_driver(driver)
        await rig.readiness.until(lambda report: report.get("registration") == "ready")

        offered = (sorted(rig.kubelet.capacity()), sorted(rig.kubelet.drivers()))

    assert offered == (plugins, drivers)
