"""A gateway with a folder for device plugins of others, and two such plugins: one in its own
process, the other in this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from support.gateway_rig import Rig, make_rig
from support.kubelet_plugins import TrivialPlugin
from support.node_plane import NODE
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.config import ForeignSettings
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.testing.kubelet import ClaimReference, Container, Pod
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.health import HealthState
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode

RESOURCE = "acme.example/widget"
CLASS = "widget-acme"
ONE_NODE = ("Widget_0=0", "Widget_1=0")
TRAINING = ClaimReference(name="c", uid="u1", drivers=(DRIVER,))


@asynccontextmanager
async def make_foreign_rig(url: str) -> AsyncIterator[Rig]:
    """A node with two NUMA nodes and no devices of ours.

    A gateway with a folder for others' plugins.
    """
    async with make_rig(url) as made:
        nodes = tuple(NumaNode(id=node, cpus=CpuSet(), memory_bytes=1) for node in (0, 1))
        await made.bus.put(MACHINE, Machine(node=NODE, numa_nodes=nodes, cpus=()), node=NODE)
        folder = made.root / "others"
        folder.mkdir()
        made.settings = msgspec.structs.replace(made.settings, foreign=ForeignSettings(dir=str(folder), look_s=0.05))
        yield made


@contextmanager
def plain_plugin(rig: Rig, *devices: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an ordinary plugin as a process of its own.

    By default with a device on each NUMA node.
    """
    script = Path(__file__).parent / "plain_plugin.py"
    arguments = [
        sys.executable,
        str(script),
        rig.settings.foreign.dir,
        RESOURCE,
        *(devices or ("Widget_0=0", "Widget_1=1")),
    ]
    with (rig.root / "calls").open("ab") as calls:
        process = subprocess.Popen(arguments, stdout=calls)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def calls_of(rig: Rig, call: str) -> list[list[str]]:
    """What all its processes were asked so far, as they wrote it."""
    calls = [json.loads(line) for line in (rig.root / "calls").read_text().splitlines()]
    return [entry["ids"] for entry in calls if entry["call"] == call]


async def inventory(rig: Rig, states: list[HealthState], device_class: str = CLASS) -> Inventory:
    """Wait until the class has devices in these states."""
    async for change in rig.bus.watch(INVENTORY, node=NODE, device_class=device_class):
        if change.value is not None and [device.health.state for device in change.value.devices] == states:
            return change.value
    raise AssertionError("the watch ended")


async def connected(rig: Rig) -> None:
    """Wait until the gateway has its plugin."""
    await rig.readiness.until(lambda report: report.get("foreign-plugins") == "ready")


def pod(count: int) -> Pod:
    """A pod with one container that wants widgets."""
    return Pod(name="p", uid="pod-u", containers=(Container(name="main", resources={RESOURCE: count}),))


async def claim_of(rig: Rig, *devices: str) -> None:
    """Store a claim that is allocated."""
    results = [{"request": "r", "driver": DRIVER, "pool": NODE, "device": device} for device in devices]
    status = {"allocation": {"devices": {"results": results}}}
    metadata = {"name": "c", "namespace": "default", "uid": "u1"}
    await rig.plane.store(
        ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, status=status)
    )


@asynccontextmanager
async def trivial_plugin(rig: Rig, *devices: pb.Device, resource: str = RESOURCE) -> AsyncIterator[TrivialPlugin]:
    """A plugin in this process that has registered, once the gateway serves (which removes older
    sockets).
    """
    async with unregistered_plugin(rig, *devices, resource=resource) as plugin:
        assert await plugin.register() == ""
        yield plugin


@asynccontextmanager
async def unregistered_plugin(rig: Rig, *devices: pb.Device, resource: str = RESOURCE) -> AsyncIterator[TrivialPlugin]:
    """A plugin in this process that serves and has not registered yet."""
    await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
    async with TrivialPlugin(
        Path(rig.settings.foreign.dir), resource, devices, socket=f"{resource.rpartition('/')[2]}.sock"
    ) as plugin:
        yield plugin
