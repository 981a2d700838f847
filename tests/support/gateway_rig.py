"""A gateway, a kubelet and a node plane in one folder and on one bus, for integration tests."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from support.node_plane import NODE, NodePlane, show_machine
from support.secured_nats import SecuredNats
from topobus.bus.bus import Bus
from topobus.engine.health.silence import SilenceSettings
from topobus.formats.messages.catalogue import PODS
from topobus.formats.messages.messages import PodsReply, PodsRequest
from topobus.gateway.config import ClusterSettings, DeadlineSettings, GatewaySettings, KubeletSettings, RuntimeSettings
from topobus.gateway.containers.rules.edit_limits import EditRights
from topobus.gateway.service import serve
from topobus.process.broadcast import Broadcast
from topobus.process.clock import Clock, SystemClock
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness
from topobus.process.service import Runtime
from topobus.testing.apiserver import ApiServerSimulator
from topobus.testing.kubelet import KubeletSimulator
from topobus.values.idset import NodeSet

# Short where a test waits for it, long where a busy machine must not matter.
DEADLINES = DeadlineSettings(
    retry_s=0.05,
    watchdog_s=0.1,
    first_list_s=30.0,
    prefer_s=30.0,
    adopt_s=30.0,
    prepare_s=30.0,
    reconcile_s=0.1,
    kubelet_grace_s=0.0,
    claim_retry_s=0.3,
)
IMPATIENT = msgspec.structs.replace(DEADLINES, prefer_s=1.0, adopt_s=1.0, prepare_s=1.0)
"""For a test whose peer never answers, so that it waits no longer than that for it."""


SILENCE = SilenceSettings(every_s=0.97)
"""For a test that moves the clock from look to look: a length that nothing else waits for, so that
`ManualClock.ticking` follows the looks alone."""


class WatchedReadiness(Readiness):
    """Readiness that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = Broadcast()

    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        """Say it, and wake who waits."""
        super().set(part, is_ready, why)
        self._changed.announce()

    async def until(self, holds: Callable[[dict[str, str]], bool], timeout_s: float = 60.0) -> dict[str, str]:
        """Wait until the report is as wanted."""
        async with asyncio.timeout(timeout_s):
            while True:
                ticket = self._changed.ticket()
                if holds(self.report()):
                    return self.report()
                await ticket.wait()


@dataclass
class Rig:
    """Everything around one gateway."""

    root: Path
    url: str
    bus: Bus
    plane: NodePlane
    kubelet: KubeletSimulator
    settings: GatewaySettings
    readiness: WatchedReadiness
    nats: NatsSettings
    """By which the gateway connects."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    """What the present gateway counts."""

    @property
    def cdi_dir(self) -> Path:
        """Where CDI files go."""
        return Path(self.settings.cdi_dir)

    def join(self, server: ApiServerSimulator, **changes: object) -> None:
        """Make the gateway one of a cluster; `changes` are settings of that."""
        options: dict[str, object] = {"retry_s": 0.05, "publish_delay_s": 0.01, **changes}
        kubeconfig = str(server.write_kubeconfig(self.root / "kubeconfig"))
        cluster = ClusterSettings(mode="kubeconfig", kubeconfig=kubeconfig, **options)  # type: ignore[arg-type]  # a test's own options
        self.settings = msgspec.structs.replace(self.settings, cluster=cluster)

    async def pods(self, **request: str) -> PodsReply:
        """Ask the gateway for its pods as `topobus pods` does, under the command's name."""
        async with Bus.session(NatsSettings(url=self.url), name="topobus-cli") as bus:
            return await bus.ask(PODS, PodsRequest(**request), node=NODE)

    @asynccontextmanager
    async def gateway(self, *, clock: Clock | None = None, **changes: object) -> AsyncIterator[asyncio.Task[None]]:
        """Run a gateway for the length of a block, on a connection of its own; `changes` are
        settings.
        """
        settings = msgspec.structs.replace(self.settings, **changes)
        self.readiness, self.registry = WatchedReadiness(), CollectorRegistry()
        async with Bus.session(self.nats, name="gateway") as bus:
            runtime = Runtime(
                name="gateway",
                node=NODE,
                bus=bus,
                clock=clock or SystemClock(),
                readiness=self.readiness,
                registry=self.registry,
            )
            task = asyncio.create_task(serve(settings, runtime))
            try:
                yield task
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


@asynccontextmanager
async def make_rig(
    url: str,
    *,
    secured: SecuredNats | None = None,
    classes: tuple[str, ...] = ("gpu", "nic"),
    **kubelet_options: object,
) -> AsyncIterator[Rig]:
    """Make the folder, the bus and the node plane; kubelet and gateway are started by the test.

    The plane answers for devices of `classes`. On a server with users it is the topology service
    alone, and the test decides who answers for the devices.
    """
    # Short: a unix socket's path ends at 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="gw"))
    nats = NatsSettings(url=url) if secured is None else secured.settings("gateway")
    try:
        async with Bus.session(nats, name="gateway") if secured is None else secured.bus("topology") as bus:
            await bus.provision()
            async with contextlib.nullcontext(bus) if secured is None else secured.bus("discovery") as discovery:
                await show_machine(discovery)
            plane = NodePlane(bus)
            options: dict[str, object] = {"numa_nodes": NodeSet(0, 1), **kubelet_options}
            kubelet = KubeletSimulator(root / "kubelet", **options)  # type: ignore[arg-type]  # a test's own options
            settings = GatewaySettings(
                node=NODE,
                kubelet=KubeletSettings(
                    device_plugin_dir=str(kubelet.device_plugin_dir),
                    plugins_registry_dir=str(kubelet.plugins_registry_dir),
                    plugins_dir=str(kubelet.plugins_dir),
                ),
                pod_resources_socket=str(kubelet.pod_resources_socket),
                cdi_dir=str(root / "cdi"),
                checkpoint_path=str(root / "state" / "checkpoint.json"),
                deadlines=DEADLINES,
                # Never that of the machine on which the tests run.
                runtime=RuntimeSettings(socket=str(root / "nri.sock")),
                # The node plane names its nodes after the devices.
                edits={name: EditRights(device_nodes=(f"/dev/{name}-",)) for name in ("gpu", "nic", "fpga", "cpu")},
            )
            async with plane.running(classes if secured is None else ()):
                yield Rig(root, url, bus, plane, kubelet, settings, WatchedReadiness(), nats)
    finally:
        shutil.rmtree(root)
