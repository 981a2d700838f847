"""Real interfaces and network namespaces for tests: made by `ip`, named uniquely, removed with the
test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

__all__ = ["ip", "lines", "network_namespace", "veth_pair", "why_not_here"]

# interfaces.kept_namespaces_dir of the nic service, by default.
_KEPT = Path("/run/topobus/netns")


@cache
def why_not_here() -> str:
    """Say why interfaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "NOT CHECKED: making network interfaces needs root"
    if shutil.which("ip") is None:
        return "NOT CHECKED: there is no `ip` program (Debian package iproute2)"
    name = f"tbq{uuid4().hex[:8]}"
    tried = subprocess.run(["ip", "link", "add", name, "type", "veth"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"NOT CHECKED: this kernel makes no veth pair: {tried.stderr.strip()}"
    ip("link", "del", name)
    return ""


def ip(*words: str) -> str:
    """Run `ip`; what it printed."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30).stdout


def lines(*words: str) -> list[dict[str, Any]]:
    """Run `ip` with JSON output."""
    answer: list[dict[str, Any]] = json.loads(ip("-j", *words) or "[]")
    return answer


@contextmanager
def network_namespace() -> Iterator[str]:
    """Make a network namespace; its name, whose path is /run/netns/<name>."""
    name = f"tb-nicdrv-{uuid4().hex[:8]}"
    ip("netns", "add", name)
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def veth_pair(peer_namespace: str, *, peer: str = "peer") -> Iterator[str]:
    """Make a veth pair, one end here, the other (`peer`) in a namespace, both switched off.

    The name of this end.
    """
    name = f"tbn{uuid4().hex[:8]}"
    ip("link", "add", name, "type", "veth", "peer", "name", peer, "netns", peer_namespace)
    try:
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "-n", peer_namespace, "link", "del", peer], capture_output=True, check=False)
        # What a test kills or leaves attached leaves its pod's namespace kept.
        for kept in _KEPT.glob(f"nic-{name}@*"):
            subprocess.run(["umount", str(kept)], capture_output=True, check=False)
            kept.unlink(missing_ok=True)
