"""Bytes that are no message, at every socket of the gateway and from plugins: an error to whoever
sent them, one line of the log, and nothing ends.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import pytest_asyncio

from support.gateway_rig import Rig, make_rig
from support.kubelet_plugins import TrivialPlugin
from support.kubelet_plugins import device as listed
from support.node_plane import NODE, device
from topobus.formats.messages.catalogue import MACHINE
from topobus.gateway.config import ForeignSettings
from topobus.gateway.device_plugins.sockets import serving
from topobus.kubeletpb.deviceplugin.v1beta1 import api_pb2 as pb
from topobus.simulation.nats_server import NatsServer
from topobus.testing.kubelet import Container, Pod, Rejection
from topobus.values.dra_names import DRIVER
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

# A field of length 127 that is not there.
GARBAGE = b"\x0a\x7f"
RESOURCE = "acme.example/widget"


@pytest_asyncio.fixture
async def rig(nats_server: NatsServer) -> AsyncIterator[Rig]:
    """One GPU, and a folder for others' plugins."""
    async with make_rig(nats_server.url) as made:
        await made.bus.put(MACHINE, Machine(node=NODE, numa_nodes=(), cpus=()), node=NODE)
        await made.plane.show("gpu", device("gpu-0", 0))
        folder = made.root / "others"
        folder.mkdir()
        made.settings = msgspec.structs.replace(made.settings, foreign=ForeignSettings(dir=str(folder), look_s=0.05))
        yield made


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """Let what earlier tests dropped come to its end before this one: a task whose exception nobody
    reads is told when it is collected, in the log of whoever runs then.
    """
    gc.collect()


def check_no_traceback(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Promise: none stands in the log or was printed.

    All of it is shown where one does, for the run that has it may be the only one.
    """
    text = caplog.text + "".join(capfd.readouterr())
    assert "Traceback" not in text, text


async def send(socket: Path, method: str, *, is_stream: bool = False) -> grpc.aio.AioRpcError:
    """Call a method with bytes that it cannot read; the error."""
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        make: Any = channel.unary_stream if is_stream else channel.unary_unary
        call = make(method, request_serializer=bytes, response_deserializer=bytes)(GARBAGE, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (call.read() if is_stream else call)
        return refused.value


async def test_call_is_refused_in_one_line_when_its_bytes_are_no_message(
    rig: Rig, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each method of each socket says INVALID_ARGUMENT with its name, no traceback is written, and
    the good calls go on.
    """
    async with rig.kubelet, rig.gateway():
        await rig.kubelet.wait_for_driver(DRIVER)
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1)
        await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
        (plugin,) = (path for path in rig.kubelet.device_plugin_dir.glob("topobus*.sock"))
        (service,) = (rig.kubelet.plugins_dir / DRIVER).glob("dra-*.sock")
        (registration,) = rig.kubelet.plugins_registry_dir.glob("*.sock")
        errors = {
            method: await send(socket, method, is_stream=is_stream)
            for socket, method, is_stream in (
                (plugin, "/v1beta1.DevicePlugin/Allocate", False),
                (plugin, "/v1beta1.DevicePlugin/GetPreferredAllocation", False),
                (plugin, "/v1beta1.DevicePlugin/ListAndWatch", True),
                (service, "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources", False),
                (service, "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources", False),
                (service, "/v1.DRAResourceHealth/NodeWatchResources", True),
                (registration, "/pluginregistration.Registration/NotifyRegistrationStatus", False),
                (Path(rig.settings.foreign.dir) / "kubelet.sock", "/v1beta1.Registration/Register", False),
            )
        }
        admitted = await rig.kubelet.admit(
            Pod(name="p", uid="u", containers=(Container(name="main", resources={"topobus.dev/gpu": 1}),))
        )

    assert {method: error.code() for method, error in errors.items()} == dict.fromkeys(
        errors, grpc.StatusCode.INVALID_ARGUMENT
    )
    assert all(
        str(error.details()).startswith(f"{method}: the request of 2 bytes cannot be read")
        for method, error in errors.items()
    )
    assert not isinstance(admitted, Rejection), admitted
    check_no_traceback(caplog, capfd)


class _Garbage(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for type checkers alone
    """A plugin that registers properly, and then answers one method with
    bytes that are no message.
    """

    def __init__(self, broken: str) -> None:
        self._broken = broken

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Serve any method of the API."""
        method = str(details.method).rpartition("/")[2]

        async def answer(_request: bytes, _context: object) -> bytes:
            return GARBAGE if method == self._broken else pb.DevicePluginOptions().SerializeToString()

        async def stream(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            yield (
                GARBAGE
                if method == self._broken
                else pb.ListAndWatchResponse(devices=[listed("w-0", 0)]).SerializeToString()
            )
            await until_over(context)

        if method == "ListAndWatch":
            return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=bytes, response_serializer=bytes)
        return grpc.unary_unary_rpc_method_handler(answer, request_deserializer=bytes, response_serializer=bytes)


async def until_over(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Hold a stream until its reader goes."""
    over = asyncio.Event()
    context.add_done_callback(lambda _: over.set())
    await over.wait()


@pytest.mark.parametrize("broken", ["GetDevicePluginOptions", "ListAndWatch", "Allocate"])
async def test_gateway_goes_on_when_a_plugin_answers_garbage(
    rig: Rig, broken: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plugin whose answers cannot be read is refused, or lost, by name.

    Our own class is served as before, and no traceback is written.
    """
    async with rig.kubelet, rig.gateway() as gateway:
        await rig.readiness.until(lambda report: report.get("foreign-plugins", "").startswith("ready"))
        folder = Path(rig.settings.foreign.dir)
        async with serving(folder / "p.sock", lambda server: server.add_generic_rpc_handlers([_Garbage(broken)])):
            refusal = await TrivialPlugin(folder, RESOURCE, (), socket="p.sock").register()
            if broken == "ListAndWatch":
                await rig.readiness.until(
                    lambda report: f"waiting for the device plugin of {RESOURCE}" in report.get("foreign-plugins", "")
                )
            if broken == "Allocate":
                await rig.kubelet.wait_for_resource(RESOURCE, allocatable=1)
                admitted = await rig.kubelet.admit(
                    Pod(name="w", uid="w", containers=(Container(name="main", resources={RESOURCE: 1}),))
                )
                assert isinstance(admitted, Rejection)
                assert RESOURCE in admitted.message
        await rig.kubelet.wait_for_resource("topobus.dev/gpu", allocatable=1)
        assert not gateway.done()

    assert ("cannot be read" in refusal) == (broken == "GetDevicePluginOptions")
    check_no_traceback(caplog, capfd)
