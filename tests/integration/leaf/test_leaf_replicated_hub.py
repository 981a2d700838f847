"""A node behind a hub of three servers, with the rendered configurations: whichever server dies,
and when all stores are lost, the hub's copies are whole again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from docpages.nats_files import domain_of, render_hub, render_leaf
from lab.servers.nats_cluster import NatsCluster
from lab.servers.shaped_servers import Link, ShapedServer, version_of
from support.leaf_pair import NODE, LeafPair
from support.looks import next_look
from support.relays import relay, tell_sickness, until_equal
from topobus.bus.bus import Bus
from topobus.bus.failures import JetStreamError
from topobus.bus.server_config.streams import bucket_stream, stream_names
from topobus.bus.streams.jetstream import JetStream
from topobus.formats.messages.catalogue import HEALTH, LEDGER, MACHINE
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, free_port
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """Three servers of a hub, a node's own server, and a bus at each side."""

    cluster: NatsCluster
    pair: LeafPair
    hub: Bus
    leaf: Bus

    async def write(self, number: int) -> None:
        """Write a state and an event at the node."""
        await self.leaf.put(LEDGER, Ledger(node=NODE, sequence=number), node=NODE)
        await tell_sickness(self.leaf, number)

    async def cluster_of(self, stream: str) -> dict[str, object]:
        """Say which server leads a stream and how the others are, as soon as there is a leader."""
        async with asyncio.timeout(_LIMIT_S):
            while True:
                try:
                    cluster: dict[str, object] = (await JetStream(self.hub._connection).call(f"STREAM.INFO.{stream}"))[
                        "cluster"
                    ]
                except (PeerUnavailable, JetStreamError):
                    await self.hub.wait_connected()
                else:
                    if cluster.get("leader"):
                        return cluster
                await next_look()

    async def until_copied(self) -> None:
        """Wait until each stream has three copies that are as new as its leader's: another server
        may die then.
        """
        for stream in stream_names():
            async with asyncio.timeout(_LIMIT_S):
                while not _is_copied(await self.cluster_of(stream)):
                    await next_look()


def _is_copied(cluster: dict[str, object]) -> bool:
    replicas = cluster.get("replicas")
    return (
        isinstance(replicas, list)
        and len(replicas) == 2
        and all(copy["current"] and not copy.get("offline") for copy in replicas)
    )


@pytest_asyncio.fixture
async def joined(nats_binary: Path) -> AsyncIterator[_Joined]:
    """All of them, with three copies of each stream."""
    version = version_of(nats_binary)
    if version < (2, 10):
        pytest.skip("2.9 has no exclusive compare-and-set on replicas; `make versions` runs this on newer ones")
    link_ports: list[int] = []
    while len(link_ports) < 4:
        link_ports = list(dict.fromkeys((*link_ports, free_port())))
    *hub_ports, wire_port = link_ports
    unused = iter(hub_ports)

    def make(port: int, config: str) -> NatsServer:
        # The names and ports of this machine come behind the rendered text, and win.
        text = render_hub(version).replace('"0.0.0.0:7422"', f'"127.0.0.1:{next(unused)}"')
        server = ShapedServer(
            binary=nats_binary, text=text + config.replace("http:", "  http:"), environment={"TOPOBUS_HUB_NAME": "hub"}
        )
        server.port = port
        return server

    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(NatsCluster(make=make))
        # The node is told one server of the hub; that one tells it the others.
        environment = {
            "TOPOBUS_LEAF_DOMAIN": domain_of(NODE),
            "TOPOBUS_LEAF_HUB_URL": f"nats://127.0.0.1:{hub_ports[0]}",
        }
        leaf_server = await stack.enter_async_context(
            ShapedServer(binary=nats_binary, text=render_leaf(version), environment=environment)
        )
        first = cluster.servers[0]
        assert isinstance(first, ShapedServer)
        pair = LeafPair(first, leaf_server, Link(wire_port, hub_ports[0]))
        # A stream without a leader does not answer: what is asked meanwhile is
        # given up soon, and asked again.
        hub = await stack.enter_async_context(
            Bus.session(NatsSettings(url=cluster.url, replicas=3, timeout_s=2.0), name="controller")
        )
        leaf = await stack.enter_async_context(
            Bus.session(NatsSettings(url=leaf_server.url, provisioner="topology", timeout_s=30.0), name="gateway")
        )
        async with asyncio.timeout(_LIMIT_S):
            await hub.provision()
            await leaf.provision()
        yield _Joined(cluster=cluster, pair=pair, hub=hub, leaf=leaf)


async def test_copies_are_whole_when_each_server_of_the_hub_dies_in_turn(joined: _Joined) -> None:
    """The leader of the ledgers first, then each server: what the node stores meanwhile is there
    once, in its order.
    """
    await joined.leaf.put(MACHINE, Machine(node=NODE, numa_nodes=(), cpus=()), node=NODE)
    await joined.write(1)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        leader = str((await joined.cluster_of(bucket_stream(LEDGER)))["leader"])
        others = [server for server in joined.cluster.servers if server is not joined.cluster.named(leader)]
        for number, server in enumerate((joined.cluster.named(leader), *others), start=2):
            await joined.until_copied()
            await server.kill()
            await joined.write(number)
            await until_equal(joined.hub, joined.leaf)
            await server.start()
        await joined.until_copied()

    (newest,) = await joined.hub.last(HEALTH, limit=1, node=NODE, device_class="gpu", device="gpu-0")
    assert newest.value.generation == 4


async def test_copies_are_whole_when_the_hub_was_restored_empty(joined: _Joined) -> None:
    """All three lost their stores: the controller makes the streams again, and the relay says all
    states and all events.
    """
    await joined.leaf.put(MACHINE, Machine(node=NODE, numa_nodes=(), cpus=()), node=NODE)
    for number in (1, 2):
        await joined.write(number)
    async with relay(joined.pair):
        await until_equal(joined.hub, joined.leaf)
        await joined.cluster.found_anew()
        await joined.write(3)
        await until_equal(joined.hub, joined.leaf)
        await joined.until_copied()
