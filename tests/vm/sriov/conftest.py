"""The network service of this machine: four functions made of one card, one shared interface, cards
that may go to a virtual machine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from vm.hands import Fault, faults, set_virtio
from vm.kernel import sh
from vm.monitor import Monitor
from vm.node import Node

SETTINGS = {
    "TOPOBUS_NIC__VIRTUAL_FUNCTIONS": '[{"address":"0000:21:00.0","count":4}]',
    "TOPOBUS_NIC__INTERFACES__SHARE": '[{"name":"ens33","shares":4},{"name":"shared-bond","mode":"ipvlan","shares":4}]',
    "TOPOBUS_NIC__INTERFACES__OFFER": '[{"name":"tenant-vlan"},{"name":"tenant-bond"}]',
    "TOPOBUS_NIC__PASSTHROUGH__ALLOW": '[{"where":[{"field":"vendor","glob":"*"}]}]',
    "TOPOBUS_NIC__PASSTHROUGH__IDLE_S": "6",
    "TOPOBUS_NIC__HEALTH__HOLD_S": "5",
    "TOPOBUS_NIC__HEALTH__FORGET_S": "120",
    # A card without a carrier does not pass.
    "TOPOBUS_NIC__BURN_IN__COMMAND": json.dumps(
        [
            "/bin/sh",
            "-c",
            "echo $DEVICE_PCI >> /tmp/burn-ins; ! grep -qx 0 /sys/bus/pci/devices/$DEVICE_PCI/net/*/carrier",
        ]
    ),
}


@pytest_asyncio.fixture(scope="session")
async def service(node: Node) -> Node:
    """Start the service, and wait until the functions are there.

    The three cards are up, and one has an address to answer pings at.
    """
    sh("modprobe vfio-pci; ip link set ens31 mtu 1450")
    set_virtio()
    await node.start("nic", **SETTINGS)
    for name in ("ens1", "ens31", "ens33"):
        sh(f"ip link set {name} up")
    sh("ip addr add 10.1.1.9/24 dev ens33; ip addr add 10.2.2.1/24 dev ens31; ip route add 10.7.0.0/16 via 10.2.2.9")
    for function in ("10-0", "10-2", "10-4", "10-6"):
        await node.device(f"nic-0000-21-{function}")
    await node.device("nic-0000-63-00-0")
    return node


@pytest_asyncio.fixture
async def nic(service: Node) -> AsyncIterator[Node]:
    """Use the service; nothing is held afterwards."""
    yield service
    await service.let_go()


@pytest.fixture(scope="session")
def hands(service: Node, monitor: Monitor) -> Mapping[str, Fault]:
    """List what hands can do to this machine."""
    return faults(monitor, service)
