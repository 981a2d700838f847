"""The floor of the gateway's benchmark: the cost of a call that goes the same way between processes
and does nothing else.

Four processes as on a node: a nats-server of its own (provisioned as the node's is), one process in
the gateway's place that serves gRPC on a unix socket, one in topology's that compares-and-sets a
key of the ledger's bucket for each request, and one in the device service's that answers. They use
nats-py and gRPC unchanged, and nothing of Topobus except the function that writes synced files. The
caller of `Floor` measures.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from lab.bench.child_processes import child_process, read_line
from topobus.bus.bus import Bus
from topobus.bus.streams.provision import bucket_subject
from topobus.devicekit.journal.durable_file import write
from topobus.formats.messages.catalogue import LEDGER
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer

__all__ = ["PLACES", "Floor", "floor"]

PLACES = ("gateway", "topology", "device", "nats-server")
"""The parts whose places the floor's processes take."""
_CALL = "/floor.Floor/Call"
_FILES = b"files"
# As large as an Allocate's requests and answers are here, without headers.
_BODY = b'"' + b"x" * 510 + b'"'
_LIMIT_S = 30.0
_LOCAL = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Floor:
    """Running processes, and a channel to the one that serves."""

    call: Any
    """gRPC's callable: bytes to bytes."""
    pids: Mapping[str, int]
    """By place."""

    async def allocate(self) -> None:
        """One gRPC call, two requests over the bus, one compare-and-set."""
        await self.call(_BODY)

    async def prepare(self) -> None:
        """The same, and three synced files: one, then two side by side."""
        await self.call(_FILES)


@asynccontextmanager
async def floor(folder: Path, ledger_bytes: int) -> AsyncIterator[Floor]:
    """Run the floor's processes until the block ends.

    The compared-and-set value has `ledger_bytes`.
    """
    await asyncio.to_thread(folder.mkdir)
    socket = folder / "floor.sock"
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer())
        bus = await stack.enter_async_context(Bus.session(NatsSettings(url=server.url), name="bench"))
        await bus.provision()
        pids = {"nats-server": server.pid}
        for place, arguments in (
            ("topology", [str(ledger_bytes)]),
            ("device", []),
            ("gateway", [str(socket), str(folder / "files")]),
        ):
            process = await stack.enter_async_context(child_process(__name__, place, server.url, *arguments))
            pids[place] = process.pid
            await read_line(process)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{socket}", options=_LOCAL))
        yield Floor(call=channel.unary_unary(_CALL), pids=pids)


async def main(place: str, url: str, *arguments: str) -> None:
    """Run one of the processes, until killed."""
    client = await nats.connect(url, name=f"floor-{place}", allow_reconnect=False)
    # Keeps a reference: a server without one ends.
    server = await _serve(client, Path(arguments[0]), Path(arguments[1])) if place == "gateway" else None
    if place == "topology":
        await _answer_writing(client, int(arguments[0]))
    elif place == "device":
        await _answer(client)
    await client.flush()
    print("ready", flush=True)
    await (server.wait_for_termination() if server is not None else asyncio.Event().wait())


async def _serve(client: Client, socket: Path, folder: Path) -> grpc.aio.Server:
    async def call(request: bytes, _: object) -> bytes:
        await client.request("floor.topology", _BODY, timeout=_LIMIT_S)
        if request == _FILES:
            await asyncio.to_thread(write, folder, "begun", _BODY, mode=0o600)
        answer = await client.request("floor.device", _BODY, timeout=_LIMIT_S)
        if request == _FILES:
            await asyncio.gather(
                *(asyncio.to_thread(write, folder, name, _BODY, mode=0o600) for name in ("cdi", "done"))
            )
        return answer.data

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor.Floor", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server


async def _answer_writing(client: Client, ledger_bytes: int) -> None:
    value = b"x" * ledger_bytes
    stream = client.jetstream()
    sequence = 0

    async def adopt(message: Msg) -> None:
        nonlocal sequence
        expected = {"Nats-Expected-Last-Subject-Sequence": str(sequence)}
        written = await stream.publish(bucket_subject(LEDGER, "floor"), value, headers=expected)
        sequence = written.seq
        await message.respond(_BODY)

    await client.subscribe("floor.topology", cb=adopt)


async def _answer(client: Client) -> None:
    async def prepare(message: Msg) -> None:
        await message.respond(_BODY)

    await client.subscribe("floor.device", cb=prepare)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
