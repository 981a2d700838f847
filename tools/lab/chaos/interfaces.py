"""Interfaces of this kernel in place of a recorded machine's cards, and pods' network namespaces.

A pod's namespace is that of a process. At a power failure the processes end and the interfaces are
gone; the next boot has interfaces of the same names. Names begin with a text that no other run has.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from topobus.cli.demo.real_pod import why_not
from topobus.nic.netlink.kept_namespaces import unmount_namespace

__all__ = ["Interfaces", "run_program", "why_no_interfaces"]

_COUNT = 8
"""As many as the recorded machine has cards."""
_PAUSE_S = 0.02


def why_no_interfaces() -> str:
    """Say why no interface can be moved here. Empty when it can."""
    return why_not() or ("" if shutil.which("ip") else "the program `ip` (iproute2) is not installed")


class Interfaces:
    """The interfaces of a node and the namespaces of its pods."""

    def __init__(self, folder: Path) -> None:
        """`folder` is emptied by each power failure, as /run is."""
        self.folder = folder
        tag = secrets.token_hex(2)
        self.names = tuple(f"tb{tag}n{number}" for number in range(_COUNT))
        self._peers = tuple(f"tb{tag}p{number}" for number in range(_COUNT))
        self._pods: dict[str, asyncio.subprocess.Process] = {}

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a nic service that offers them, and nothing else."""
        return {
            "TOPOBUS_ALL__HARDWARE__ROOT": "/",
            "TOPOBUS_NIC__DRIVERS__ALLOW": json.dumps(["linux-netdev"]),
            "TOPOBUS_NIC__INTERFACES__OFFER": json.dumps([{"name": name} for name in self.names]),
            "TOPOBUS_NIC__INTERFACES__KEPT_NAMESPACES_DIR": str(self.folder / "netns"),
            "TOPOBUS_NIC__JOURNAL__DIR": str(self.folder.parent / "nic-journal"),
        }

    async def power_on(self) -> None:
        """Make all interfaces, switched on."""
        for name, peer in zip(self.names, self._peers, strict=True):
            await run_program("ip", "link", "add", name, "up", "type", "veth", "peer", "name", peer)
            await run_program("ip", "link", "set", peer, "up")

    async def power_off(self) -> None:
        """End all pods, and remove all interfaces."""
        for name in tuple(self._pods):
            await self.end_pod(name)
        for kept in self.folder.rglob("*"):
            unmount_namespace(kept)
        shutil.rmtree(self.folder, ignore_errors=True)
        for peer in self._peers:
            # It may have gone with a pod's namespace.
            with suppress(OSError):
                await run_program("ip", "link", "del", peer)

    async def begin_pod(self, name: str) -> int:
        """Return the process in whose network namespace a pod is. It is made when there is none."""
        if name not in self._pods:
            self._pods[name] = await asyncio.create_subprocess_exec("unshare", "-n", "sleep", "infinity")
        pid = self._pods[name].pid
        while _namespace_of(pid) == _namespace_of(os.getpid()):  # noqa: ASYNC110 - another process enters it
            await asyncio.sleep(_PAUSE_S)
        return pid

    async def end_pod(self, name: str) -> None:
        """End a pod's process."""
        process = self._pods.pop(name, None)
        if process is not None:
            process.kill()
            await process.wait()

    async def differences(self, wanted: dict[str, str]) -> list[str]:
        """Compare where the interfaces are with where they should be.

        Shapes: wanted — interface to pod; those that are not named are on the host.
        """
        has = dict.fromkeys(await _names(), "")
        for pod, process in tuple(self._pods.items()):
            has |= dict.fromkeys(await _names("nsenter", f"--net=/proc/{process.pid}/ns/net"), pod)
        return [
            f"{name} is {f'in {there}' if there else 'on the host'}, wanted {wanted.get(name) or 'on the host'}"
            if there is not None
            else f"{name} is nowhere, wanted {wanted.get(name) or 'on the host'}"
            for name in self.names
            if (there := has.get(name)) != wanted.get(name, "")
        ]


def _namespace_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


async def _names(*inside: str) -> list[str]:
    links: list[dict[str, Any]] = json.loads(await run_program(*inside, "ip", "-json", "link", "show") or "[]")
    return [str(link["ifname"]) for link in links]


async def run_program(*command: str, given: bytes = b"", succeeds: tuple[int, ...] = (0,)) -> bytes:
    """Run a program, and return its output. `given` is its input.

    Errors: raises OSError with its words when it ends with another status than these.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, err = await process.communicate(given)
    finally:
        # Who waits may be cancelled.
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in succeeds:
        raise OSError(f"{' '.join(command)} ended with {process.returncode}: {err.decode().strip()}")
    return out
