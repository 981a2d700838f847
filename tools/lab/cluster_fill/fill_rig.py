"""The processes of a fill: nats-server, the API server simulator, the nodes, and replicas of the
controller, each a process of its own.

Their memory and processor time can be read, and there are clients of the two servers. When the
block ends, all processes have ended and their folder is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from lab.bench.child_processes import child_process, read_line
from lab.bench.node_processes import bench_service
from lab.bench.process_use import Counts, read_counts
from lab.bench.service_process import ServiceProcess
from lab.cluster_fill.played_nodes import READY, open_client
from lab.leaves.node_content import NodeContent
from topobus.bus.bus import Bus
from topobus.kubernetes.client import KubernetesClient
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver.request_counts import METRICS_PATH, RequestKind

__all__ = ["CONTROLLER", "FillRig", "fill_rig"]

CONTROLLER = "controller"
"""The user of the replicas at the API server."""
_NODES, _PODS = "nodes", "pods"


@dataclass
class FillRig:
    """The processes and clients of one fill."""

    folder: Path
    nats: NatsServer
    bus: Bus
    url: str
    """The API server's."""
    client: KubernetesClient
    """Of the user who creates pods and binds them."""
    pids: dict[str, int]
    """Process ids of all except the replicas, by name."""
    stack: AsyncExitStack
    """Ends the replicas."""
    replicas: list[ServiceProcess] = field(default_factory=list)
    """All that were started, including those that ended."""

    async def start_replica(self) -> None:
        """Start one more controller, which is not ready yet."""
        settings = {
            "TOPOBUS_CONTROLLER__HOME": "cluster",
            "TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG": str(self.folder / CONTROLLER),
        }
        label = f"controller-{len(self.replicas)}"
        starting = bench_service("controller", self.nats.url, self.folder, settings, label=label)
        self.replicas.append(await self.stack.enter_async_context(starting))

    def counts(self) -> dict[str, Counts]:
        """Read what each living process has used."""
        living = {replica.label: replica.pid for replica in self.replicas if replica.is_running}
        return {name: read_counts(pid) for name, pid in {**self.pids, **living}.items()}

    async def requests(self) -> dict[RequestKind, int]:
        """Read the number of requests to the API server so far."""
        return await asyncio.to_thread(_read_requests, self.url + METRICS_PATH)


@asynccontextmanager
async def fill_rig(content: NodeContent, nodes: int) -> AsyncIterator[FillRig]:
    """Run everything except the controller until the block ends. The nodes are there."""
    folder = Path(tempfile.mkdtemp(prefix="tb"))
    try:
        async with AsyncExitStack() as stack:
            nats = await stack.enter_async_context(NatsServer())
            bus = await stack.enter_async_context(Bus.session(NatsSettings(url=nats.url), name="bench"))
            await bus.provision()
            users = [f"--user={name}={folder / name}" for name in (CONTROLLER, _NODES, _PODS)]
            server = await stack.enter_async_context(child_process("topobus.testing.apiserver", *users))
            url = await read_line(server)
            (folder / "content").write_bytes(msgspec.json.encode(content))
            arguments = (nats.url, str(folder / _NODES), str(nodes), str(folder / "content"))
            player = await stack.enter_async_context(child_process("lab.cluster_fill.played_nodes", *arguments))
            while await read_line(player) != READY:
                pass
            client = open_client(str(folder / _PODS))
            stack.push_async_callback(client.close)
            pids = {"API server": server.pid, "nats-server": nats.pid, _NODES: player.pid, "bench": os.getpid()}
            yield FillRig(folder=folder, nats=nats, bus=bus, url=url, client=client, pids=pids, stack=stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_requests(url: str) -> dict[RequestKind, int]:
    with urllib.request.urlopen(url, timeout=60.0) as answer:
        text = answer.read().decode()
    counts: dict[RequestKind, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            part = f"/{labels['subresource']}" if labels["subresource"] else ""
            kind = RequestKind(
                user=labels["user"],
                verb=labels["verb"].lower(),
                resource=labels["resource"] + part,
                code=int(labels["code"]),
            )
            counts[kind] = int(sample.value)
    return counts
