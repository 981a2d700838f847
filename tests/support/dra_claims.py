"""A claim for both GPUs of a node, and what tests of kubelet's DRA interface do with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.gateway_rig import Rig, make_rig
from support.node_plane import claim, device
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import ClaimReference, PreparedClaim
from topobus.values.dra_names import DRIVER
from topobus.values.request import Owner, OwnerKind

UID = "3cec39ef-a300-4ce1-90fc-10e64dcb86ca"
FILE = f"topobus.dev-gpu_{UID}.json"
TRAINING = ClaimReference(name="training", uid=UID, drivers=(DRIVER,))
HOLDER = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid=UID)


@asynccontextmanager
async def claim_rig(server: NatsServer) -> AsyncIterator[Rig]:
    """Make a rig of two GPUs and two NICs, with a claim for both GPUs."""
    async with make_rig(server.url) as made:
        await made.plane.show("gpu", device("gpu-0", 0), device("gpu-1", 1))
        await made.plane.show("nic", device("nic-0", 0), device("nic-1", 1))
        await made.plane.store(claim("training", UID, "gpu-0", "gpu-1"))
        yield made


async def prepare(rig: Rig, reference: ClaimReference = TRAINING) -> PreparedClaim:
    """Prepare one claim through kubelet."""
    for driver in reference.drivers:
        await rig.kubelet.wait_for_driver(driver)
    (prepared,) = await rig.kubelet.prepare_claims([reference])
    return prepared


def service_socket(rig: Rig) -> Path:
    """The socket that kubelet calls; its name is the gateway's own."""
    (path,) = (rig.kubelet.plugins_dir / DRIVER).glob("dra-*.sock")
    return path


def cdi_file(rig: Rig, name: str = FILE) -> Path:
    """One CDI file."""
    return rig.cdi_dir / name
