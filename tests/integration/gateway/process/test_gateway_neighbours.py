"""The gateway among real processes: a device service that is frozen, and a NATS that goes away and
comes back, as kubelet sees it.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from support.looks import next_look
from support.running import Service, service, system_settings, until_all_ready
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    Capacity,
    Container,
    KubeletSimulator,
    Pod,
    Rejection,
)
from topobus.values.idset import NodeSet

pytestmark = pytest.mark.integration

GPU = "topobus.dev/gpu"
NIC = "topobus.dev/nic"
QUICK = {
    "TOPOBUS_GATEWAY__DEADLINES__PREPARE_S": "1",
    "TOPOBUS_GATEWAY__SILENCE__EVERY_S": "0.1",
    "TOPOBUS_GATEWAY__SILENCE__TIMEOUT_S": "0.5",
    "TOPOBUS_GATEWAY__SILENCE__HUNG_S": "1.5",
}


@dataclass
class Node:
    """A node whose processes can be hurt."""

    kubelet: KubeletSimulator
    nats: NatsServer
    running: dict[str, Service]

    async def admit(self, name: str, **resources: int) -> Admission | Rejection:
        """Admit a pod of one container."""
        wanted = {f"topobus.dev/{key}": count for key, count in resources.items()}
        return await self.kubelet.admit(
            Pod(name=name, uid=name, containers=(Container(name="main", resources=wanted),))
        )


@pytest_asyncio.fixture
async def node(own_nats_server: NatsServer) -> AsyncIterator[Node]:
    """Discovery, two device services, topology and gateway on a recorded machine, with kubelet.

    All devices are offered.
    """
    with tempfile.TemporaryDirectory(prefix="ne") as name:
        folder = Path(name)
        build("dgx", folder / "machine")
        settings = {**system_settings(folder), **QUICK}
        async with AsyncExitStack() as stack:
            kubelet = await stack.enter_async_context(KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1)))
            running = {
                name: await stack.enter_async_context(service(name, own_nats_server.url, settings))
                for name in ("discovery", "gpu", "nic", "topology", "gateway")
            }
            await until_all_ready(running)
            for resource in (GPU, NIC):
                await kubelet.wait_for_resource(resource, allocatable=8, timeout_s=30.0)
            yield Node(kubelet, own_nats_server, running)


def closed(node: Node) -> int:
    """How many lists ended."""
    return sum(event.event == "ListAndWatch.closed" for event in node.kubelet.events)


async def test_a_neighbours_pods_are_admitted_while_a_device_service_is_frozen(node: Node) -> None:
    """The frozen class refuses within its deadline and then at once, the others go on meanwhile, no
    device vanishes.

    Thawed, it serves again.
    """
    frozen = node.running["gpu"].process
    frozen.send_signal(signal.SIGSTOP)
    try:
        refusing = asyncio.create_task(node.admit("first", gpu=1))
        beside = [await node.admit(f"beside-{index}", nic=1) for index in range(3)]
        refused = await refusing
        await node.running["gateway"].logged("class.silent", where=lambda line: line["device_class"] == "gpu")
        at_once = await node.admit("second", gpu=1)
        beside.append(await node.admit("beside-3", nic=1))
        during = node.kubelet.capacity()
    finally:
        frozen.send_signal(signal.SIGCONT)
    await node.running["gateway"].logged("class.heard", where=lambda line: line["device_class"] == "gpu")
    thawed = await node.admit("third", gpu=1)

    assert all(isinstance(admission, Admission) for admission in beside), beside
    assert isinstance(refused, Rejection)
    assert "code = Unavailable" in refused.message
    assert isinstance(at_once, Rejection)
    assert "the gpu service has not answered since" in at_once.message
    assert (during[GPU], during[NIC].capacity) == (Capacity(capacity=8, allocatable=8), 8)
    assert isinstance(thawed, Admission), thawed
    assert closed(node) == 0


async def test_kubelet_sees_no_device_vanish_while_nats_is_away_and_comes_back(node: Node) -> None:
    """Every device stays healthy in every list from before to after, no list ends, and pods are
    admitted again with what is free.
    """
    before = await node.admit("before", gpu=2)
    assert isinstance(before, Admission)
    listed = {resource: set(node.kubelet.devices(resource)) for resource in (GPU, NIC)}
    lists = {resource: len(node.kubelet.healthy_counts(resource)) for resource in (GPU, NIC)}
    await node.nats.stop()
    for each_service in node.running.values():
        await each_service.until_ready(wanted=False)
    during = await node.admit("during", gpu=1)
    await node.nats.start()
    await until_all_ready(node.running)
    after = await patiently(node, gpu=6)

    assert {resource: len(names) for resource, names in listed.items()} == {GPU: 8, NIC: 8}
    assert {resource: set(node.kubelet.healthy_counts(resource)[count - 1 :]) for resource, count in lists.items()} == {
        GPU: {8},
        NIC: {8},
    }
    assert {resource: set(node.kubelet.devices(resource)) for resource in (GPU, NIC)} == listed
    assert closed(node) == 0
    assert isinstance(during, Rejection)
    assert not set(after.container("main").devices[GPU]) & set(before.container("main").devices[GPU])


async def patiently(node: Node, **resources: int) -> Admission:
    """Admit a pod when all peers are back: each one finds NATS in its own time."""
    async with asyncio.timeout(30):
        turn = 0
        while True:
            turn += 1
            answer = await node.admit(f"after-{turn}", **resources)
            if isinstance(answer, Admission):
                return answer
            assert "code = Unavailable" in answer.message, answer
            await next_look()
