"""Classic claims at kubelet's DRA door, in the stand-alone home: prepared by their resource handles
and undone like any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.node_plane import NODE, device
from topobus.controller.classic.rules import classic_lifecycle
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic.classic_handles import only_node, write_handle
from topobus.formats.messages.messages import ApiObject, PrepareRequest
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference
from topobus.values.dra_names import DRIVER

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

# The classic API has a driver a class.
GPU = "gpu.topobus.dev"
REFERENCE = ClaimReference(name="old", uid="u-old", drivers=(DRIVER,))
SHARING = {"apiVersion": "topobus.dev/v1", "kind": "SharingParameters", "strategy": "TimeSlicing"}


def _claim(*handles: classic.ResourceHandle) -> ApiObject:
    pending = ApiObject(
        api_version=classic.API_VERSION,
        kind="ResourceClaim",
        metadata={"name": "old", "namespace": "default", "uid": "u-old"},
        spec={"resourceClassName": "gpu"},
    )
    result = classic.AllocationResult(resource_handles=handles, available_on_nodes=only_node(NODE))
    return classic_lifecycle.with_allocation(pending, GPU, result, now="2026-01-01T00:00:00Z") if handles else pending


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two GPUs; the claim is stored by the test."""
    async with make_rig(nats_server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        yield made


async def test_classic_claim_is_prepared_with_its_handles_devices_and_configuration(rig: Rig) -> None:
    """The device service gets the devices and the sharing strategy, kubelet the CDI names.

    Undone, the claim keeps its devices while it is allocated.
    """
    await rig.plane.store(_claim(write_handle(GPU, NODE, ("gpu-0", "gpu-1"), (SHARING,))))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([REFERENCE])
        errors = await rig.kubelet.unprepare_claims([REFERENCE])
    asked = [message for _, message in rig.plane.asks.asked if isinstance(message, PrepareRequest)]

    assert (prepared.error, [claim_device.device for claim_device in prepared.devices]) == ("", ["gpu-0", "gpu-1"])
    assert all(claim_device.cdi_devices for claim_device in prepared.devices)
    assert [(prepare_request.devices, prepare_request.config) for prepare_request in asked] == [
        (("gpu-0", "gpu-1"), (SHARING,))
    ]
    assert not any(errors.values())
    assert [allocation.is_prepared for allocation in rig.plane.ledger.allocations.values()] == [False]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (_claim(), "is not allocated"),
        (_claim(write_handle(GPU, "elsewhere", ("gpu-0",))), "is in pool elsewhere"),
        (_claim(classic.ResourceHandle(driver_name=GPU, data="{")), "status.allocation.resourceHandles[0].data"),
        (_claim(classic.ResourceHandle(driver_name="x.example.com", data="{")), f"has no device of driver {DRIVER}"),
    ],
)
async def test_classic_claim_is_refused_when_its_handles_name_nothing_here(
    rig: Rig, stored: ApiObject, wanted: str
) -> None:
    """An unreadable handle never prepares something else."""
    await rig.plane.store(msgspec.structs.replace(stored))
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        (prepared,) = await rig.kubelet.prepare_claims([REFERENCE])

    assert wanted in prepared.error
    assert not [message for _, message in rig.plane.asks.asked if isinstance(message, PrepareRequest)]
