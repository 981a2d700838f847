"""Services of Topobus as processes that can be killed, frozen and started again on the same
settings, and the settings of a node's services.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from topobus.simulation.nats_server import free_port
from topobus.values.errors import PeerUnavailable

__all__ = ["ServiceProcess", "node_settings", "unready", "wait_ready"]

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 20.0


class ServiceProcess:
    """One service, in its present process. Its log continues over restarts."""

    def __init__(
        self, name: str, settings: Mapping[str, str], folder: Path, *, label: str = "", program: Sequence[str] = ()
    ) -> None:
        """Prepare a service. `program` are the words that the interpreter runs instead of the
        service's own module.
        """
        self.name = name
        self._program = tuple(program) or ("-m", f"topobus.{name}.main")
        self.python = sys.executable
        """The interpreter of the next process: another environment has another release."""
        self.label = label or name
        self.port = free_port()
        self.log = folder / f"{self.label}.log"
        self.end_status: int | None = None
        """The exit status of the last process that we ended."""
        self.pids: set[int] = set()
        """Of all processes that there were."""
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")},
            "TOPOBUS_ALL__LOG__FORMAT": "json",
            "TOPOBUS_ALL__HTTP__PORT": str(self.port),
            **settings,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._is_frozen = False

    @property
    def status(self) -> int | None:
        """The exit status of a process that ended by itself.

        None while it runs, or when we ended it.
        """
        return self._process.returncode if self._process is not None else None

    @property
    def pid(self) -> int:
        """The present process.

        Errors: raises RuntimeError when there is none.
        """
        if self._process is None:
            raise RuntimeError(f"{self.label} does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Say whether there is a process."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a process, which is not ready yet."""
        with self.log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                self.python, *self._program, env=self._environment, stdout=out, stderr=asyncio.subprocess.STDOUT
            )
        self.pids.add(self._process.pid)

    async def kill(self) -> None:
        """End the process as a crash does (SIGKILL)."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End the process in order."""
        await self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process where it is (SIGSTOP)."""
        if self.is_running and self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            self._is_frozen = True

    def thaw(self) -> None:
        """Continue the process (SIGCONT)."""
        if self._is_frozen and self.is_running and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self._is_frozen = False

    async def is_ready(self) -> bool:
        """Ask its /readyz."""
        return (await self.readiness()).startswith("200")

    async def until_ready(self) -> None:
        """Wait until it reports that it is ready.

        Errors: raises PeerUnavailable with the end of its log when it ends by itself.
        """
        while not await self.is_ready():
            self.check_runs()
            await asyncio.sleep(0.05)

    def check_runs(self) -> None:
        """Check that it has not ended by itself.

        Errors: raises PeerUnavailable with the end of its log when it has.
        """
        if self.status is not None:
            raise PeerUnavailable(f"{self.label} ended by itself with status {self.status}: {self.read_log()}")

    async def readiness(self) -> str:
        """Return the status and the text of /readyz, or a sentence when it does not answer."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return "no process listens"
        try:
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(2.0):
                await writer.drain()
                answer = (await reader.read(8192)).decode("utf-8", "replace")
        except (OSError, TimeoutError):
            return "no answer"
        finally:
            writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return f"{head.split(' ')[1] if ' ' in head else head} {body.strip()}"

    def read_log(self) -> str:
        """Return the end of its log."""
        return self.log.read_text("utf-8", "replace")[-3000:] if self.log.exists() else ""

    async def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(how)
        if self._is_frozen:
            # A frozen process sees no other signal than SIGKILL.
            process.send_signal(signal.SIGCONT)
            self._is_frozen = False
        try:
            async with asyncio.timeout(_STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        self.end_status = process.returncode


async def wait_ready(services: Iterable[ServiceProcess], *, limit_s: float = _START_LIMIT_S) -> None:
    """Wait until all are ready.

    Errors: raises PeerUnavailable with the log of one that ended, or with what they report when the time
    is over.
    """
    waiting = tuple(services)
    try:
        async with asyncio.timeout(limit_s):
            for service in waiting:
                await service.until_ready()
    except TimeoutError as err:
        raise PeerUnavailable(f"not ready after {limit_s:g} s: {'; '.join(await unready(waiting))}") from err


async def unready(services: Iterable[ServiceProcess]) -> list[str]:
    """List what those report that are not ready.

    Errors: raises PeerUnavailable with the log of one that ended.
    """
    said: list[str] = []
    for service in services:
        service.check_runs()
        readiness = await service.readiness()
        if not readiness.startswith("200"):
            said.append(f"{service.label}: {readiness[:400]}")
    return said


def node_settings(node: str, folder: Path, url: str) -> dict[str, str]:
    """Give the settings of a node's services: their machine, kubelet and files are in the folder."""
    return {
        "TOPOBUS_ALL__NODE": node,
        "TOPOBUS_ALL__NATS__URL": url,
        "TOPOBUS_ALL__HARDWARE__ROOT": str(folder / "machine"),
        "TOPOBUS_GATEWAY__KUBELET__DEVICE_PLUGIN_DIR": str(folder / "k/device-plugins"),
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_REGISTRY_DIR": str(folder / "k/plugins_registry"),
        "TOPOBUS_GATEWAY__KUBELET__PLUGINS_DIR": str(folder / "k/plugins"),
        "TOPOBUS_GATEWAY__POD_RESOURCES_SOCKET": str(folder / "k/pod-resources/kubelet.sock"),
        "TOPOBUS_GATEWAY__RUNTIME__SOCKET": "",
        "TOPOBUS_GATEWAY__CDI_DIR": str(folder / "cdi"),
        "TOPOBUS_GATEWAY__CHECKPOINT_PATH": str(folder / "state/checkpoint.json"),
    }
