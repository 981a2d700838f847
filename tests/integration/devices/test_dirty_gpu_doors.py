"""A GPU that a pod's process was left on, at every door: kubelet's device plugin, claims of the
classic API, structured claims, and the scheduler's taint.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from support.classic_home import ClassicPlace
from support.classic_manifests import CLASSES, claim, parameters
from support.cluster_slices import taints
from support.controller_home import claim as structured_claim
from support.controllers import controller
from support.device_bench import PROFILES
from support.fake_nvml import GIB, FakeGpu, FakeNvml, fake_nvml, needs_gcc
from support.gpu_processes import POD_UID, add_process, end_recorded
from support.node_plane import NODE
from support.reading import Reader
from support.sick_devices import SickNode, sick_node
from topobus.devicekit.settings import CleaningSettings
from topobus.formats.kubernetes import object_parts
from topobus.formats.messages import catalogue
from topobus.gpu.config import LeftoverSettings
from topobus.gpu.host_services import GpuServices
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from topobus.simulation.machines import RecordedMachine, build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import Admission, Container, Pod, Rejection
from topobus.values.health import HealthState

pytestmark = [pytest.mark.integration, needs_gcc]

GPU = "topobus.dev/gpu"


def _pod(name: str, uid: str, gpus: int) -> Pod:
    return Pod(name=name, uid=uid, containers=(Container(name="main", resources={GPU: gpus}),))


class _Leftover:
    """A real process that outlived its pod, as /proc of the recorded machine and NVML show it."""

    def __init__(
        self, machine: RecordedMachine, library: FakeNvml, address: str, process: asyncio.subprocess.Process
    ) -> None:
        self._machine, self._library, self._address, self._process = machine, library, address, process

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @classmethod
    async def start(cls, machine: RecordedMachine, library: FakeNvml, address: str) -> _Leftover:
        """Start one that waits until it is ended."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE
        )
        add_process(machine.root, process.pid, pod="trainer-0")
        library.set(address, processes=((process.pid, 10 * GIB),), used_bytes=11 * GIB)
        return cls(machine, library, address, process)

    async def end(self) -> None:
        """End it; the driver gives its memory back."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
            end_recorded(self._machine.root, self.pid)
            self._library.set(self._address, processes=(), used_bytes=0)


async def _allocate(node: SickNode, device: str) -> str:
    """Ask as a kubelet would that does not know yet; gives the error."""
    (socket,) = node.rig.kubelet.device_plugin_dir.glob("topobus-gpu-*.sock")
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[device])])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.DevicePluginStub(channel).Allocate(request, timeout=60)
    return refused.value.details() or ""


@asynccontextmanager
async def _classic(node: SickNode, url: str) -> AsyncIterator[ClassicPlace]:
    """The stand-alone API with a controller, on the same node."""
    async with Reader(node.rig.bus.watch(catalogue.OBJECT)) as objects, controller(url):
        place = ClassicPlace(node.rig.bus, url, objects, {NODE: node.rig.plane.topology})
        await place.apply(CLASSES)
        yield place


async def test_dirty_gpu_is_offered_at_no_door_until_the_process_that_was_left_ends(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """The event names pod and process.

    Kubelet, the classic and the structured controller and the taint keep it
    back; then everybody has it again.
    """
    machine = build(PROFILES / "h100-pair.toml", tmp_path / "machine")
    addresses = machine.pci("h100")
    names = [f"gpu-{address.replace(':', '-').replace('.', '-')}" for address in addresses]
    driver = NvidiaDriver()
    driver.configure(GpuServices(leftovers=LeftoverSettings(wait_s=0.05)))
    gpus = [FakeGpu(address=address, minor=minor, uuid=f"GPU-{minor}") for minor, address in enumerate(addresses)]
    with fake_nvml(tmp_path / "lib", *gpus) as library:
        async with (
            ApiServerSimulator(token="secret", bookmark_s=0.5) as server,
            sick_node(
                nats_server.url,
                server,
                machine.root,
                tmp_path,
                [driver],
                library_path=str(library.folder),
                hold_s=0.2,
                cleaning=CleaningSettings(retry_s=0.05),
            ) as node,
            _classic(node, nats_server.url) as place,
        ):
            await node.inventory_of(2)
            trainer = _pod("trainer-0", POD_UID, 1)
            admission = await node.rig.kubelet.admit(trainer)
            assert isinstance(admission, Admission), admission
            (dirty,) = admission.container("main").devices[GPU]
            leftover = await _Leftover.start(machine, library, addresses[names.index(dirty)])
            try:
                await node.rig.kubelet.remove(trainer)
                event = await node.until_told(dirty, lambda event: event.health.state is HealthState.UNHEALTHY)
                await node.rig.kubelet.wait_for_health("topobus.dev", NODE, dirty, "Unhealthy")
                await node.rig.kubelet.wait_for_resource(GPU, allocatable=1)
                await server.until(
                    lambda: taints(server)[dirty] == ["topobus.dev/health:NoExecute"], what="a taint that evicts"
                )
                # Both GPUs, so that the dirty one is wanted.
                await place.apply(
                    parameters("both", "{count: 2}") + claim("classic", mode="Immediate", parameters="both")
                )
                wanted = structured_claim("structured", count=2)
                await node.rig.bus.put(catalogue.OBJECT, wanted, **object_parts(wanted))
                structured_text = await place.until_reason("structured", "DoesNotFit")
                classic_text = await place.until_reason("classic", "DoesNotFit")
                refused_pod = await node.rig.kubelet.admit(_pod("next", "next", 2))
                refused_call = await _allocate(node, dirty)
                shown = node.rig.kubelet.device_health("topobus.dev", NODE, dirty)
                # Neither has anything, and neither shall have it before kubelet's next pod.
                for name in ("structured", "classic"):
                    await place.delete("resourceclaim", name)
                    await place.gone("resourceclaim", name)
            finally:
                await leftover.end()
            await node.rig.kubelet.wait_for_health("topobus.dev", NODE, dirty, "Healthy")
            await server.until(lambda: taints(server)[dirty] == [], what="no taint")
            await node.rig.kubelet.wait_for_resource(GPU, allocatable=2)
            again = await node.rig.kubelet.admit(_pod("again", "again", 2))

    worst = event.health.worst
    assert worst is not None
    assert (worst.reason, worst.evidence["pods"], worst.evidence["pids"]) == ("dirty", "trainer-0", str(leftover.pid))
    reason = f"process {leftover.pid} (python3) of pod trainer-0"
    assert reason in worst.message
    assert reason in shown.message
    assert isinstance(refused_pod, Rejection)
    assert "dirty" in refused_call
    assert "tainted topobus.dev/health=unhealthy:NoExecute (dirty)" in structured_text
    assert "tainted topobus.dev/health=unhealthy:NoExecute (dirty)" in classic_text
    assert isinstance(again, Admission)
