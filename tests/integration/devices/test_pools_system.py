"""Pools through the whole node, as real processes: the operator's TOML, the inventory, kubelet's
resource, and `topobus place`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.running import NODE, service, system_settings, until_all_ready
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    Container,
    KubeletSimulator,
    Pod,
)
from topobus.values.idset import NodeSet

pytestmark = pytest.mark.integration

POOLS = [
    {"name": "gpu-far", "where": [{"field": "numa_node", "equals": 1}, {"field": "driver", "glob": "nv*"}]},
    {"name": "gpu-big", "where": [{"field": "capacity.memory", "minimum": "10Ti"}]},
]
POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  containers:
    - name: main
      resources: {{limits: {{topobus.dev/{resource}: {count}}}}}
"""


@pytest_asyncio.fixture
async def node(nats_server: NatsServer) -> AsyncIterator[tuple[KubeletSimulator, Path]]:
    """A recorded machine whose GPUs of NUMA node 1 are a pool, with
    topology, gateway and kubelet.
    """
    with tempfile.TemporaryDirectory(prefix="po") as name:
        folder = Path(name)
        build("dgx", folder / "machine")
        settings = {**system_settings(folder), "TOPOBUS_GPU__POOLS": json.dumps(POOLS)}
        async with AsyncExitStack() as stack:
            kubelet = await stack.enter_async_context(KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1)))
            running = {
                name: await stack.enter_async_context(service(name, nats_server.url, settings))
                for name in ("discovery", "gpu", "topology", "gateway", "controller")
            }
            await until_all_ready(running)
            yield kubelet, folder


async def topobus(url: str, *arguments: object) -> tuple[int, Any]:
    """Run the command: exit code and JSON answer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.cli.main",
        *map(str, arguments),
        "--nats",
        url,
        "--json",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, json.loads(out)


async def test_pools_are_placed_and_allocated_from_when_the_operator_configures_them(
    node: tuple[KubeletSimulator, Path], nats_server: NatsServer, bus: Bus
) -> None:
    """`topobus place` and kubelet give the pool's devices for the pool's name and no other, and
    both see what the other gave.
    """
    kubelet, folder = node
    inventory = await bus.get(INVENTORY, node=NODE, device_class="gpu")
    assert inventory is not None
    far = {device.name for device in inventory.value.devices if device.pool == "gpu-far"}
    near = {device.name for device in inventory.value.devices if not device.pool}
    await kubelet.wait_for_resource("topobus.dev/gpu-far", allocatable=4)
    await kubelet.wait_for_resource("topobus.dev/gpu", allocatable=4)
    for resource, count in (("gpu-far", 2), ("gpu", 5), ("gpu-big", 1)):
        (folder / f"{resource}.yaml").write_text(POD.format(name=resource, resource=resource, count=count))

    code, placed = await topobus(nats_server.url, "place", folder / "gpu-far.yaml")
    too_many, refused = await topobus(nats_server.url, "place", folder / "gpu.yaml")
    nowhere, unknown = await topobus(nats_server.url, "place", folder / "gpu-big.yaml")
    await kubelet.wait_for_resource("topobus.dev/gpu-far", allocatable=2)
    wanted = Pod(
        name="k",
        uid="k",
        containers=(Container(name="main", resources={"topobus.dev/gpu-far": 2, "topobus.dev/gpu": 1}),),
    )
    admission = await kubelet.admit(wanted)

    by_place = set(placed["chosen"]["result"]["containers"][0]["devices"]["gpu"])
    assert (code, len(by_place), by_place <= far) == (0, 2, True)
    assert too_many == nowhere != 0
    assert refused["answers"][0]["result"]["reasons"][0]["facts"]["exists"] == 4
    assert "gpu-far" in unknown["answers"][0]["result"]["reasons"][0]["message"]
    assert isinstance(admission, Admission)
    by_kubelet = admission.container("main").devices
    assert set(by_kubelet["topobus.dev/gpu-far"]) == far - by_place
    assert set(by_kubelet["topobus.dev/gpu"]) < near
    assert inventory.value.warnings == ("pool gpu-big: none of the 8 devices matches",)
