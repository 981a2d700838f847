"""An ordinary device plugin as a process: it knows kubelet's folder and the device plugin API, and
nothing else.

    python plain_plugin.py FOLDER RESOURCE ID=NODE ...

It serves its socket, registers, and starts again when its socket or kubelet's goes away, as such
plugins do. It prefers its last devices, wants to be called before each start, sets an annotation,
calls its first device sick after SIGUSR1, and writes each call as a JSON line.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2_grpc as rpc


class PlainPlugin(rpc.DevicePluginServicer):
    """A fixed list; every device gives a variable and a device node that every machine has."""

    def __init__(self, devices: dict[str, int], sick: threading.Event) -> None:
        self._devices = devices
        self._sick = sick
        self._end = threading.Event()

    def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        """Want both, preference and pre-start."""
        return pb.DevicePluginOptions(get_preferred_allocation_available=True, pre_start_required=True)

    def ListAndWatch(self, request: pb.Empty, context: Any) -> Iterator[pb.ListAndWatchResponse]:
        """Send the list, hold the stream, and send it again when the first device falls sick."""
        has_allocated_condition = False
        yield self._list()
        while not self._end.wait(0.02):
            if self._sick.is_set() and not has_allocated_condition:
                has_allocated_condition = True
                yield self._list()

    def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        """Prefer the last ones."""
        answers = []
        for container_request in request.container_requests:
            _tell("GetPreferredAllocation", list(container_request.available_deviceIDs))
            rest = sorted(
                set(container_request.available_deviceIDs) - set(container_request.must_include_deviceIDs), reverse=True
            )
            answers.append([*container_request.must_include_deviceIDs, *rest][: container_request.allocation_size])
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=names) for names in answers]
        )

    def PreStartContainer(self, request: pb.PreStartContainerRequest, context: Any) -> pb.PreStartContainerResponse:
        """Know of it."""
        _tell("PreStartContainer", list(request.devices_ids))
        return pb.PreStartContainerResponse()

    def _list(self) -> pb.ListAndWatchResponse:
        first = next(iter(self._devices))
        return pb.ListAndWatchResponse(
            devices=[
                pb.Device(
                    ID=name,
                    health="Unhealthy" if name == first and self._sick.is_set() else "Healthy",
                    topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)]),
                )
                for name, node in self._devices.items()
            ]
        )

    def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        """Say what a container gets."""
        node = pb.DeviceSpec(container_path="/dev/widget", host_path="/dev/full", permissions="rw")
        for container_request in request.container_requests:
            _tell("Allocate", list(container_request.devices_ids))
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(
                    envs={"WIDGETS": ",".join(sorted(container_request.devices_ids))},
                    devices=[node],
                    annotations={"acme.example/widgets": "1"},
                )
                for container_request in request.container_requests
            ]
        )

    def end(self) -> None:
        """Let the streams end."""
        self._end.set()


def _tell(call: str, ids: list[str]) -> None:
    print(json.dumps({"call": call, "ids": sorted(ids)}), flush=True)  # noqa: T201  (the test reads it)


def main(folder: Path, resource: str, devices: dict[str, int]) -> None:
    """Serve and register until killed."""
    kubelet, own = folder / "kubelet.sock", folder / f"{resource.rpartition('/')[2]}s.sock"
    sick = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: sick.set())
    while True:
        while not kubelet.exists():
            time.sleep(0.02)
        own.unlink(missing_ok=True)
        plugin = PlainPlugin(devices, sick)
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        rpc.add_DevicePluginServicer_to_server(plugin, server)
        server.add_insecure_port(f"unix:{own}")
        server.start()
        seen = kubelet.stat().st_ino
        try:
            with grpc.insecure_channel(f"unix:{kubelet}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                register = channel.unary_unary(
                    "/v1beta1.Registration/Register",
                    request_serializer=pb.RegisterRequest.SerializeToString,
                    response_deserializer=pb.Empty.FromString,
                )
                register(pb.RegisterRequest(version="v1beta1", endpoint=own.name, resource_name=resource), timeout=60)
            while own.exists() and kubelet.exists() and kubelet.stat().st_ino == seen:
                time.sleep(0.02)
        except (grpc.RpcError, FileNotFoundError):
            time.sleep(0.05)
        plugin.end()
        server.stop(None).wait()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        {name: int(node) for name, _, node in (argument.partition("=") for argument in sys.argv[3:])},
    )
