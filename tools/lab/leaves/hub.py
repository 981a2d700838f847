"""The hub of a benchmark: a real nats-server with the configuration that we ship, on free ports of
this machine, and the counts of its monitoring pages.

Source: nats-server's /varz and /leafz.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from docpages.nats_files import render_hub
from lab.bench.process_use import read_counts
from topobus.bus.server_config.up_subjects import OLDEST_LEAF
from topobus.simulation.nats_server import NatsServer, free_port

__all__ = ["Hub", "HubCounts", "HubUse", "hub_use", "server_version"]


# From the newest: a server gets the configuration of the newest version that is not newer than
# itself. One before 2.10 is no hub of ours, but the tests run on it as well.
_RENDERED = ((2, 14), (2, 12), (2, 10), (0, 0))


class HubCounts(Struct, frozen=True, kw_only=True):
    """What the hub has used and carried since it began."""

    at: float
    """By the monotonic clock, in seconds."""
    processor_s: float
    resident_mib: float
    leaves: int
    subscriptions: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    leaf_messages_in: int
    """From leaves. All others are of clients at the hub."""
    leaf_messages_out: int


class HubUse(Struct, frozen=True, kw_only=True):
    """What the hub used and carried between two counts: the average per second, and memory at the
    end.
    """

    elapsed_s: float
    processor_percent: float
    resident_mib: float
    messages_in_per_s: float
    messages_out_per_s: float
    bytes_in_per_s: float
    bytes_out_per_s: float
    leaf_messages_per_s: float
    """From and to leaves together."""


class Hub(NatsServer):
    """A hub with a leaf port and monitoring pages."""

    def __init__(self, *, binary: Path | None = None, parent: Path | None = None) -> None:
        super().__init__(binary=binary, parent=parent)
        self.version = server_version(self.binary)
        self.leaf_port = free_port()
        self.monitor_port = free_port()

    def write_config(self) -> Path:
        """Write the configuration that we ship, with this hub's ports, folder and name, and room
        for any fleet.

        Errors: raises RuntimeError when the shipped configuration lacks a line that is replaced.
        """
        text = render_hub(next(version for version in _RENDERED if version <= self.version[:2]))
        for shipped, own in (
            ("$TOPOBUS_HUB_NAME", "hub"),
            ("0.0.0.0:4222", f"127.0.0.1:{self.port}"),
            ("127.0.0.1:8222", f"127.0.0.1:{self.monitor_port}"),
            ("0.0.0.0:7422", f"127.0.0.1:{self.leaf_port}"),
            ('"/data"', f'"{self.store}"'),
            ("max_file_store: 4GB", "max_file_store: 64GB"),
            *((("  sync_interval: always", ""),) if self.version < OLDEST_LEAF else ()),
        ):
            if shipped not in text:
                raise RuntimeError(f"the hub's configuration has no {shipped!r} any more: {text}")
            text = text.replace(shipped, own)
        file = self.folder / "hub.conf"
        file.write_text(text, encoding="utf-8")
        return file

    async def counts(self) -> HubCounts:
        """Read the monitoring pages and the process's counts."""
        return await asyncio.to_thread(self._counts)

    def _counts(self) -> HubCounts:
        general = _read_page(self.monitor_port, "varz")
        leaves = _read_page(self.monitor_port, "leafz")
        process = read_counts(self.pid)
        return HubCounts(
            at=time.monotonic(),
            processor_s=process.processor_s,
            resident_mib=process.resident_mib,
            leaves=int(leaves["leafnodes"]),
            subscriptions=int(general["subscriptions"]),
            messages_in=int(general["in_msgs"]),
            messages_out=int(general["out_msgs"]),
            bytes_in=int(general["in_bytes"]),
            bytes_out=int(general["out_bytes"]),
            leaf_messages_in=sum(int(leaf["in_msgs"]) for leaf in leaves.get("leafs") or ()),
            leaf_messages_out=sum(int(leaf["out_msgs"]) for leaf in leaves.get("leafs") or ()),
        )


def hub_use(before: HubCounts, after: HubCounts) -> HubUse:
    """Return what the hub used and carried between two counts."""
    elapsed_s = max(after.at - before.at, 1e-9)
    leaf_messages = (
        after.leaf_messages_in + after.leaf_messages_out - before.leaf_messages_in - before.leaf_messages_out
    )
    return HubUse(
        elapsed_s=elapsed_s,
        processor_percent=(after.processor_s - before.processor_s) / elapsed_s * 100,
        resident_mib=after.resident_mib,
        messages_in_per_s=(after.messages_in - before.messages_in) / elapsed_s,
        messages_out_per_s=(after.messages_out - before.messages_out) / elapsed_s,
        bytes_in_per_s=(after.bytes_in - before.bytes_in) / elapsed_s,
        bytes_out_per_s=(after.bytes_out - before.bytes_out) / elapsed_s,
        leaf_messages_per_s=leaf_messages / elapsed_s,
    )


def server_version(binary: Path) -> tuple[int, ...]:
    """Ask a nats-server for its version.

    Errors: raises RuntimeError when it names none.
    """
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20.0, check=True).stdout
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if numbers is None:
        raise RuntimeError(f"{binary} --version prints no version: {said[:100]!r}")
    return tuple(map(int, numbers.groups()))


def _read_page(port: int, page: str) -> Mapping[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=30.0) as answer:
        document: Mapping[str, Any] = json.load(answer)
    return document
