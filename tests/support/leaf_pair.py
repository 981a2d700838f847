"""A node's own server (leaf), the hub behind it, and the link between them, as real processes with
the rendered configurations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from docpages.nats_files import domain_of, render_hub, render_leaf
from lab.servers.shaped_servers import Link, ShapedServer, version_of
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import find_nats_server, free_port

__all__ = ["NODE", "Joined", "LeafPair", "Link", "ShapedServer", "leaf_pair", "version_of"]

NODE = "demo-node"
# A test waits for what it wants to see; a server on a busy machine may take its time.
_PATIENCE_S = 30.0


class LeafPair:
    """One hub and one leaf, joined by a link."""

    def __init__(self, hub: ShapedServer, leaf: ShapedServer, link: Link) -> None:
        self.hub = hub
        self.leaf = leaf
        self.link = link

    @asynccontextmanager
    async def buses(self) -> AsyncIterator[tuple[Bus, Bus]]:
        """Connect to both: at the hub as the controller, at the leaf as the gateway.

        Each makes the streams of its server.
        """
        async with (
            Bus.session(NatsSettings(url=self.hub.url, timeout_s=_PATIENCE_S), name="controller") as hub,
            Bus.session(
                NatsSettings(url=self.leaf.url, provisioner="topology", timeout_s=_PATIENCE_S), name="gateway"
            ) as leaf,
        ):
            await hub.provision()
            await leaf.provision()
            yield hub, leaf


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A hub and a leaf with a bus at each."""

    pair: LeafPair
    hub: Bus
    leaf: Bus


@asynccontextmanager
async def leaf_pair(
    binary: Path | None = None, *, node: str = NODE, hub_tls: str = "", leaf_tls: str = ""
) -> AsyncIterator[LeafPair]:
    """Run a hub and a leaf until the block ends; with `hub_tls` and `leaf_tls`, folders of
    certificates, their link is encrypted.
    """
    binary = binary or find_nats_server()
    version = version_of(binary)
    ports = []
    while len(ports) < 2:
        ports = list(dict.fromkeys((*ports, free_port())))
    hub_port, link_port = ports
    # Otherwise the hub gives the leaf its own address (2.10 does so even with `no_advertise`), and
    # the leaf bypasses a link that is cut.
    listen = f'"127.0.0.1:{hub_port}"\n  advertise: "127.0.0.1:{link_port}"'
    hub_text = render_hub(version, tls=hub_tls).replace('"0.0.0.0:7422"', listen)
    leaf_text = render_leaf(max(version, (2, 10)), tls=leaf_tls)
    if version < (2, 10):
        # Such a server is no leaf of an installation; what crosses is the same.
        hub_text, leaf_text = (
            text.replace("  sync_interval: always\n", "").replace('reconnect: "1s"', "reconnect: 1")
            for text in (hub_text, leaf_text)
        )
    hub = ShapedServer(binary=binary, text=hub_text, environment={"TOPOBUS_HUB_NAME": "hub"})
    leaf = ShapedServer(
        binary=binary,
        text=leaf_text,
        environment={
            "TOPOBUS_LEAF_DOMAIN": domain_of(node),
            "TOPOBUS_LEAF_HUB_URL": f"{'tls' if leaf_tls else 'nats'}://127.0.0.1:{link_port}",
        },
    )
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(Link(link_port, hub_port))
        await stack.enter_async_context(hub)
        await stack.enter_async_context(leaf)
        yield LeafPair(hub, leaf, link)
