"""An ordinary device plugin as a process: it knows kubelet's folder and the device plugin API, and nothing else.

    python plain_plugin.py FOLDER RESOURCE ID=NODE ...

It serves its socket, registers, and starts anew when its socket or kubelet's goes away, as such plugins do.
"""

# ruff: noqa: N802  (gRPC calls its methods by their names in the proto)

from __future__ import annotations

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

    def __init__(self, devices: dict[str, int]) -> None:
        self._devices = devices
        self._end = threading.Event()

    def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        """Want neither preference nor pre-start."""
        return pb.DevicePluginOptions()

    def ListAndWatch(self, request: pb.Empty, context: Any) -> Iterator[pb.ListAndWatchResponse]:
        """Send the list once and hold the stream."""
        yield pb.ListAndWatchResponse(
            devices=[
                pb.Device(ID=name, health="Healthy", topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)]))
                for name, node in self._devices.items()
            ]
        )
        self._end.wait()

    def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        """Say what a container gets."""
        node = pb.DeviceSpec(container_path="/dev/widget", host_path="/dev/full", permissions="rw")
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(envs={"WIDGETS": ",".join(sorted(one.devices_ids))}, devices=[node])
                for one in request.container_requests
            ]
        )

    def end(self) -> None:
        """Let the streams end."""
        self._end.set()


def main(folder: Path, resource: str, devices: dict[str, int]) -> None:
    """Serve and register for ever."""
    kubelet, own = folder / "kubelet.sock", folder / "widgets.sock"
    while True:
        while not kubelet.exists():
            time.sleep(0.02)
        own.unlink(missing_ok=True)
        plugin = PlainPlugin(devices)
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
                register(pb.RegisterRequest(version="v1beta1", endpoint=own.name, resource_name=resource), timeout=20)
            while own.exists() and kubelet.exists() and kubelet.stat().st_ino == seen:
                time.sleep(0.02)
        except (grpc.RpcError, FileNotFoundError):
            time.sleep(0.05)
        plugin.end()
        server.stop(None).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], {name: int(node) for name, _, node in (one.partition("=") for one in sys.argv[3:])})
