"""The whole road on a real container runtime: real services on a recorded machine, kubelet's calls,
and containers that containerd 2 starts.

The machine's device nodes are real ones (of the null device's number), so nothing between
the device service and the container stands in for anything; kubelet alone is the
simulator, for there is no cluster here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from engine.containerd import Containerd
from support.running import NODE, all_services, system_settings, until_all_ready
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import (
    Admission,
    ClaimReference,
    Container,
    KubeletSimulator,
    Pod,
)
from topobus.values.dra_names import DRIVER
from topobus.values.idset import NodeSet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UID = "0c7d6a52-7d9a-4e0c-9a39-3f0a4f1d8a11"
CLAIM = ClaimReference(name="pair", uid=UID, drivers=(DRIVER,))
DEVICES = {"gpu": "gpu-0000-18-00-0", "nic": "nic-0000-19-00-0"}
# At the device plugins' door devices are given from the other end (ADR 21): the last of NUMA node
# 0, which are the fourth of their kind.
PLUGIN_DEVICES = {"gpu": "gpu-0000-4d-00-0", "nic": "nic-0000-4e-00-0"}


def script(own: int, other: int) -> str:
    """Write what a container does to see its devices: nodes that can be opened, those of others
    absent, and the variables; by the devices' numbers.
    """
    return f"""
for node in nvidia{own} nvidiactl infiniband/uverbs{own} nvidia{other} infiniband/uverbs{other}; do
  if test -c /dev/$node && : < /dev/$node && : > /dev/$node; then echo "$node opens"; else echo "$node absent"; fi
done
echo "gpus $TOPOBUS_GPU_DEVICES nics $TOPOBUS_NIC_DEVICES"
"""


def its_own(own: int, other: int, devices: dict[str, str]) -> list[str]:
    """Give what the script prints in a container that has its own devices and no others."""
    return [
        f"nvidia{own} opens",
        "nvidiactl opens",
        f"infiniband/uverbs{own} opens",
        f"nvidia{other} absent",
        f"infiniband/uverbs{other} absent",
        f"gpus {devices['gpu']} nics {devices['nic']}",
    ]


@pytest_asyncio.fixture
async def kubelet(folder: Path) -> AsyncIterator[KubeletSimulator]:
    """All services on a recorded machine with real device nodes, an
    allocated claim, and a kubelet.
    """
    build("dgx", folder / "machine", has_device_nodes=True)
    results = [{"request": key, "driver": DRIVER, "pool": NODE, "device": name} for key, name in DEVICES.items()]
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "pair", "namespace": "default", "uid": UID},
        status={"allocation": {"devices": {"results": results}}},
    )
    nodes = str(folder / "machine" / "dev")
    rights = {device_class: {"device_nodes": [f"{nodes}/"]} for device_class in ("gpu", "nic")}
    settings = {
        **system_settings(folder),
        "TOPOBUS_ALL__HARDWARE__RUNTIME_DEV": nodes,
        # Made for this test: outside of /dev, so whoever runs the gateway has to allow them.
        "TOPOBUS_GATEWAY__EDITS": json.dumps(rights),
    }
    order = ("discovery", "gpu", "nic", "topology", "gateway")
    async with NatsServer() as server, all_services(server.url, folder, order=order, settings=settings) as running:
        await until_all_ready(running)
        async with Bus.session(NatsSettings(url=server.url), name="topobus-cli") as bus:
            await bus.put(OBJECT, claim, kind="resourceclaim", namespace="default", name="pair")
            async with KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1)) as made:
                yield made


async def test_container_has_the_claims_devices_when_containerd_reads_our_cdi_files(
    kubelet: KubeletSimulator, containerd: Containerd
) -> None:
    """DRA: what kubelet gets for a prepared claim are CDI names that containerd 2 finds.

    The container can open its own devices and has no others.
    """
    await kubelet.wait_for_driver(DRIVER)
    (prepared,) = await kubelet.prepare_claims([CLAIM])
    names = sorted({name for device in prepared.devices for name in device.cdi_devices})
    ended = containerd.run(script(0, 1), cdi_devices=names)
    await kubelet.unprepare_claims([CLAIM])

    assert (prepared.error, ended.code, ended.lines) == ("", 0, its_own(0, 1, DEVICES))
    with pytest.raises(grpc.RpcError, match="unresolvable CDI devices"):
        # Undone: the runtime knows the names no longer.
        containerd.run(script(0, 1), cdi_devices=names)


async def test_container_has_the_plugins_devices_when_kubelet_passes_an_allocate_answer_on(
    kubelet: KubeletSimulator, containerd: Containerd
) -> None:
    """Device plugin: the same container by Allocate's answer."""
    for device_class in DEVICES:
        await kubelet.wait_for_resource(f"topobus.dev/{device_class}", allocatable=8)
    pod = Pod(
        name="p", uid="u", containers=(Container(name="main", resources={"topobus.dev/gpu": 1, "topobus.dev/nic": 1}),)
    )
    admitted = await kubelet.admit(pod)
    assert isinstance(admitted, Admission), admitted
    ended = containerd.run(script(3, 0), edits=admitted.container("main").edits)

    assert (ended.code, ended.lines) == (0, its_own(3, 0, PLUGIN_DEVICES))
