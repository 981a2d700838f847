"""Real network namespaces for tests: made, entered by a thread of their own, looked at, removed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["Namespace", "ip", "new_namespace"]

T = TypeVar("T")
_LIMIT_S = 30.0
_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> str:
    """Run `ip`.

    Errors: raises CalledProcessError, with its words as a note.
    """
    return _run("ip", *arguments)


class Namespace:
    """A network namespace."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = f"/run/netns/{name}"

    def ip(self, *arguments: str) -> str:
        """Run `ip` on it."""
        return ip("-n", self.name, *arguments)

    def run(self, *command: str) -> str:
        """Run a program in it."""
        return _run("ip", "netns", "exec", self.name, *command)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program in it; the caller ends it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def json(self, *arguments: str) -> list[dict[str, Any]]:
        """Read the output of `ip -json`."""
        text = self.ip("-json", *arguments)
        entries: list[dict[str, Any]] = json.loads(text) if text.strip() else []
        return entries

    def link(self, name: str) -> dict[str, Any] | None:
        """Read an interface; None when it is not there."""
        return next((entry for entry in self.json("-details", "addr", "show") if entry.get("ifname") == name), None)

    @property
    def links(self) -> list[str]:
        """Names of its interfaces, sorted."""
        return sorted(str(entry["ifname"]) for entry in self.json("link", "show"))

    def addresses(self, name: str) -> list[str]:
        """Global addresses of an interface."""
        link = self.link(name)
        entries = link["addr_info"] if link is not None else []
        return [f"{entry['local']}/{entry['prefixlen']}" for entry in entries if entry["scope"] == "global"]

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread that is in the namespace.

        What it starts and opens is in the namespace as well.
        """
        outcome: list[T] = []
        trouble: list[BaseException] = []

        def enter() -> None:
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), f"cannot enter {self.path}")
                finally:
                    os.close(descriptor)
                outcome.append(function())
            except BaseException as err:  # noqa: BLE001 - handed on to the caller's thread
                trouble.append(err)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if trouble:
            raise trouble[0]
        return outcome[0]


@contextmanager
def new_namespace(role: str) -> Iterator[Namespace]:
    """Make a namespace with a name of its own, and remove it."""
    namespace = Namespace(f"tb-cni-{role}-{uuid.uuid4().hex[:8]}")
    ip("netns", "add", namespace.name)
    try:
        namespace.ip("link", "set", "lo", "up")
        yield namespace
    finally:
        ip("netns", "delete", namespace.name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
