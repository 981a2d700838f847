"""Calls of service code that block the event loop: noted while a test runs, so that the test fails
with the place.

It listens to the interpreter's audit events (PEP 578: opened files, listed folders, connections,
processes, sleeps) and to the few calls that wait without one. A call counts when a loop runs in its
thread and service code is in the stack with no test or simulator above it: what a test itself reads
is its own business. It notes and raises nothing, because an error raised inside would be taken for
one of the disk.

blockbuster was considered: it replaces methods of built-in types, does not see fsync, and cannot
distinguish a test's call from a service's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import topobus.gateway
import topobus.process
import topobus.simulation
import topobus.testing

__all__ = ["BlockingCalls"]

_SERVICES = tuple(f"{Path(package.__path__[0]).parent}{os.sep}" for package in (topobus.process, topobus.gateway))
_TESTS = (
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    *(f"{package.__path__[0]}{os.sep}" for package in (topobus.testing, topobus.simulation)),
)
_EVENTS = frozenset(
    {
        "open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.system",  # noqa: E501
        "fcntl.flock", "fcntl.lockf", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "time.sleep", "urllib.Request",  # noqa: E501
    }
)  # fmt: skip
# (the end of a file's name, a function in it): why it may block.
_ALLOWED = {
    ("<frozen importlib._bootstrap>", "_find_and_load"): "a module is imported once in a process",
    ("asyncio/base_events.py", "subprocess_exec"): "this is how asyncio starts a process",
    ("weakref.py", "__call__"): "a finalizer of something collected runs wherever it happens to be",
    ("linecache.py", "updatecache"): "the lines of a traceback for the log, read once a file",
    ("cli/contexts.py", "running_at"): "a command reads its login before it connects, and serves nobody",
    ("gateway/node_lock.py", "open_node_lock"): "at start: nobody is served yet",
    (
        "gateway/node_lock.py",
        "try_begin",
    ): "the lock is asked for without waiting; a name of 20 bytes is written, at start",
    ("gateway/node_lock.py", "begin"): "who has the queue's lock for itself has it for one system call",
    ("gateway/node_lock.py", "is_awaited"): "the lock is asked for without waiting",
    ("gateway/node_lock.py", "end"): "letting go of a lock does not wait",
    ("gateway/device_plugins/foreign_plugins.py", "_load"): "at start: nobody is served yet",
    ("kubernetes/client.py", "open"): "at start: nobody is served yet",
    (
        "devicekit/classic/classic_registry.py",
        "load_classic_drivers",
    ): "at start: installed packages are looked up once",
}


class BlockingCalls:
    """The calls that blocked since they were last taken."""

    def __init__(self) -> None:
        self._noted: dict[str, None] = {}

    def start(self) -> None:
        """Listen until the process ends: an audit hook cannot be taken away."""
        sys.addaudithook(self._hear)
        for owner, name in ((os, "fsync"), (os, "fdatasync"), (concurrent.futures.Future, "result")):
            setattr(owner, name, self._heard(f"{owner.__name__}.{name}", getattr(owner, name)))

    def take(self) -> list[str]:
        """Give what was noted, in order and once each, and forget it."""
        noted, self._noted = list(self._noted), {}
        return noted

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or asyncio._get_running_loop() is None:
            return
        if event == "open" and not isinstance(arguments[0], str | bytes):
            return  # a descriptor that is open already
        if event == "socket.connect" and arguments[0].gettimeout() == 0:
            return  # asyncio's own way: it does not wait
        self._note(event)

    def _heard(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if asyncio._get_running_loop() is not None and not (
                isinstance(arguments[0], concurrent.futures.Future) and arguments[0].done()
            ):
                self._note(what)
            return function(*arguments, **options)

        return call

    def _note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        stack: list[str] = []
        while frame is not None:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if file.startswith(_TESTS) or any(file.endswith(end) and function == name for end, name in _ALLOWED):
                return
            if file.startswith(_SERVICES):
                root = next(root for root in _SERVICES if file.startswith(root))
                stack.append(f"{file.removeprefix(root)}:{frame.f_lineno} {function}")
            frame = frame.f_back
        if stack:
            self._noted[f"{what} in {' < '.join(stack[:8])}"] = None
