"""A gateway in a process of its own that kills itself (SIGKILL) at the n-th step of a call of
kubelet's, for crash tests.

    python -m support.mortal_gateway SETTINGS.json NATS-URL STEP-FILE LOG-FILE

A crash can fall between any two steps. A step is each ask and read on the bus (before and after
it), each file made, renamed or removed (seen by an audit hook, so that a new one counts by itself),
and the call's begin and its answer. An event of the container runtime is a call as well
(`RunPodSandbox/nri`). With the method `publish`, each write of a slice counts (before and after),
with `status` those of claims' statuses, to disk and to the API server. STEP-FILE holds the method
and the step to die at, `NodePrepareResources 3`. It is read when a call begins. LOG-FILE gets a
line for each step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from support.mortal_hands import READY
from support.runtimes import runtime_of
from topobus.bus.bus import Bus
from topobus.gateway.claims import dra_plugin
from topobus.gateway.cluster.kubernetes_cluster import KubernetesCluster
from topobus.gateway.cluster.report_record import ReportRecord
from topobus.gateway.config import GatewaySettings
from topobus.gateway.containers.nri_plugin import NriPlugin
from topobus.gateway.device_plugins import device_plugin
from topobus.gateway.service import serve
from topobus.process.config import NatsSettings
from topobus.process.readiness import Readiness

PUBLISH = "publish"
STATUS = "status"

_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.chmod", "os.truncate"}


class _Death:
    """Counts the steps of one call and ends the process at the chosen one."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._count = 0
        self._deadly = 0

    def begin(self, deadly: int) -> None:
        """Count from the start. With 0 nothing dies."""
        self._count, self._deadly = 0, deadly

    def step(self, name: str) -> None:
        """Die here when it is time."""
        with self._lock:
            self._count += 1
            os.write(self._log, f"{self._count} {name}\n".encode())
            if self._count == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)


_CALL: ContextVar[_Death | None] = ContextVar("call", default=None)


def _step(name: str) -> None:
    death = _CALL.get()
    if death is not None:
        death.step(name)


def _watch_files() -> None:
    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _FILE_EVENTS or _CALL.get() is None:
            return
        if event == "open":
            if isinstance(arguments[0], int):
                return
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            # Opening a folder is the moment between a rename and its being synced.
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY):
                return
        _step(f"{event} {Path(str(arguments[0])).name}")

    sys.addaudithook(look)


def _watch_bus(verb: str) -> None:
    real: Callable[..., Awaitable[Any]] = getattr(Bus, verb)

    async def counted(self: Bus, what: Any, *arguments: Any, **parts: Any) -> Any:
        _step(f"before {verb} {what.name}")
        result = await real(self, what, *arguments, **parts)
        _step(f"after {verb} {what.name}")
        return result

    setattr(Bus, verb, counted)


def _watch_calls(death: _Death, order: Path) -> None:
    for module in (device_plugin, dra_plugin):
        real = module.answer

        async def counted(
            context: Any,
            metrics: Any,
            method: str,
            device_class: str,
            work: Awaitable[Any],
            real: Callable[..., Any] = real,
        ) -> Any:
            wanted, _, step = _read(order).partition(" ")
            if wanted == f"{method}/{device_class}":
                death.begin(int(step))
                _CALL.set(death)
                _step("called")
            result = await real(context, metrics, method, device_class, work)
            _step("answered")
            return result

        setattr(module, "answer", counted)  # noqa: B010  (mypy knows the real one's type)


def _watch_runtime(death: _Death, order: Path) -> None:
    """Count the steps of one event of the container runtime (`RunPodSandbox/nri`), those of the
    work that it begins included.
    """
    real: Callable[..., Awaitable[bytes]] = NriPlugin._answer

    async def counted(self: NriPlugin, service: str, method: str, request: bytes) -> bytes:
        wanted, _, step = _read(order).partition(" ")
        if wanted == f"{method}/nri":
            death.begin(int(step))
            _CALL.set(death)
            _step("called")
        result = await real(self, service, method, request)
        _step("answered")
        return result

    setattr(NriPlugin, "_answer", counted)  # noqa: B010  (mypy knows the real one's type)


def _watch_writes(death: _Death, order: Path, method: str, *writes: tuple[type, str]) -> None:
    """Count writes that no call of kubelet's waits for, as one sequence, each before and after it
    is done.
    """
    last_order = ""

    def count(name: str) -> None:
        nonlocal last_order
        text = _read(order)
        wanted, _, step = text.partition(" ")
        if wanted != method:
            return
        if text != last_order:
            last_order = text
            death.begin(int(step))
        death.step(name)

    for owner, verb in writes:
        real: Callable[..., Awaitable[Any]] = getattr(owner, verb)

        async def counted(
            self: Any, *arguments: Any, verb: str = verb, real: Callable[..., Awaitable[Any]] = real, **more: Any
        ) -> Any:
            count(f"before {verb}")
            result = await real(self, *arguments, **more)
            count(f"after {verb}")
            return result

        setattr(owner, verb, counted)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class _LoudReadiness(Readiness):
    def set(self, part: str, is_ready: bool, why: str = "") -> None:
        super().set(part, is_ready, why)
        if part == "inventories" and is_ready:
            sys.stdout.write(f"{READY}\n")
            sys.stdout.flush()


async def _run(settings: GatewaySettings, url: str) -> None:
    async with Bus.session(NatsSettings(url=url), name="gateway") as bus:
        await serve(settings, runtime_of("gateway", settings.node, bus, readiness=_LoudReadiness()))


def main(arguments: list[str]) -> None:
    """Run until killed."""
    settings_file, url, order, log = arguments
    settings = msgspec.json.decode(Path(settings_file).read_bytes(), type=GatewaySettings)
    death = _Death(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    for verb in ("ask", "get"):
        _watch_bus(verb)
    _watch_calls(death, Path(order))
    _watch_runtime(death, Path(order))
    writes = _Death(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    _watch_writes(writes, Path(order), PUBLISH, *((KubernetesCluster, verb) for verb in ("create", "update", "delete")))
    _watch_writes(writes, Path(order), STATUS, (ReportRecord, "save"), (KubernetesCluster, "apply_device_status"))
    _watch_files()
    asyncio.run(_run(settings, url))


if __name__ == "__main__":
    main(sys.argv[1:])
