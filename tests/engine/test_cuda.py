"""CUDA on containerd 2 without NVIDIA's toolkit: real services, kubelet's calls, a driver of real
libraries, and containers that load it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.containerd import Containerd
from support.driver_roots import VERSION, driver_root, probe_program
from support.running import NODE, all_services, system_settings, until_all_ready
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Admission, ClaimReference, Container, KubeletSimulator, Pod
from topobus.values.dra_names import DRIVER
from topobus.values.edits import ContainerEdits, Mount
from topobus.values.idset import NodeSet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UID = "5f0c1d0e-6f6a-4d06-9a0c-2d6b3a7d9e55"
CLAIM = ClaimReference(name="pair", uid=UID, drivers=(DRIVER,))
DEVICES = {"a": "gpu-0000-18-00-0", "b": "gpu-0000-1a-00-0"}
SCRIPT = "echo $NVIDIA_VISIBLE_DEVICES; /probe/cuda-probe"


@pytest_asyncio.fixture
async def kubelet(folder: Path) -> AsyncIterator[KubeletSimulator]:
    """All services on a recorded machine with real device nodes and a driver, an allocated claim
    with two requests, and a kubelet.
    """
    recorded = build("dgx", folder / "machine", has_device_nodes=True)
    (recorded.root / "proc/driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Mon Sep  1\n"
    )
    driver_root(folder / "driver")
    hook = folder / "topobus-gpu-hook"
    hook.write_text(f"#!{sys.executable}\nfrom topobus.gpu.driver_root.oci_hook import main\nmain()\n")
    hook.chmod(0o755)
    results = [
        {"request": request, "driver": DRIVER, "pool": NODE, "device": name} for request, name in DEVICES.items()
    ]
    claim = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "pair", "namespace": "default", "uid": UID},
        status={"allocation": {"devices": {"results": results}}},
    )
    nodes = str(folder / "machine" / "dev")
    # Made for this test, outside of the usual folders: whoever runs the gateway has to allow it.
    rights = {"gpu": {"device_nodes": [f"{nodes}/"], "mounts": [str(folder / "driver")], "hooks": [str(hook)]}}
    settings = {
        **system_settings(folder),
        "TOPOBUS_ALL__HARDWARE__RUNTIME_DEV": nodes,
        "TOPOBUS_GPU__HARDWARE__DRIVER_FILES__ROOT": str(folder / "driver"),
        "TOPOBUS_GPU__HARDWARE__DRIVER_FILES__HOOK": str(hook),
        "TOPOBUS_GATEWAY__EDITS": json.dumps(rights),
    }
    order = ("discovery", "gpu", "topology", "gateway")
    async with NatsServer() as server, all_services(server.url, folder, order=order, settings=settings) as running:
        await until_all_ready(running)
        async with Bus.session(NatsSettings(url=server.url), name="topobus-cli") as bus:
            await bus.put(OBJECT, claim, kind="resourceclaim", namespace="default", name="pair")
            async with KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1)) as made:
                yield made


@pytest.fixture
def image_files(folder: Path) -> tuple[Mount, ...]:
    """What the image of busybox lacks of a usual one: glibc and the program, in places where they
    are in every image.
    """
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    listed = subprocess.run(
        [str(loader), "--list", str(probe_program())], check=True, capture_output=True, text=True
    ).stdout
    libraries = {word for line in listed.splitlines() for word in line.split() if word.startswith("/")} | {str(loader)}
    (folder / "image").mkdir()
    shutil.copy(probe_program(), folder / "image" / "cuda-probe")
    probe = Mount(host_path=str(folder / "image" / "cuda-probe"), container_path="/probe/cuda-probe")
    return (*(Mount(host_path=str(Path(path).resolve()), container_path=path) for path in sorted(libraries)), probe)


async def test_containers_load_the_driver_and_see_their_own_gpu_when_containerd_reads_our_cdi_file(
    kubelet: KubeletSimulator, containerd: Containerd, image_files: tuple[Mount, ...]
) -> None:
    """DRA: two containers of one claim, each with the name of one request.

    Both find libcuda.so.1 by the cache that the hook extended, and open one GPU, not the same.
    """
    await kubelet.wait_for_driver(DRIVER)
    (prepared,) = await kubelet.prepare_claims([CLAIM])
    edits = ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": "all"}, mounts=image_files)
    names = {
        request: [
            name for device in prepared.devices if device.device == DEVICES[request] for name in device.cdi_devices
        ]
        for request in DEVICES
    }
    ended = [containerd.run(SCRIPT, cdi_devices=names[request], edits=edits) for request in "ab"]
    await kubelet.unprepare_claims([CLAIM])

    assert prepared.error == ""
    lines = [end.lines for end in ended]
    assert [end.code for end in ended] == [0, 0], lines
    library = "library /opt/topobus/nvidia/lib64/libcuda.so.1"
    assert lines == [["void", library, "init 0", "gpus 1"], ["void", library, "init 0", "gpus 2"]]


async def test_container_loads_the_driver_by_a_variable_when_kubelet_passes_an_allocate_answer_on(
    kubelet: KubeletSimulator, containerd: Containerd, image_files: tuple[Mount, ...]
) -> None:
    """Device plugin: no hook has words there; the files and the variable have."""
    await kubelet.wait_for_resource("topobus.dev/gpu", allocatable=8)
    admitted = await kubelet.admit(
        Pod(name="p", uid="u", containers=(Container(name="main", resources={"topobus.dev/gpu": 1}),))
    )
    assert isinstance(admitted, Admission), admitted
    edits = admitted.container("main").edits
    ended = containerd.run(
        SCRIPT,
        edits=ContainerEdits(env=edits.env, device_nodes=edits.device_nodes, mounts=(*edits.mounts, *image_files)),
    )

    assert (ended.code, ended.lines[:3]) == (0, ["void", "library /usr/local/nvidia/lib64/libcuda.so.1", "init 0"]), (
        ended.lines
    )
    assert ended.lines[3].partition(" ")[2] in {str(1 << minor) for minor in range(8)}
