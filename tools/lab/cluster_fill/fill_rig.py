"""The processes of a fill: nats-server, the API server simulator, the nodes, and replicas of the
controller, each a process of its own.

Their memory and processor time can be read, and there are clients of the two servers. When the
block ends, all processes have ended and their folder is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from lab.bench.node_processes import BenchService
from lab.bench.process_use import Counts, read_counts
from lab.cluster_fill.node_records import NodeRecord
from lab.cluster_fill.played_nodes import READY, open_client
from topobus.bus.bus import Bus
from topobus.formats.messages.codec import encode
from topobus.kubernetes.client import KubernetesClient
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.testing.apiserver.request_counts import METRICS_PATH, RequestKind
from topobus.values.errors import PeerUnavailable

__all__ = ["CONTROLLER", "FillRig", "fill_rig"]

CONTROLLER = "controller"
"""The user of the replicas at the API server."""
_NODES, _PODS = "nodes", "pods"
_LINE_LIMIT_S = 600.0
_STOP_LIMIT_S = 10.0


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
    replicas: list[BenchService] = field(default_factory=list)
    """All that were started, including those that ended."""

    async def start_replica(self, settings: Mapping[str, str]) -> BenchService:
        """Start one more controller, which is not ready yet."""
        port, log = free_port(), self.folder / f"controller-{len(self.replicas)}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "topobus.controller.main",
                env={
                    **{key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")},
                    "TOPOBUS_ALL__NATS__URL": self.nats.url,
                    "TOPOBUS_ALL__LOG__FORMAT": "json",
                    "TOPOBUS_ALL__HTTP__PORT": str(port),
                    "TOPOBUS_CONTROLLER__HOME": "cluster",
                    "TOPOBUS_CONTROLLER__CLUSTER__KUBECONFIG": str(self.folder / CONTROLLER),
                    **settings,
                },
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
            )
        replica = BenchService(name=f"controller-{len(self.replicas)}", process=process, port=port, log=log)
        self.replicas.append(replica)
        return replica

    def counts(self) -> dict[str, Counts]:
        """Read what each living process has used."""
        living = {replica.name: replica.process.pid for replica in self.replicas if replica.process.returncode is None}
        return {name: read_counts(pid) for name, pid in {**self.pids, **living}.items()}

    async def requests(self) -> dict[RequestKind, int]:
        """Read the number of requests to the API server so far."""
        return await asyncio.to_thread(_read_requests, self.url + METRICS_PATH)


@asynccontextmanager
async def fill_rig(record: NodeRecord, nodes: int) -> AsyncIterator[FillRig]:
    """Run everything except the controller until the block ends. The nodes are there."""
    folder = Path(tempfile.mkdtemp(prefix="tb"))
    try:
        async with AsyncExitStack() as stack:
            nats = await stack.enter_async_context(NatsServer())
            bus = await stack.enter_async_context(Bus.session(NatsSettings(url=nats.url), name="bench"))
            await bus.provision()
            users = [f"--user={name}={folder / name}" for name in (CONTROLLER, _NODES, _PODS)]
            server = await stack.enter_async_context(_process("topobus.testing.apiserver", *users))
            url = await _line(server)
            (folder / "record").write_bytes(encode(record))
            player = await stack.enter_async_context(
                _process(
                    "lab.cluster_fill.played_nodes", nats.url, str(folder / _NODES), str(nodes), str(folder / "record")
                )
            )
            while await _line(player) != READY:
                pass
            client = open_client(str(folder / _PODS))
            stack.push_async_callback(client.close)
            pids = {"API server": server.pid, "nats-server": nats.pid, _NODES: player.pid, "bench": os.getpid()}
            rig = FillRig(folder=folder, nats=nats, bus=bus, url=url, client=client, pids=pids)
            stack.push_async_callback(_end_replicas, rig)
            yield rig
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _process(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        await _end(process)


async def _line(process: asyncio.subprocess.Process) -> str:
    """Read a line that a process prints.

    Errors: raises PeerUnavailable when it ends before, TimeoutError when
    it prints none in ten minutes.
    """
    assert process.stdout is not None
    async with asyncio.timeout(_LINE_LIMIT_S):
        line = await process.stdout.readline()
    if not line:
        raise PeerUnavailable(f"a process of the bench ended with {await process.wait()}; its output is above")
    return line.decode().strip()


async def _end_replicas(rig: FillRig) -> None:
    for replica in rig.replicas:
        await _end(replica.process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


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
