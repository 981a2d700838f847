"""The store of the NATS server that `topobus up` runs: how large it may be on this disk, whether it works, and whether only a restart helps it.

Flows in: the folder and the server's ports. Flows out: sizes, and answers to the supervisor. A server whose disk was full may greet its clients for ever and
store nothing again, however much room there is then (2.9 stops answering, 2.15 freezes the stream), so a greeting says nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from msgspec import Struct

from topobus.cli.system.supervision import probe_http
from topobus.contracts.streams import ACCOUNT_INFO, total_bytes
from topobus.domain.errors import ConfigError

__all__ = ["StoreSize", "has_room", "probe_jetstream", "size_store", "write_config"]

_MIB = 1024 * 1024
_PROBE_TIMEOUT_S = 2.0
# A server that is started anew reads and writes a little; below this it would only fail again.
_ROOM_BYTES = 32 * _MIB
# Streams made smaller than this hold too little of a machine to be of use.
_LEAST_BYTES = 256 * _MIB
# What of a small disk the store takes, and what of the store the streams' bounds are: their files are somewhat larger than what they hold.
_PART_OF_DISK = 0.75
_PART_OF_STORE = 0.95
_INBOX = b"_INBOX.topobus-up.probe"
_ASKING = (
    b'CONNECT {"verbose":false,"headers":true,"no_responders":true,"name":"topobus-up"}\r\nSUB '
    + _INBOX
    + f" 1\r\nPUB {ACCOUNT_INFO} ".encode()
    + _INBOX
)
_CONFIG = "topobus-up.conf"


class StoreSize(Struct, frozen=True, kw_only=True):
    """How large the store may be."""

    max_file_store: int
    """The server's own limit, in bytes."""
    store_mib: int
    """What services are told (`nats.store_mib`); 0 when the catalogue's bounds fit."""


def size_store(folder: Path) -> StoreSize:
    """Size a store by the disk that its folder is on; a store that is there keeps at least its size, for its streams count on it.

    Errors: raises ConfigError when the disk is too small for any.
    """
    disk = os.statvfs(folder)
    there = disk.f_bavail * disk.f_frsize + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    whole = int(total_bytes() / _PART_OF_STORE)
    size = min(whole, int(there * _PART_OF_DISK))
    size = max(size, _configured(folder))
    if size < _LEAST_BYTES:
        raise ConfigError(
            f"NATS' store {folder}: its disk has {there // _MIB} MiB for it, wanted at least {int(_LEAST_BYTES / _PART_OF_DISK) // _MIB} MiB",
            next_step="make room, or choose a folder on another disk (--dir), or name a running server (--nats URL)",
        )
    return StoreSize(max_file_store=size, store_mib=0 if size >= whole else int(size * _PART_OF_STORE) // _MIB)


def write_config(folder: Path, size: StoreSize) -> str:
    """Write the server's configuration into the store's folder, where a container sees it, too; gives the file's name."""
    (folder / _CONFIG).write_text(f"jetstream {{ max_file_store: {size.max_file_store} }}\n", encoding="utf-8")
    return _CONFIG


def has_room(folder: Path) -> bool:
    """Say whether the disk has room enough for a server to start and to write."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize >= _ROOM_BYTES


async def probe_jetstream(host: str, port: int, monitor_port: int) -> bool:
    """Say whether a NATS server on this machine stores messages: it answers, JetStream is on, and no stream of it stands still."""
    return await _answers_for_jetstream(host, port) and await probe_http(monitor_port, "/healthz")


async def _answers_for_jetstream(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_ASKING + b" 0\r\n\r\n")
                while line := await reader.readline():
                    if line.startswith((b"MSG ", b"HMSG ")):
                        return line.startswith(b"MSG ") and b'"error"' not in await reader.readline()
                return False
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False


def _configured(folder: Path) -> int:
    """Read the size of the life before; 0 when there was none."""
    try:
        match = re.search(r"max_file_store: (\d+)", (folder / _CONFIG).read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(match[1]) if match else 0
