"""A gateway with two NICs and a container runtime of the test's own (NRI)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from support.attachments import NIC, PATIENT, PLAIN, reserved
from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.gateway.config import RuntimeSettings
from topobus.simulation.container_runtime import SimulatedRuntime
from topobus.simulation.nats_server import NatsServer
from topobus.values.idset import CpuSet


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """Two NICs: one that goes into its pod's sandbox, for pod `app`, and one that does not."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        made.plane.to_attach = frozenset({"nic-0"})
        await made.plane.show("nic", device("nic-0", 0), device("nic-1", 0))
        await made.plane.store(reserved(claim("net", NIC.uid, "nic-0"), "app"))
        await made.plane.store(claim("plain", PLAIN.uid, "nic-1"))
        made.settings = msgspec.structs.replace(
            made.settings, runtime=RuntimeSettings(socket=str(made.root / "nri.sock"), attach_s=PATIENT)
        )
        yield made


@pytest.fixture(params=["methods", "state-change"])
def runtime(rig: Rig, request: pytest.FixtureRequest) -> SimulatedRuntime:
    """A runtime of either generation; the test starts it."""
    return SimulatedRuntime(rig.root / "nri.sock", CpuSet(0, 1), dialect=request.param, cdi_dir=rig.cdi_dir)
