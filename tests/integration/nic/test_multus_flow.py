"""What Multus does with our device plugin, step by step, up to an unmodified CNI plugin that moves
the interface: nothing of ours is asked for help on the way.

Multus itself is a program for a cluster; what it does between kubelet and the plugin is five lines,
and stands here: the pod's ids from PodResources, the device's file by its name in the
specification, `deviceID` and `pciBusID` written into each plugin of the network.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from msgspec import structs

from integration.nic.conftest import Node
from support.gateway_rig import Rig, make_rig
from support.node_plane import device
from topobus.kubeletpb.podresources.v1 import api_pb2 as pb
from topobus.kubeletpb.podresources.v1 import api_pb2_grpc as rpc
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, Container, Pod
from topobus.values.pci import PciAddress

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

RESOURCE = "topobus.dev/nic"
POD = Pod(name="web", namespace="default", uid="p-1", containers=(Container(name="main", resources={RESOURCE: 1}),))
ADDRESS = "0000:3b:00.1"
# A function as sysfs shows it, in the plugin's own view alone: `ip netns exec` gives
# each program mounts of its own.
_PRETEND = """
mount -t tmpfs none /sys/bus/pci/devices && cd /sys/bus/pci/devices
mkdir -p {address}/net/nic0 drivers/mlx5_core && ln -s ../drivers/mlx5_core {address}/driver
cd / && exec {plugin}
"""


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One virtual function, named by its address towards kubelet."""
    async with make_rig(nats_server.url, classes=("nic",)) as made:
        await made.plane.show(
            "nic",
            structs.replace(device("nic-0000-3b-00-1", 0), pci=PciAddress.parse(ADDRESS), parent="nic-0000-3b-00-0"),
        )
        made.settings = structs.replace(
            made.settings,
            ids={"nic": "pci"},
            device_info_dir=str(made.root / "devinfo" / "dp"),
            default_exposure="device-plugin",
        )
        async with made.kubelet:
            yield made


async def ids_of_pod(socket: Path, name: str) -> list[str]:
    """Ask kubelet which devices a pod has, as Multus does."""
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        answer = await rpc.PodResourcesListerStub(channel).List(pb.ListPodResourcesRequest())
    containers = [container for pod in answer.pod_resources if pod.name == name for container in pod.containers]
    return [
        device_id
        for container in containers
        for entry in container.devices
        if entry.resource_name == RESOURCE
        for device_id in entry.device_ids
    ]


def run_plugin(node: Node, command: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Run host-device on the host, where the function has the interface nic0; its answer."""
    plugin = f"{node.bundle.bin_dir}/host-device"
    variables = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "sandbox-1",
        "CNI_NETNS": node.pod.path,
        "CNI_IFNAME": "net1",
        "CNI_PATH": node.bundle.bin_dir,
        "PATH": node.bundle.program_path,
    }
    done = subprocess.run(
        ["ip", "netns", "exec", node.host.name, "sh", "-ec", _PRETEND.format(address=ADDRESS, plugin=plugin)],
        input=json.dumps(configuration).encode(),
        env=variables,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    return answer


async def test_unmodified_plugin_moves_the_interface_when_multus_hands_our_id_on(rig: Rig, node: Node) -> None:
    """From kubelet's id to the interface in the pod, and back."""
    node.host.ip("link", "add", "nic0", "type", "veth", "peer", "name", "nic0-lan")
    async with rig.gateway():
        await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)
        admitted = await rig.kubelet.admit(POD)
        assert isinstance(admitted, Admission), admitted

        (device_id,) = await ids_of_pod(rig.kubelet.pod_resources_socket, POD.name)
        file = rig.root / "devinfo" / "dp" / f"{RESOURCE.replace('/', '-')}-{device_id.replace('/', '-')}-device.json"
        info = json.loads(file.read_text())
        network: dict[str, Any] = {
            "cniVersion": "1.0.0",
            "name": "data",
            "type": "host-device",
            "deviceID": device_id,
            "pciBusID": device_id,
        }
        result = await asyncio.to_thread(run_plugin, node, "ADD", network)
        in_pod = (node.pod.links, node.host.links)
        await asyncio.to_thread(run_plugin, node, "DEL", network)

    assert device_id == ADDRESS
    assert info["pci"] == {"pci-address": ADDRESS, "pf-pci-address": "0000:3b:00.0"}
    assert [(interface["name"], interface["sandbox"]) for interface in result["interfaces"]] == [
        ("net1", node.pod.path)
    ]
    assert in_pod == (["lo", "net1"], ["lo", "nic0-lan"])
    assert "nic0" in node.host.links
