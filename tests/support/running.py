"""Services of Topobus as real processes on a real nats-server: started, asked, signalled, and gone
afterwards.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from support.looks import next_look
from topobus.simulation.machines import build
from topobus.simulation.nats_server import free_port

NODE = "demo-node"
# A test waits for events; this only ends one that waits for what never comes,
# however loaded the machine is.
LIMIT_S = 90.0
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")


class Service:
    """One running service: its process and what it has logged."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, port: int) -> None:
        self.name = name
        self.process = process
        self.port = port
        self.lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self._news = asyncio.Condition()

    async def read(self) -> None:
        """Collect the log until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._news:
                self.raw.append(line.decode("utf-8", "replace").rstrip())
                try:
                    self.lines.append(msgspec.json.decode(line))
                except msgspec.DecodeError:
                    pass
                self._news.notify_all()

    async def logged(
        self, event: str, *, count: int = 1, where: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Wait until an event has been logged so often; the last of these lines."""

        def matching() -> list[dict[str, Any]]:
            return [line for line in self.lines if line.get("event") == event and where(line)]

        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(lambda: len(matching()) >= count)
        return matching()[count - 1]

    async def is_ready(self) -> bool:
        """Ask its /readyz."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return b" 200 " in await reader.readline()
        except OSError:
            return False
        finally:
            writer.close()

    async def until_ready(self, *, wanted: bool = True) -> None:
        """Wait until it reports that it is ready (or, with `wanted` false, that it is not)."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                if await self.is_ready() is wanted:
                    return
                await next_look()

    async def stop(self, limit_s: float = LIMIT_S) -> int:
        """SIGTERM, and the exit status; TimeoutError when it takes longer."""
        if self.process.returncode is None:
            self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), limit_s)


@asynccontextmanager
async def service(name: str, url: str, settings: Mapping[str, str] | None = None) -> AsyncIterator[Service]:
    """Run one service until the block ends. Settings are environment variables."""
    port = free_port()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")},
        "TOPOBUS_ALL__NODE": NODE,
        "TOPOBUS_ALL__NATS__URL": url,
        "TOPOBUS_ALL__LOG__FORMAT": "json",
        "TOPOBUS_ALL__HTTP__PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        **(settings or {}),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"topobus.{name}.main",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 22,
    )
    running = Service(name, process, port)
    reader = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reader


def gateway_settings(folder: Path) -> dict[str, str]:
    """A gateway's folders, all below one folder (a short one: sockets lie in it)."""
    return {
        "TOPOBUS_GATEWAY__KUBELET__DEVICE_PLUGIN_DIR": str(folder / "k/device-plugins"),
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_REGISTRY_DIR": str(folder / "k/plugins_registry"),
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR": str(folder / "k/plugins"),
        "TOPOBUS_GATEWAY__POD_RESOURCES_SOCKET": str(folder / "k/pod-resources/kubelet.sock"),
        "TOPOBUS_GATEWAY__RUNTIME__SOCKET": str(folder / "k/nri.sock"),
        "TOPOBUS_GATEWAY__CDI_DIR": str(folder / "cdi"),
        "TOPOBUS_GATEWAY__CHECKPOINT_PATH": str(folder / "checkpoint.json"),
    }


@asynccontextmanager
async def all_services(
    url: str, folder: Path, *, order: tuple[str, ...] = SERVICES, settings: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, Service]]:
    """Run all eight (or those named) on the recorded demo machine, with their files below a folder.

    Not necessarily ready yet.
    """
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(service(name, url, settings or system_settings(folder)))
            for name in order
        }


def system_settings(folder: Path) -> dict[str, str]:
    """Settings of all services of `all_services` as environment variables.

    Their machine is the folder's own where it has one, for tests that change it.
    """
    own = folder / "machine"
    return {"TOPOBUS_ALL__HARDWARE__ROOT": str(own if own.exists() else demo_machine()), **gateway_settings(folder)}


@cache
def demo_machine() -> Path:
    """Build the recorded demo machine, once for all tests that only read it."""
    folder, owner = tempfile.mkdtemp(prefix="tb-"), os.getpid()
    # A child that a test forks may end as an interpreter does.
    atexit.register(lambda: shutil.rmtree(folder) if os.getpid() == owner else None)
    return build("dgx", Path(folder) / "machine").root


async def until_all_ready(running: Mapping[str, Service]) -> None:
    """Wait until each of them is ready."""
    for each_service in running.values():
        await each_service.until_ready()


async def readiness_report(port: int) -> str:
    """Return a service's answer at /readyz, with its head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await writer.drain()
    text = await reader.read()
    writer.close()
    return text.decode()
