"""A node's own server (leaf), the hub behind it, and the link between them, as real processes with the rendered configurations."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

from topobus.contracts.nats_shapes import render_hub, render_leaf
from topobus.contracts.up_subjects import domain_of
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings
from topobus.simulation.nats_server import NatsServer, find_nats_server, free_port
from topobus.testing.nats.accounts import cheap_folder

NODE = "demo-node"
# A test waits for what it wants to see; a server on a busy machine may take its time.
_PATIENCE_S = 30.0


def version_of(binary: Path) -> tuple[int, int]:
    """Give a server's version."""
    text = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"v(\d+)\.(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


class ShapedServer(NatsServer):
    """A server with a rendered configuration, moved to a free port and a folder of its own."""

    def __init__(self, *, binary: Path | None, text: str, environment: dict[str, str]) -> None:
        """Prepare a server; `text` is as `contracts.nats_shapes` renders it."""
        super().__init__(binary=binary, environment=environment, parent=cheap_folder())
        self.text = text
        """As `contracts.nats_shapes` renders it; another one counts from the next start on."""

    def write_config(self) -> Path:
        """Write the rendered text with this machine's port and folder."""
        text = re.sub(r'^listen: ".*"$', f'listen: "127.0.0.1:{self.port}"', self.text, flags=re.MULTILINE)
        text = re.sub(r'^http: ".*"$', "", text, flags=re.MULTILINE).replace('"/data"', f'"{self.store}"')
        file = self.folder / "nats.conf"
        file.write_text(text, encoding="utf-8")
        return file

    def lose_store(self) -> None:
        """Remove what a server that does not run has stored."""
        shutil.rmtree(self.store, ignore_errors=True)

    def copy_store(self, to: Path) -> None:
        """Keep a copy of what a server that does not run has stored."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.store, to)

    def restore_store(self, copy: Path) -> None:
        """Put an older copy in place of what a server that does not run has stored."""
        self.lose_store()
        shutil.copytree(copy, self.store)


class Link:
    """The wire between a leaf and its hub, which can be cut: a proxy on loopback."""

    def __init__(self, port: int, to_port: int) -> None:
        self.port = port
        self._to_port = to_port
        self._is_up = True
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.bytes_up = 0
        """What the leaf has sent, in bytes."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Cut the wire: what is open ends, and nothing new is let through."""
        self._is_up = False
        for writer in self._open:
            writer.transport.abort()

    def join(self) -> None:
        """Let it through again."""
        self._is_up = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_up:
            writer.transport.abort()
            return
        try:
            hub_reader, hub_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, hub_writer}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, hub_writer, is_up=True))
                tasks.create_task(self._copy(hub_reader, writer, is_up=False))
        finally:
            for end in (writer, hub_writer):
                self._open.discard(end)
                end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.bytes_up += len(data) if is_up else 0
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.transport.abort()


class LeafPair:
    """One hub and one leaf, joined by a link."""

    def __init__(self, hub: ShapedServer, leaf: ShapedServer, link: Link) -> None:
        self.hub = hub
        self.leaf = leaf
        self.link = link

    @asynccontextmanager
    async def buses(self) -> AsyncIterator[tuple[Bus, Bus]]:
        """Connect to both: at the hub as the controller, at the leaf as the gateway; each makes the streams of its server."""
        async with (
            Bus.session(NatsSettings(url=self.hub.url, timeout_s=_PATIENCE_S), name="controller") as hub,
            Bus.session(NatsSettings(url=self.leaf.url, provisioner="topology", timeout_s=_PATIENCE_S), name="gateway") as leaf,
        ):
            await hub.provision()
            await leaf.provision()
            yield hub, leaf


@asynccontextmanager
async def leaf_pair(binary: Path | None = None, *, node: str = NODE) -> AsyncIterator[LeafPair]:
    """Run a hub and a leaf until the block ends."""
    binary = binary or find_nats_server()
    version = version_of(binary)
    ports = []
    while len(ports) < 2:
        ports = list(dict.fromkeys((*ports, free_port())))
    hub_port, link_port = ports
    hub_text = render_hub(version).replace('"0.0.0.0:7422"', f'"127.0.0.1:{hub_port}"')
    leaf_text = render_leaf(max(version, (2, 10)))
    if version < (2, 10):
        # Such a server is no leaf of an installation; what crosses is the same.
        hub_text, leaf_text = (
            text.replace("  sync_interval: always\n", "").replace('reconnect: "1s"', "reconnect: 1") for text in (hub_text, leaf_text)
        )
    hub = ShapedServer(binary=binary, text=hub_text, environment={"TOPOBUS_HUB_NAME": "hub"})
    leaf = ShapedServer(
        binary=binary,
        text=leaf_text,
        environment={
            "TOPOBUS_LEAF_DOMAIN": domain_of(node),
            "TOPOBUS_LEAF_HUB_URL": f"nats://127.0.0.1:{link_port}",
        },
    )
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(Link(link_port, hub_port))
        await stack.enter_async_context(hub)
        await stack.enter_async_context(leaf)
        yield LeafPair(hub, leaf, link)
