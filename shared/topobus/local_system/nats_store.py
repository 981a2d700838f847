"""The store of the NATS server that `topobus up` runs: its size on this disk, whether it works, and
whether it needs a restart.

A server whose disk was full may accept clients and never store anything again, however much room
there is then (2.9 stops answering, 2.15 freezes the stream), so an accepted connection proves
nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from topobus.bus.login.tls_trust import server_context
from topobus.bus.login.user_keys import write_whole
from topobus.bus.server_config.inboxes import SERVER, connection_name, inbox_branch
from topobus.bus.server_config.streams import ACCOUNT_INFO, total_bytes
from topobus.local_system.supervision import probe_http
from topobus.values.errors import ConfigError

__all__ = ["StoreSize", "has_room", "probe_jetstream", "size_store", "write_config"]

_MIB = 1024 * 1024
_PROBE_TIMEOUT_S = 2.0
# A server that is started again reads and writes a little. Below this it would only fail again.
_ROOM_BYTES = 32 * _MIB
# Streams made smaller than this hold too little of a machine to be of use.
_LEAST_BYTES = 256 * _MIB
# The store's part of a small disk, and the streams' part of the store: their files are somewhat
# larger than their content.
_PART_OF_DISK = 0.75
_PART_OF_STORE = 0.95
# A question that the CLI may ask, so that a server with users answers it as well.
_INBOX = f"{inbox_branch(connection_name('cli'), SERVER)}.probe"
_CONFIG = "topobus-up.conf"


class StoreSize(Struct, frozen=True, kw_only=True):
    """How large the store may be."""

    max_file_store: int
    """The server's own limit, in bytes."""
    store_mib: int
    """The services' setting `nats.store_mib`; 0 when the catalogue's bounds fit."""


def size_store(folder: Path) -> StoreSize:
    """Size a store by the disk that its folder is on.

    An existing store keeps at least its size, because its streams reserve it.

    Errors: raises ConfigError when the disk is too small for any.
    """
    disk = os.statvfs(folder)
    there = disk.f_bavail * disk.f_frsize + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    whole = int(total_bytes() / _PART_OF_STORE)
    size = min(whole, int(there * _PART_OF_DISK))
    size = max(size, _configured(folder))
    if size < _LEAST_BYTES:
        raise ConfigError(
            f"NATS' store {folder}: its disk has {there // _MIB} MiB for it, wanted at least "
            f"{int(_LEAST_BYTES / _PART_OF_DISK) // _MIB} MiB",
            next_step="make room, or choose a folder on another disk (--dir), or name a running server (--nats URL)",
        )
    return StoreSize(max_file_store=size, store_mib=0 if size >= whole else int(size * _PART_OF_STORE) // _MIB)


def write_config(folder: Path, size: StoreSize, users: str = "", *, seen_as: str = "") -> str:
    """Write the server's configuration into the store's folder, where a container also sees it.

    Return the file's name.

    Shapes: seen_as — the folder's path for the server, as on its command line: without it in the
    file a server refuses to read its configuration again. users — as `server_configuration` gives
    them; empty: none. The file holds their passwords, so only this user may read it.
    """
    store = f'store_dir: "{seen_as}", ' if seen_as else ""
    write_whole(folder / _CONFIG, f"jetstream {{ {store}max_file_store: {size.max_file_store} }}\n{users}")
    return _CONFIG


def has_room(folder: Path) -> bool:
    """Return whether the disk has room enough for a server to start and to write."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize >= _ROOM_BYTES


async def probe_jetstream(
    host: str, port: int, monitor_port: int, *, user: str = "", password: str = "", ca_file: str | None = None
) -> bool:
    """Return whether a NATS server on this machine stores messages: it answers, JetStream is on,
    and none of its streams is frozen.

    Shapes: ca_file — the authorities to trust, for a server with TLS; empty: the system's; None:
    the server has no TLS.
    """
    return await _answers_for_jetstream(host, port, user, password, ca_file) and await probe_http(
        monitor_port, "/healthz"
    )


async def _answers_for_jetstream(host: str, port: int, user: str, password: str, ca_file: str | None) -> bool:
    login = {"user": user, "pass": password} if user else {}
    hello = {"verbose": False, "headers": True, "no_responders": True, "name": "topobus-up", **login}
    asking = b"CONNECT %s\r\nSUB %s 1\r\nPUB %s %s 0\r\n\r\n" % (
        msgspec.json.encode(hello),
        _INBOX.encode(),
        ACCOUNT_INFO.encode(),
        _INBOX.encode(),
    )
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                if ca_file is not None:
                    # The server's greeting comes in clear; nothing of ours goes out before.
                    await reader.readline()
                    context = await asyncio.to_thread(server_context, str(ca_file or ""))
                    await writer.start_tls(context, server_hostname=host)
                writer.write(asking)
                while line := await reader.readline():
                    if line.startswith((b"MSG ", b"HMSG ")):
                        return line.startswith(b"MSG ") and b'"error"' not in await reader.readline()
                return False
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False


def _configured(folder: Path) -> int:
    """Read the store's size in the previous run. 0 when there was none."""
    try:
        text = (folder / _CONFIG).read_text(encoding="utf-8")
    except OSError:
        return 0
    size = re.search(r"max_file_store: (\d+)", text)
    return int(size[1]) if size is not None else 0
