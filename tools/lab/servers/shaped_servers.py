"""A node's own server (leaf) and the hub behind it with the rendered configurations, and the wire
between them, which can be cut.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Self

from topobus.simulation.nats_server import NatsServer

__all__ = ["Link", "ShapedServer", "cheap_folder", "version_of"]

_MEMORY_DISK = Path("/dev/shm")
# A container's tmpfs often has 64 MiB, which a test that fills streams would use up.
_MEMORY_DISK_LEAST_BYTES = 2 * 1024**3
# A recorded machine is a tree of up to 13,000 files. A tmpfs also counts files, and runs out of
# them long before its bytes.
_MEMORY_DISK_LEAST_FILES = 500_000


def cheap_folder() -> Path | None:
    """Return a folder in memory where a synced write costs nothing.

    None (the temporary folder) where there is none with room. Sound for tests that kill the server:
    what a killed process has written stays in a tmpfs as in a page cache. Not for a test of a
    machine that loses its power.
    """
    try:
        room = os.statvfs(_MEMORY_DISK)
    except OSError:
        return None
    has_bytes = room.f_bavail * room.f_frsize >= _MEMORY_DISK_LEAST_BYTES
    # A tmpfs without a limit of files reports that it has none at all.
    has_files = room.f_files == 0 or room.f_favail >= _MEMORY_DISK_LEAST_FILES
    return _MEMORY_DISK if has_bytes and has_files and os.access(_MEMORY_DISK, os.W_OK) else None


def version_of(binary: Path) -> tuple[int, int]:
    """Return a server's version.

    Errors: raises ValueError when the program's output has none.
    """
    text = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"v(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{binary} --version printed {text!r}")
    return int(match[1]), int(match[2])


class ShapedServer(NatsServer):
    """A server with a rendered configuration, moved to a free port and a folder of its own."""

    def __init__(
        self, *, binary: Path | None, text: str, environment: dict[str, str], parent: Path | None = None
    ) -> None:
        """Prepare a server.

        Shapes: text — as deploy/nats has it; parent — where its folder is
        made, else in memory where that is cheap.
        """
        super().__init__(binary=binary, environment=environment, parent=parent or cheap_folder())
        self.text = text
        """As deploy/nats has it; another one
        counts from the next start on."""

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
        """Replace what a server that does not run has stored by an older copy."""
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
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Cut the wire: open connections end, and new ones are refused."""
        self._is_up = False
        for writer in self._open:
            writer.transport.abort()

    def join(self) -> None:
        """Join the wire again."""
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
