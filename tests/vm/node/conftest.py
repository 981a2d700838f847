"""What the tests on a real kubelet share: the node's programs, and Topobus beside kubelet's static
CPU manager.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from topobus.kubernetes.client import object_path
from vm.kubelet import GATEWAY, Kubelet, connect
from vm.node import Node

_RESOURCES = "resource.k8s.io/v1"
_DRIVER = "cpu.topobus.dev"
# What a claim asks for, by the name of its template; CPUs are of one NUMA
# node, and a group is one by itself.
_TEMPLATES = {
    "pair": {"count": 2},
    "of-kubelet": {"count": 2, "selectors": [{"cel": {"expression": f'device.attributes["{_DRIVER}"].numaNode == 1'}}]},
    "share-1": {"capacity": {"requests": {"cpus": "1"}}},
    "share-2": {"capacity": {"requests": {"cpus": "2"}}},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let whoever has the time compare more pods: `make vm VM="node -- --pods 100"`."""
    parser.addoption("--pods", type=int, default=25, help="pods of each configuration of kubelet's managers")


@pytest_asyncio.fixture(scope="session")
async def kubelet(nats: None) -> AsyncIterator[Kubelet]:
    """Start kubelet with a static CPU manager that reserves 0 and 4-7.

    It gets ready while other programs start.
    """
    client = connect()
    made = Kubelet(client)
    await made.begin()
    await made.start(is_new=True, topologyManagerPolicy="restricted", reservedSystemCPUs="0,4-7")
    yield made
    made.end()
    await client.close()


@pytest_asyncio.fixture(scope="session")
async def cluster(kubelet: Kubelet, node: Node) -> Kubelet:
    """Start Topobus, which owns 4-7."""
    await asyncio.gather(kubelet.ready(), node.start("cpu"), node.start("topology"))
    await node.start("gateway", **GATEWAY)
    selector = {"cel": {"expression": f'device.driver == "{_DRIVER}"'}}
    await kubelet.make(
        object_path(_RESOURCES, "deviceclasses"), {"metadata": {"name": _DRIVER}, "spec": {"selectors": [selector]}}
    )
    for name, asked in _TEMPLATES.items():
        devices = {
            "requests": [{"name": "cpu", "exactly": {"deviceClassName": _DRIVER, **asked}}],
            "constraints": [{"requests": ["cpu"], "matchAttribute": f"{_DRIVER}/numaNode"}] if "count" in asked else [],
        }
        body = {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}}
        await kubelet.make(object_path(_RESOURCES, "resourceclaimtemplates", namespace="default"), body)
    return kubelet


@pytest_asyncio.fixture(autouse=True)
async def no_pod_is_left(kubelet: Kubelet) -> AsyncIterator[None]:
    """Delete what a test has made and has not deleted, so that a failed one is the only one that
    fails.
    """
    before = await kubelet.names()
    yield
    await kubelet.delete(*(await kubelet.names() - before))
