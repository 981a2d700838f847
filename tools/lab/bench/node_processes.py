"""A node for benchmarks: nats-server and Topobus services as processes of their own on a recorded
machine, with a simulated kubelet.

It measures nothing itself.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lab.bench.service_process import ServiceProcess, node_settings, wait_ready
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.kubelet.simulator import KubeletSimulator
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.idset import NodeSet

__all__ = ["NODE", "BenchNode", "bench_node", "bench_service"]

NODE = "bench-node"


@dataclass(frozen=True)
class BenchNode:
    """The processes of one node."""

    folder: Path
    nats: NatsServer
    bus: Bus
    kubelet: KubeletSimulator
    services: dict[str, ServiceProcess]

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


@asynccontextmanager
async def bench_service(
    name: str, url: str, folder: Path, environment: Mapping[str, str] = MappingProxyType({}), *, label: str = ""
) -> AsyncIterator[ServiceProcess]:
    """Run one service until the block ends. Its log and its sockets are in the folder."""
    service = ServiceProcess(name, {**node_settings(NODE, folder, url), **environment}, folder, label=label)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
