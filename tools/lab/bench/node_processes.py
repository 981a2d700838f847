"""A node for benchmarks: nats-server and Topobus services as processes of their own on a recorded
machine, with a simulated kubelet.

The processes can be frozen and their memory can be read. It measures nothing itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lab.bench.child_processes import end_process
from lab.bench.process_use import read_counts
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.kubelet.simulator import KubeletSimulator
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import NodeSet

__all__ = ["NODE", "BenchNode", "BenchService", "bench_node", "bench_service", "wait_ready"]

NODE = "bench-node"
_START_LIMIT_S = 60.0


@dataclass(frozen=True)
class BenchService:
    """One running service."""

    name: str
    process: asyncio.subprocess.Process
    port: int
    log: Path

    def freeze(self) -> None:
        """Stop the process where it is (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def resident_mib(self) -> float:
        """Resident memory now, of the process alone."""
        return read_counts(self.process.pid).resident_mib

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


@dataclass(frozen=True)
class BenchNode:
    """The processes of one node."""

    folder: Path
    nats: NatsServer
    bus: Bus
    kubelet: KubeletSimulator
    services: dict[str, BenchService]

    def plugin_socket(self, device_class: str) -> Path:
        """The gateway's present device plugin socket of a class."""
        return max(
            self.kubelet.device_plugin_dir.glob(f"topobus-{device_class}-*.sock"),
            key=lambda path: path.stat().st_ctime_ns,
        )

    def driver_socket(self, driver: str) -> Path:
        """The gateway's present DRA socket of a driver."""
        return max((self.kubelet.plugins_dir / driver).glob("*.sock"), key=lambda path: path.stat().st_ctime_ns)


@asynccontextmanager
async def bench_node(
    names: Sequence[str],
    *,
    machine: str = "dgx",
    make_machine: Callable[[str, Path], object] = build,
    nats_config: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[BenchNode]:
    """Run a nats-server, a kubelet and these services until the block ends. All are ready.

    `make_machine` builds the machine of that name in a folder, `nats_config` is added to the
    server's configuration, `environment` to the services'.
    """
    # Short: a unix socket's path ends at 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tb"))
    try:
        await asyncio.to_thread(make_machine, machine, folder / "machine")
        async with AsyncExitStack() as stack:
            nats = await stack.enter_async_context(NatsServer(config=nats_config))
            bus = await stack.enter_async_context(Bus.session(NatsSettings(url=nats.url), name="bench"))
            await bus.provision()
            kubelet = await stack.enter_async_context(KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1)))
            services = {
                name: await stack.enter_async_context(bench_service(name, nats.url, folder, environment))
                for name in names
            }
            await wait_ready(services.values())
            yield BenchNode(folder=folder, nats=nats, bus=bus, kubelet=kubelet, services=services)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def wait_ready(services: Iterable[BenchService], *, limit_s: float = _START_LIMIT_S) -> None:
    """Wait until all are ready.

    Errors: raises PeerUnavailable with the log of one that ended, TimeoutError
    when one is not ready in time.
    """
    async with asyncio.timeout(limit_s):
        for service in services:
            while not await service.is_ready():
                if service.process.returncode is not None:
                    raise PeerUnavailable(
                        f"{service.name} ended with {service.process.returncode}: "
                        f"{service.log.read_text(encoding='utf-8')[-2000:]}"
                    )
                await asyncio.sleep(0.05)


@asynccontextmanager
async def bench_service(
    name: str, url: str, folder: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[BenchService]:
    """Run one service until the block ends. Its log and its sockets are in the folder."""
    port = free_port()
    variables = {
        **{key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")},
        "TOPOBUS_ALL__NODE": NODE,
        "TOPOBUS_ALL__NATS__URL": url,
        "TOPOBUS_ALL__LOG__FORMAT": "json",
        "TOPOBUS_ALL__HTTP__PORT": str(port),
        "TOPOBUS_ALL__HARDWARE__ROOT": str(folder / "machine"),
        "TOPOBUS_GATEWAY__KUBELET__DEVICE_PLUGIN_DIR": str(folder / "k/device-plugins"),
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_REGISTRY_DIR": str(folder / "k/plugins_registry"),
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR": str(folder / "k/plugins"),
        "TOPOBUS_GATEWAY__POD_RESOURCES_SOCKET": str(folder / "k/pod-resources/kubelet.sock"),
        "TOPOBUS_GATEWAY__RUNTIME__SOCKET": "",
        "TOPOBUS_GATEWAY__CDI_DIR": str(folder / "cdi"),
        "TOPOBUS_GATEWAY__CHECKPOINT_PATH": str(folder / "state/checkpoint.json"),
        **environment,
    }
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"topobus.{name}.main", env=variables, stdout=out, stderr=asyncio.subprocess.STDOUT
        )
    made = BenchService(name=name, process=process, port=port, log=log)
    try:
        yield made
    finally:
        if process.returncode is None:
            # A frozen process would never see the signal.
            made.thaw()
        await end_process(process)
