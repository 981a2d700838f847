"""A whole node as processes behind a proxy, with a simulated kubelet and a controller, and its
faults on demand.

The proxy is between all services and the nats-server. Observers bypass it.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.service_process import ServiceProcess, node_settings, wait_ready
from lab.chaos.faults import HUB_FAULTS, Fault, Planned, cause
from lab.chaos.hub_side import LEAF_SETTINGS, HubSide, hub_side, leaf_servers
from lab.chaos.nats_proxy import NatsProxy
from lab.chaos.observer import NodeObserver
from lab.chaos.wall_clocks import WallClocks
from topobus.bus.streams.provision import bucket_stream
from topobus.formats.messages.catalogue import LEDGER
from topobus.simulation.kubelet.simulator import KubeletSimulator, KubeletTimings
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.values.idset import NodeSet

__all__ = ["DEVICES", "NODE", "READY_S", "SERVICES", "ChaosNode", "Shape", "chaos_node"]

NODE = "chaos-node"
SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
HUB_CONTROLLER = "controller-hub"
# Of the recorded machine, by resource.
DEVICES = {"topobus.dev/gpu": 8, "topobus.dev/nic": 8, "topobus.dev/fpga": 2}
READY_S = 180.0
_WRITTEN_BACK_S = 60.0
_STORE_MIB = 192
_PAUSE_S = 0.1
# A restarted kubelet lists no pods at first, so for a minute only what it has listed is released. A
# run must see the end of that.
_GRACE = {"TOPOBUS_GATEWAY__DEADLINES__KUBELET_GRACE_S": "20"}


@dataclass
class ChaosNode:
    """All parts of one node, and their faults."""

    folder: Path
    server: NatsServer
    proxy: NatsProxy
    kubelet: KubeletSimulator
    services: dict[str, ServiceProcess]
    clocks: WallClocks
    hub: HubSide | None
    """Where the node has a server of its own."""
    has_small_disk: bool
    """Whether the server's store has a file system of its own, which can be filled."""
    done: Counter[str] = field(default_factory=Counter)
    _at_server: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def supervise(self) -> None:
        """Start the server again when it has ended by itself, as a supervisor does, until
        cancelled.

        Its output stays in its log.
        """
        while True:
            await asyncio.sleep(_PAUSE_S)
            async with self._at_server:
                if not self.server.is_running:
                    self.done["server ended by itself"] += 1
                    await self.server.start()

    @property
    def cdi_dir(self) -> Path:
        """Where the gateway writes CDI files."""
        return self.folder / "cdi"

    async def do(self, planned: Planned, observer: NodeObserver) -> None:
        """Cause one fault, and return when it is over. The affected part may still be
        recovering.
        """
        self.done[planned.name] += 1
        match planned.fault:
            case Fault.KILL_SERVER | Fault.RESTART_SERVER:
                async with self._at_server:
                    await self._cause(planned)
            case Fault.ROLL_BACK | Fault.EMPTY_STORE:
                await self._put_store_back(planned, observer)
            case Fault.FILL_DISK:
                await self._fill_disk(planned.lasts_s)
            case Fault.RESTART_KUBELET:
                await self.kubelet.restart()
                self.kubelet.sources_ready()
            case Fault.STEP_CLOCK:
                self.clocks.step(planned.moves_s)
            case Fault.SKEW_CLOCK:
                self.clocks.skew(planned.service, planned.moves_s)
                await asyncio.sleep(planned.lasts_s)
                self.clocks.skew(planned.service, 0.0)
            case fault if fault in HUB_FAULTS and self.hub is not None:
                await self.hub.do(planned)
            case _:
                await self._cause(planned)

    async def _cause(self, planned: Planned) -> None:
        await cause(planned, self.services[planned.service], self.server, self.proxy)

    async def _put_store_back(self, planned: Planned, observer: NodeObserver) -> None:
        """Replace the store by its copy from some seconds ago, or by an empty one, while the
        topology service lives, which writes its ledger back.
        """
        await wait_ready([self.services["topology"]], limit_s=READY_S)
        copy = self.folder / "older-store"
        if planned.fault is Fault.ROLL_BACK:
            # A copy as a crash would leave it: nothing is written meanwhile.
            self.server.pause()
            try:
                await asyncio.to_thread(shutil.copytree, self.server.store, copy)
            finally:
                self.server.resume()
            await asyncio.sleep(planned.lasts_s)
        if self.hub is not None:
            self.hub.losses += 1
        before = await observer.store_is_put_back()
        async with self._at_server:
            await self.server.kill()
            await asyncio.to_thread(self._replace_store, copy)
            await self.server.start()
        await observer.until_written_back(before, _WRITTEN_BACK_S)

    async def copy_ledger(self) -> Path:
        """Copy the ledger's bucket as a crash would leave it: nothing is written meanwhile."""
        await wait_ready([self.services["topology"]], limit_s=READY_S)
        copy = self.folder / "older-ledger"
        self.server.pause()
        try:
            await asyncio.to_thread(shutil.copytree, self._ledger_store(), copy)
        finally:
            self.server.resume()
        return copy

    async def put_ledger_back(self, copy: Path) -> None:
        """Replace the present bucket by the older one while neither the server nor topology runs,
        and start both.
        """
        self.done["lose-ledger"] += 1
        if self.hub is not None:
            self.hub.losses += 1
        await self.services["topology"].kill()
        async with self._at_server:
            await self.server.kill()
            store = self._ledger_store()
            await asyncio.to_thread(shutil.rmtree, store)
            await asyncio.to_thread(shutil.move, copy, store)
            await self.server.start()
        await self.services["topology"].start()

    def _ledger_store(self) -> Path:
        return next(self.server.store.rglob(bucket_stream(LEDGER)))

    def _replace_store(self, copy: Path) -> None:
        for old in self.server.store.iterdir():
            shutil.rmtree(old)
        if copy.exists():
            shutil.copytree(copy, self.server.store, dirs_exist_ok=True)
            shutil.rmtree(copy)

    async def _fill_disk(self, lasts_s: float) -> None:
        """Leave the server no byte for a while.

        Then an operator makes room, and starts the server again, as some versions need it.
        """
        if not self.has_small_disk:
            return
        filler = self.server.store / "filler"
        await asyncio.to_thread(_fill, filler)
        await asyncio.sleep(lasts_s)
        filler.unlink()
        async with self._at_server:
            await self.server.kill()
            await self.server.start()


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                # The disk is full for blocks of this size.
                continue


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The composition of a node."""

    nats_server: Path | None = None
    is_leaf: bool = False
    """Whether the node has a server of its own and a relay, with a hub and its controller."""
    controllers: int = 2
    libfaketime: Path | None = None
    """None: no clock is moved."""
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Programs in place of services, by the service's name."""

    @property
    def labels(self) -> dict[str, str]:
        """Map the names of the processes to their services."""
        replicas = {f"controller-{number}": "controller" for number in range(2, self.controllers + 1)}
        leaf = {"relay": "relay", HUB_CONTROLLER: "controller"} if self.is_leaf else {}
        return {**{name: name for name in SERVICES}, **replicas, **leaf}


