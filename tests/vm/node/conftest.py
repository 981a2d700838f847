"""What the tests on a real kubelet share: the node's programs, and Topobus beside kubelet's static
CPU manager.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from topobus.formats.kubernetes.built_in_classes import class_selector
from topobus.kubernetes.client import object_path
from topobus.values.dra_names import DRIVER, group_of_class
from vm.kernel import sh
from vm.kubelet import CLASSES, DEVICES, GATEWAY, Kubelet, connect
from vm.node import Node

_RESOURCES = "resource.k8s.io/v1"
_CLASS = group_of_class("cpu")
_CARDS = {
    "TOPOBUS_NIC__VIRTUAL_FUNCTIONS": '[{"address":"0000:21:00.0","count":2}]',
    "TOPOBUS_NIC__PARTITIONS__PARENTS": "counted",
    "TOPOBUS_NIC__POOLS": '[{"name":"nic-plain","where":[{"field":"pci","equals":"0000:22:00.0"}]}]',
    "TOPOBUS_NIC__HEALTH__HOLD_S": "5",
}
# What a claim asks for, by the name of its template; CPUs are of one NUMA
# node, and a group is one by itself.
_TEMPLATES = {
    "pair": {"count": 2},
    "pair-with-pool": {"count": 2},
    "of-kubelet": {"count": 2, "selectors": [{"cel": {"expression": f'device.attributes["{DRIVER}"].numaNode == 1'}}]},
    "share-1": {"capacity": {"requests": {"cpus": "1"}}},
    "share-2": {"capacity": {"requests": {"cpus": "2"}}},
}
_WITH_POOL = {"apiVersion": "topobus.dev/v1", "kind": "CpuParameters", "withShared": True}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let whoever has the time compare more pods: `make vm VM="node -- --pods 100"`."""
    parser.addoption("--pods", type=int, default=25, help="pods of each configuration of kubelet's managers")


@pytest_asyncio.fixture(scope="session")
async def kubelet(nats: None) -> AsyncIterator[Kubelet]:
    """Start kubelet with a static CPU manager that reserves 0 and 4-7.

    It gets ready while other programs start.
    """
    made = Kubelet(connect())
    await made.begin()
    await made.start(is_new=True, topologyManagerPolicy="restricted", reservedSystemCPUs="0,4-7")
    yield made
    made.end()
    await made.client.close()


@pytest_asyncio.fixture(scope="session")
async def cluster(kubelet: Kubelet, node: Node) -> Kubelet:
    """Start Topobus, which owns 4-7."""
    await asyncio.gather(kubelet.ready(), node.start("cpu"), node.start("topology"))
    await node.start("gateway", **GATEWAY)
    selector = {"cel": {"expression": class_selector("cpu")}}
    await kubelet.make(CLASSES, {"metadata": {"name": _CLASS}, "spec": {"selectors": [selector]}})
    for name, asked in _TEMPLATES.items():
        devices = {
            "requests": [{"name": "cpu", "exactly": {"deviceClassName": _CLASS, **asked}}],
            "constraints": [{"requests": ["cpu"], "matchAttribute": f"{DRIVER}/numaNode"}] if "count" in asked else [],
            "config": [{"opaque": {"driver": DRIVER, "parameters": _WITH_POOL}}] if name.endswith("-with-pool") else [],
        }
        body = {"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}}
        await kubelet.make(object_path(_RESOURCES, "resourceclaimtemplates", namespace="default"), body)
    return kubelet


@pytest_asyncio.fixture(scope="session")
async def cards(node: Node, cluster: Kubelet) -> Kubelet:
    """Offer the guest's cards: one beside its two virtual functions, and a plain one, which is also
    the resource `topobus.dev/nic-plain`.
    """
    await node.start("nic", **_CARDS)
    # Each has an address, to answer pings at.
    sh("for pci in 21 22; do ip link set $(ls /sys/bus/pci/devices/0000:$pci:00.0/net) up; done")
    sh("ip addr add 10.1.1.9/24 dev $(ls /sys/bus/pci/devices/0000:21:00.0/net)")
    sh("ip addr add 10.2.2.1/24 dev $(ls /sys/bus/pci/devices/0000:22:00.0/net)")
    for device in DEVICES.values():
        await node.device(device)
    selector = {"cel": {"expression": class_selector("nic")}}
    await cluster.make(CLASSES, {"metadata": {"name": "nic.topobus.dev"}, "spec": {"selectors": [selector]}})
    return cluster


@pytest_asyncio.fixture(autouse=True)
async def no_pod_is_left(kubelet: Kubelet) -> AsyncIterator[None]:
    """Delete what a test has made and has not deleted, so that a failed one is the only one that
    fails.
    """
    before = await kubelet.names()
    yield
    await kubelet.delete(*(await kubelet.names() - before))
