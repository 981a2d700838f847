"""Real TCP between this machine and a pod on it, measured, and what happens to interfaces
meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from support.real_hands import run_ip

__all__ = ["Rate", "changes_of_interfaces", "measure_rate"]

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
# What a limit lets pass at once at the beginning is over after this.
_WARM_UP_S = 1.0
_MEASURE_S = 5.0
# How long the kernel's news may take to be read.
_NEWS_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Bits a second: of what the receiver's interface counted, and of what its program read."""

    wire: float
    payload: float
    seconds: float


def measure_rate(*, sender: int | None, receiver: int | None, address: str, interface: str) -> Rate:
    """Send as fast as TCP can for some seconds.

    Shapes: sender, receiver — a process in the network namespace that is meant, None for this one;
    interface — the receiver's, whose counter is read.
    """
    listener = _within(receiver, lambda: socket.create_server(("", 0)))
    port = listener.getsockname()[1]
    stop = threading.Event()
    read = 0

    def send() -> None:
        with _within(sender, lambda: socket.create_connection((address, port), timeout=30)) as connection:
            connection.settimeout(30)
            while not stop.is_set():
                connection.sendall(b"x" * 16384)

    def receive() -> None:
        nonlocal read
        with listener, listener.accept()[0] as connection:
            while content := connection.recv(1 << 20):
                read += len(content)

    threads = [threading.Thread(target=work) for work in (receive, send)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(_WARM_UP_S)
        first, first_read, begun = _received(receiver, interface), read, time.monotonic()
        time.sleep(_MEASURE_S)
        last, last_read, ended = _received(receiver, interface), read, time.monotonic()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    seconds = ended - begun
    return Rate(wire=(last - first) * 8 / seconds, payload=(last_read - first_read) * 8 / seconds, seconds=seconds)


def _received(pid: int | None, interface: str) -> int:
    return int(json.loads(run_ip("-j", "-statistics", "link", "show", interface, pid=pid))[0]["stats64"]["rx"]["bytes"])


def _within(pid: int | None, function: Callable[[], T]) -> T:
    """Call a function in a thread that is in a process's network namespace.

    What it opens is in the namespace as well.
    """
    if pid is None:
        return function()
    outcome: list[T] = []

    def enter() -> None:
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
        finally:
            os.close(descriptor)
        outcome.append(function())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert outcome, f"nothing came of the call in the network of process {pid}"
    return outcome[0]


@contextmanager
def changes_of_interfaces(prefix: str) -> Iterator[list[str]]:
    """Record the kernel's events of the host's interfaces and addresses.

    The list has those about names with a prefix when the block has ended.
    """
    changes: list[str] = []
    process = subprocess.Popen(["ip", "-o", "monitor", "link", "address"], stdout=subprocess.PIPE, text=True)
    time.sleep(_NEWS_S)
    try:
        yield changes
        time.sleep(_NEWS_S)
    finally:
        process.terminate()
        text, _ = process.communicate(timeout=20)
        changes.extend(line for line in text.splitlines() if f" {prefix}" in line)
