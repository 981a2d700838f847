"""What the gateway does with a container runtime that refuses it, or answers nonsense: it goes on,
and says each thing once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from support.looks import LIMIT_S, until
from topobus.gateway.containers.frames import Channel, Demultiplexer, Message, MessageType, frames_of
from topobus.gateway.containers.nri_plugin import NriPlugin
from topobus.gateway.containers.rules.cpusets import ContainerCpuset
from topobus.gateway.containers.values import ContainerAnswer, CpusetUpdate, RunningContainer
from topobus.process.clock import SystemClock
from topobus.runtimepb.nri.v1alpha1 import api_pb2 as nri
from topobus.runtimepb.ttrpc.v1 import api_pb2 as ttrpc
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet
from topobus.values.sandbox import Sandbox

pytestmark = [pytest.mark.integration]


class Deaf:
    """Hears of events and wants nothing."""

    def synchronize(
        self, sandboxes: Sequence[Sandbox], containers: Sequence[RunningContainer]
    ) -> Sequence[CpusetUpdate]:
        """Take over nothing."""
        return ()

    async def sandbox_started(self, sandbox: Sandbox) -> None:
        """Do nothing."""

    async def sandbox_stopped(self, sandbox: Sandbox) -> None:
        """Do nothing."""

    def sandbox_removed(self, sandbox: Sandbox) -> None:
        """Do nothing."""

    async def create_container(self, sandbox: Sandbox, container: RunningContainer) -> ContainerAnswer:
        """Give nothing."""
        return ContainerAnswer()

    def container_created(self, container: RunningContainer) -> None:
        """Do nothing."""

    def update_container(self, container: RunningContainer, asked: CpuSet | None) -> ContainerCpuset | None:
        """Give nothing."""
        return None

    def container_ended(self, container_id: str) -> None:
        """Do nothing."""


class Runtime:
    """A runtime that answers each call of a plugin with what the test wants."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answers: dict[str, ttrpc.Response] = {}
        self.calls: list[str] = []
        self.enough = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[NriPlugin]:
        """Listen, with a plugin that is to connect."""
        server = await asyncio.start_unix_server(self._serve, self.socket)
        plugin = NriPlugin(str(self.socket), Deaf(), SystemClock())
        task = asyncio.create_task(plugin.run())
        try:
            yield plugin
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        demultiplexer = Demultiplexer()
        while received := await reader.read(65536):
            for message in demultiplexer.feed(received):
                if message.type != MessageType.REQUEST:
                    continue
                call = ttrpc.Request.FromString(message.data)
                self.calls.append(call.method)
                if len(self.calls) >= 4:
                    self.enough.set()
                answer = self.answers.get(call.method, ttrpc.Response())
                writer.write(
                    frames_of(
                        Message(Channel.RUNTIME, message.stream_id, MessageType.RESPONSE, answer.SerializeToString())
                    )
                )
                if call.method == "RegisterPlugin" and not answer.status.code:
                    for stream, (method, request) in enumerate(
                        (("Configure", nri.ConfigureRequest()), ("Synchronize", nri.SynchronizeRequest())), start=1
                    ):
                        envelope = ttrpc.Request(
                            service="nri.pkg.api.v1alpha1.Plugin", method=method, payload=request.SerializeToString()
                        )
                        writer.write(
                            frames_of(
                                Message(
                                    Channel.PLUGIN, 2 * stream + 1, MessageType.REQUEST, envelope.SerializeToString()
                                )
                            )
                        )
        writer.close()


async def test_refusal_of_the_plugin_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime may refuse for days; it is asked again, and the log says it once."""
    monkeypatch.setattr("topobus.gateway.containers.nri_plugin._FIRST_PAUSE_S", 0.001)
    runtime = Runtime(tmp_path / "nri.sock")
    runtime.answers["RegisterPlugin"] = ttrpc.Response(status=ttrpc.Status(code=9, message="no plugins here"))
    with capture_logs() as logs:
        async with runtime.serving():
            await runtime.enough.wait()

    (refused,) = (log for log in logs if log["event"] == "nri.refused")
    assert "no plugins here" in refused["error"]
    assert len([log for log in logs if log["event"] == "nri.absent"]) <= 1


async def test_garbage_of_the_runtime_is_told_with_what_is_wrong_with_it(tmp_path: Path) -> None:
    """Whoever listens at the socket and speaks another language: the log says what came, and not
    that a group of tasks failed.
    """
    ended = asyncio.Event()

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 64)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    server = await asyncio.start_unix_server(babble, tmp_path / "nri.sock")
    plugin = NriPlugin(
        str(tmp_path / "nri.sock"), Deaf(), SystemClock(), lambda why: ended.set() if "ended" in why else None
    )
    with capture_logs() as logs:
        running = asyncio.create_task(plugin.run())
        async with asyncio.timeout(60):
            await ended.wait()
    running.cancel()
    server.close()

    (refused,) = (log for log in logs if log["event"] == "nri.refused")
    assert "TaskGroup" not in refused["error"]
    assert str(tmp_path / "nri.sock") in refused["next_step"]


async def test_answer_to_an_update_that_is_none_is_an_error_of_that_update(tmp_path: Path) -> None:
    """Whoever asked for it hears of it and tries again."""
    runtime = Runtime(tmp_path / "nri.sock")
    runtime.answers["UpdateContainers"] = ttrpc.Response(payload=b"\xff\xff")
    async with runtime.serving() as plugin:
        await until(lambda: plugin.is_ready)
        with pytest.raises(ContractError, match="UpdateContainers"):
            await plugin.update([CpusetUpdate(container_id="c", cpus=CpuSet(0))], within_s=60.0)


@contextlib.contextmanager
def full_queue(path: Path) -> Iterator[None]:
    """Listen without accepting, with a full queue of connections: a runtime that hangs."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = sockets.enter_context(socket.socket(socket.AF_UNIX))
                waiting.settimeout(0)
                waiting.connect(str(path))
        yield


@contextlib.asynccontextmanager
async def running(plugin: NriPlugin) -> AsyncIterator[None]:
    """Run a plugin for the length of the block. It must not end by itself meanwhile."""
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(plugin.run())
        yield
        task.cancel()


async def test_runtime_whose_queue_is_full_is_tried_again(tmp_path: Path) -> None:
    """The event loop takes such a socket for connected, and its first use fails with an error that
    is no ConnectionError.
    """
    path, ended = tmp_path / "nri.sock", asyncio.Event()
    plugin = NriPlugin(str(path), Deaf(), SystemClock(), lambda why: ended.set() if "ended" in why else None)

    async with running(plugin):
        with full_queue(path):
            await ended.wait()
        path.unlink()
        async with Runtime(path).serving() as another:
            await until(lambda: plugin.is_ready and another.is_ready)


@pytest.mark.parametrize("part", ["nothing", "half a frame", "a whole request"])
async def test_runtime_that_dies_in_the_handshake_is_tried_again(part: str, tmp_path: Path) -> None:
    """It is killed after it has accepted the connection, at any point of the registration."""
    path, deaths, enough = tmp_path / "nri.sock", 0, asyncio.Event()

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal deaths
        if part == "a whole request":
            await reader.read(65536)
        elif part == "half a frame":
            writer.write(b"\x00\x00\x00\x01\x00")
        # Unread bytes make the kernel reset the connection.
        writer.transport.abort()
        deaths += 1
        if deaths == 3:
            enough.set()

    async with await asyncio.start_unix_server(die, path), running(NriPlugin(str(path), Deaf(), SystemClock())):
        await enough.wait()