@asynccontextmanager
async def chaos_node(folder: Path, seed: int, shape: Shape) -> AsyncIterator[ChaosNode]:
    """Run a node until the block ends. Its services have been started and are not ready yet."""
    await asyncio.to_thread(build, "dgx", folder / "machine")
    clocks = WallClocks(folder, shape.libfaketime)
    async with AsyncExitStack() as stack:
        server: NatsServer
        behind = leaf_servers(NODE, folder, shape.nats_server) if shape.is_leaf else None
        if behind is not None:
            server = behind[0]
        else:
            server = NatsServer(binary=shape.nats_server, parent=folder, store_limit="64GB", start_limit_s=READY_S)
            # Beside the services' logs, which are kept when something was violated.
            server.log = folder / "nats.log"
        server.store.mkdir()
        has_small_disk = _mount(server.store)
        if has_small_disk:
            stack.callback(subprocess.run, ["umount", "-l", str(server.store)], check=False)
        await stack.enter_async_context(server)
        hub = await stack.enter_async_context(hub_side(NODE, *behind)) if behind is not None else None
        proxy = await stack.enter_async_context(NatsProxy(server.port, seed))
        timings = KubeletTimings(pod_retry_s=1.0, reconcile_s=5.0, dra_s=20.0)
        kubelet = await stack.enter_async_context(
            KubeletSimulator(folder / "k", numa_nodes=NodeSet(0, 1), timings=timings)
        )
        services: dict[str, ServiceProcess] = {}
        stack.callback(lambda: clocks.clean_up(frozenset(pid for service in services.values() for pid in service.pids)))
        settings = {**node_settings(NODE, folder, proxy.url), **_GRACE, **(LEAF_SETTINGS if shape.is_leaf else {})}
        for label, name in shape.labels.items():
            given = settings
            if hub is not None and label == HUB_CONTROLLER:
                given = node_settings(NODE, folder, hub.server.url)
            program = shape.programs.get(name, ())
            services[label] = ServiceProcess(
                name, {**given, **clocks.environment(label)}, folder, label=label, program=program
            )
        for service in services.values():
            stack.push_async_callback(service.kill)
            await service.start()
        yield ChaosNode(folder, server, proxy, kubelet, services, clocks, hub, has_small_disk)


def _mount(store: Path) -> bool:
    """Mount a small disk of its own for the store.

    False where this process lacks the rights for that.
    """
    try:
        words = ["mount", "-t", "tmpfs", "-o", f"size={_STORE_MIB}m", "tmpfs", str(store)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
