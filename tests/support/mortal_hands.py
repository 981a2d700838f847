"""A device service with folder cards in a process of its own that kills itself (SIGKILL) at the
n-th step of a verb, for crash tests.

    python -m support.mortal_hands SETTINGS.json NATS-URL ORDER-FILE LOG-FILE

A crash can fall between any two steps. A step is each file or folder below the machine or in the
journal that is made, renamed, written or removed (seen by an audit hook, so a new one counts by
itself), each program from there that is started, and the answer. ORDER-FILE holds the verb and the
step to die at, `attach 3`, or the one after which it dies, `attach @os.rename nic-card-0`. It is read
when a verb begins, and at the process's start for the verb `start`. Steps count from then on, in
all threads: cleaning and long work continue after their answers. LOG-FILE gets a line for each
step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from support.runtimes import runtime_of
from topobus.bus.bus import Bus
from topobus.devicekit.host.host import serve_devices
from topobus.devicekit.registry import DriverRegistry
from topobus.devicekit.settings import DeviceServiceSettings
from topobus.devicekit.verbs.attach import Attacher
from topobus.devicekit.verbs.prepare import Preparer
from topobus.formats.messages.catalogue import HINT
from topobus.process.config import NatsSettings
from topobus.process.service import Runtime
from topobus.testing.drivers.folder_driver import FolderDriver

READY = "READY"
_Settings = TypeVar("_Settings", bound=DeviceServiceSettings)
_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "subprocess.Popen"}


class Death:
    """Counts the steps of a verb and ends the process at the chosen one."""

    def __init__(self, order: Path, log: int, roots: tuple[str, ...]) -> None:
        self._order = order
        self._log = log
        self._roots = roots
        self._lock = threading.Lock()
        self._count = 0
        self._deadly: int | None = None
        self._last_words = ""
        self._begun = ""

    def begin(self, verb: str) -> None:
        """Count from here, if it is this verb's turn."""
        order = self._order.read_text(encoding="utf-8")
        wanted, _, step = order.partition(" ")
        # Long work is asked for again while it continues: it is one verb.
        if wanted == verb and order != self._begun:
            self._begun = order
            self._last_words = step.removeprefix("@") if step.startswith("@") else ""
            self._count, self._deadly = 0, 0 if self._last_words else int(step)
            self.step("begun")

    def step(self, name: str) -> None:
        """Die here when it is time."""
        if self._deadly is None:
            return
        with self._lock:
            self._count += 1
            os.write(self._log, f"{self._count} {name}\n".encode())
            if self._count == self._deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == self._last_words:
                self._deadly = self._count + 1

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count what touches a file that matters."""
        if self._deadly is None or event not in _FILE_EVENTS or not str(arguments[0]).startswith(self._roots):
            return
        if event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            # Opening a folder is the moment between a rename and its being synced.
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_DIRECTORY):
                return
        self.step(f"{event} {Path(str(arguments[0])).name}")


def watch_verbs(death: Death) -> None:
    """Count from the beginning of each verb that is asked for, up to its answer."""
    for home, verb in ((Preparer, "prepare"), (Preparer, "unprepare"), (Attacher, "attach"), (Attacher, "detach")):
        real: Callable[..., Awaitable[Any]] = getattr(home, verb)

        async def counted(self: Any, request: Any, verb: str = verb, real: Callable[..., Awaitable[Any]] = real) -> Any:
            death.begin(verb)
            reply = await real(self, request)
            death.step("answered")
            return reply

        setattr(home, verb, counted)


def tell_when_ready() -> None:
    """Write a line when questions are answered."""
    real = Bus.answer

    async def loud(self: Bus, ask: Any, *arguments: Any, **parts: Any) -> None:
        await real(self, ask, *arguments, **parts)
        if ask is HINT:
            sys.stdout.write(f"{READY}\n")
            sys.stdout.flush()

    setattr(Bus, "answer", loud)  # noqa: B010  (mypy knows the real one's type)


def live(
    name: str,
    kind: type[_Settings],
    roots: Callable[[_Settings], tuple[str, ...]],
    serve: Callable[[_Settings, Runtime], Awaitable[None]],
) -> None:
    """Run a device service, with settings, server, order and log by this process's arguments, until
    killed.

    Shapes: roots — the folders whose files count.
    """
    settings_file, url, order, log = sys.argv[1:]
    settings = msgspec.json.decode(Path(settings_file).read_bytes(), type=kind)
    death = Death(Path(order), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), roots(settings))
    watch_verbs(death)
    tell_when_ready()
    sys.addaudithook(death.look)
    death.begin("start")

    async def run() -> None:
        async with Bus.session(NatsSettings(url=url), name=name) as bus:
            await serve(settings, runtime_of(name, settings.node, bus))

    asyncio.run(run())


async def _serve(settings: DeviceServiceSettings, runtime: Runtime) -> None:
    await serve_devices(settings, runtime, "nic", registry=DriverRegistry(drivers=(FolderDriver(),)))


if __name__ == "__main__":
    live("nic", DeviceServiceSettings, lambda settings: (settings.hardware.root, settings.journal.dir), _serve)
