"""Starts Python programs of ours as copies of a process that has imported all they need: a start
costs a fork instead of an interpreter and its imports.

    python -m support.fork_server DESCRIPTOR

The socket DESCRIPTOR brings the order: what to run, with three descriptors to be its stdin, stdout
and stderr. The answer is the pid. The program is a child of the process that asked, not of this one
(clone(2), CLONE_PARENT), so the asker waits for it, signals it and reads its status as after an
exec. It has its own copy of everything, no descriptor beside its three, no thread, and it ends as
an interpreter does. /proc shows its own command line and environment. It shares with this process
only the hash seed and the loaded modules. A test to which one of these matters is marked
`real_start` (see support.forked_starts).

Nothing here may start a thread, an event loop or gRPC: a copy has only the thread that was copied,
with all locks as they were.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from support import forked_starts
from support.fork_orders import CLONE_NUMBER, Order, confirm, receive

SERVICES = ("discovery", "gpu", "nic", "fpga", "cpu", "topology", "gateway", "controller")
# linux/sched.h: the new process has our parent.
_CLONE_PARENT = 0x00008000
# Programs that start programs themselves: each gets a server of its own before it begins,
# while it has no thread and no loop.
_STARTERS = {"up", "allocate", "simulate", "why", "free", "defrag", "what-if", "snapshot"}
_DEMO = "topobus.cli.demo"


def _load() -> None:
    """Import what the programs import, but not their main modules: `-m` runs those again and warns
    when they are loaded already.
    """
    for service in SERVICES:
        for part in ("config",) if service == "controller" else ("config", "service"):
            importlib.import_module(f"topobus.{service}.{part}")
    for name in (
        "topobus.controller.standalone.service",
        "topobus.controller.cluster.service",
        "topobus.process.service",
        "topobus.process.log_lines",
        "topobus.cli.application",
        "topobus.simulation.machines",
    ):
        importlib.import_module(name)
    for package in (
        "topobus.cli.commands",
        "topobus.local_system",
        _DEMO,
        "topobus.controller.dry_run",
        "topobus.controller.snapshots",
        "topobus.controller.snapshots.rules",
        "topobus.gateway.containers",
        *(f"topobus.{service}.plugins" for service in ("gpu", "nic", "fpga", "cpu")),
    ):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if module.name.rpartition(".")[2] not in ("main", "__main__"):
                importlib.import_module(module.name)
    # What Python and its libraries import when they are first used, each
    # in a copy of its own otherwise.
    for name in (
        "encodings.idna",
        "json",
        "grpc.aio",
        "rich.markdown",
        "rich.table",
        "rich.syntax",
        "cyclopts.help",
        "prometheus_client.openmetrics.exposition",
    ):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _clone() -> int:
    """Copy this process as a child of our parent.

    0 in the copy. os.fork cannot do that, so this is what it does around its own call.
    """
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(ctypes.PyDLL(None, use_errno=True).syscall(CLONE_NUMBER, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
    return pid


def serve(connection: socket.socket) -> tuple[Order, list[int]] | None:
    """Start what is asked for until the asker is gone.

    Returns the order in the copy that must run it, None in the server.
    """
    while (asked := receive(connection)) is not None:
        order, descriptors = asked
        try:
            pid = _clone()
        except OSError as err:
            sys.stderr.write(f"no copies of a process here, so all programs are executed: clone: {err.strerror}\n")
            confirm(connection, 0)
            return None
        if pid == 0:
            connection.close()
            return order, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        confirm(connection, pid)
    return None


def _become(order: Order, descriptors: list[int]) -> None:
    """Take on what an exec gives: streams, session, folder, environment, signals."""
    # Above 2 first, or one of them is overwritten before its turn.
    copies = [os.dup(descriptor) for descriptor in descriptors]
    for number, descriptor in enumerate(copies):
        os.dup2(descriptor, number)
    for descriptor in (*descriptors, *copies):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.is_own_session:
        os.setsid()
    os.chdir(order.folder)
    own_paths = _paths()
    os.environ.clear()
    os.environ.update(order.environment)
    words = [order.script] if order.script else ["-m", order.module]
    _show([sys.executable, *words, *order.arguments], order.environment)
    time.tzset()
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if order.before:
        pickle.loads(order.before)()
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw: Any = open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115 - lives as long as the process
        text = io.TextIOWrapper(
            raw,
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    # The folder of `-m` or of the script, then PYTHONPATH, then the interpreter's own: so
    # begins each sys.path, ours too.
    sys.path[: 1 + len(own_paths)] = [
        str(Path(order.script).resolve().parent) if order.script else order.folder,
        *_paths(),
    ]
    sys.argv = [order.script or "-m", *order.arguments]


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write command line and environment where the kernel reads them for /proc: over our own, which
    are padded for that.

    Source: proc_pid_stat(5), fields 48 to 51. Nothing else points there: os.environ.clear() has
    released the last variable.
    """
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2].split()
    variables = [f"{name}={value}" for name, value in environment.items()]
    for start, end, texts in ((45, 46, command), (47, 48, variables)):
        size = int(fields[end]) - int(fields[start])
        if size <= 0:
            # A kernel that does not show these numbers.
            continue
        content = b"".join(os.fsencode(text) + b"\0" for text in texts)[: size - 1]
        ctypes.memset(int(fields[start]), 0, size)
        ctypes.memmove(int(fields[start]), content, len(content))


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _serve_own(order: Order) -> tuple[Order, list[int]] | None:
    """Give a program that starts programs a server of its own.

    Returns the order in a copy that must run one of those.
    """
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        # Not the program's streams: their reader waits for their end.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.close(nothing)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Who looks for what a program left must not take this for it.
        _show(["support.fork_server"], {})
        asked = serve(its)
        if asked is None:
            os._exit(0)
        return asked
    its.close()
    forked_starts.use(ours, pid, order.environment)
    return None


def _run(order: Order, descriptors: list[int]) -> NoReturn:
    """Be the program.

    Ends as an interpreter does, but for one thing: it does not take its modules apart, which is two
    thirds of what a start costs and frees what the kernel frees anyway. An exception, an interrupt,
    a message instead of a status, and streams that cannot be flushed are left to the interpreter.
    """
    _become(order, descriptors)
    if order.module == _DEMO or (order.module == "topobus.cli.main" and _STARTERS.intersection(order.arguments[:1])):
        asked = _serve_own(order)
        if asked is not None:
            _run(*asked)
    status: Any = 0
    try:
        if order.script:
            runpy.run_path(order.script, run_name="__main__")
        else:
            runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    except SystemExit as err:
        status = err.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        sys.exit(status)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(status)
    os._exit((status or 0) & 0xFF)


def main(descriptor: int) -> None:
    """Serve until the asker is gone."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    # Ctrl-C goes to the whole group; this ends with who asked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load()
    gc.collect()
    gc.freeze()
    threads = list(Path("/proc/self/task").iterdir())
    # The three streams, the socket, and the folder that is being listed.
    descriptors = list(Path("/proc/self/fd").iterdir())
    if len(threads) != 1 or len(descriptors) != 5:
        raise RuntimeError(f"an import left threads {threads} or descriptors {descriptors}: copies would share them")
    asked = serve(connection)
    if asked is not None:
        _run(*asked)


if __name__ == "__main__":
    main(int(sys.argv[1]))
