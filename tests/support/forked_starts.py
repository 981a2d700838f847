"""Lets `subprocess` and `asyncio` start our own programs by a fork server (support.fork_server)
while it is on.

All else they start as ever. A suite starts several hundred processes of ours, each of which costs
0.1 to 0.4 s of processor time before its first line; a copy costs a tenth. What is forked:
`python -m topobus.…`, `python -m support.…`, `python file.py` and `topobus-…` of this
interpreter, whose environment differs from ours in nothing that an interpreter or a library reads
when it starts. All else is executed: other commands and interpreters, `-c`, other PYTHON*
variables, a closure to call first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from support.fork_orders import CLONE_NUMBER, Order, send

__all__ = ["close", "forked_starts", "prepare", "use"]

_TESTS = str(Path(__file__).resolve().parents[1])
_OURS = ("topobus.", "support.")
# Read by the interpreter, the C library, or a library at its import: a
# copy has what the server had.
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "GRPC_", "OTEL_", "PROMETHEUS_", "MALLOC_", "GLIBC_")
# Of these a copy takes on its own.
# Console scripts, as installed beside the interpreter: topobus, topobus-gpu.
_SCRIPTS = str(Path(sys.executable).parent / "topobus")
_PADDING = "FORK_SERVER_PADDING"
_TAKEN_ON = {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = signature(_execute)


class _Server:
    """A fork server, asked from any thread."""

    def __init__(
        self,
        connection: socket.socket,
        pid: int,
        environment: Mapping[str, str],
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        self._connection = connection
        self._owner = os.getpid()
        self._at_start = _at_start(environment)
        # Elsewhere there may be a sitecustomize, or another package in
        # place of one that the server has.
        self._paths = {*_paths(environment), _TESTS}
        self._lock = threading.Lock()
        self._process = process
        self.pid = pid

    def order(self, given: Mapping[str, Any]) -> Order | None:
        """Turn what Popen was given into an order; None when only an exec does it."""
        plain = (
            not given["shell"] and given["executable"] is None and given["close_fds"] and not given["pass_fds"]
            and given["restore_signals"] and given["gid"] is given["gids"] is given["uid"] is None and given["umask"] < 0  # noqa: E501
            and given["process_group"] == -1 and os.getpid() == self._owner
        )  # fmt: skip
        program = _program(given["args"])
        if not plain or program is None:
            return None
        module, script, arguments = program
        folder = Path(os.fsdecode(given["cwd"] or ".")).resolve()
        environment = dict(os.environ if given["env"] is None else given["env"])
        if _at_start(environment) != self._at_start or not _paths(environment) <= self._paths or not folder.is_dir():
            return None
        before = b""
        if given["preexec_fn"] is not None:
            try:
                before = pickle.dumps(given["preexec_fn"])
            except (pickle.PicklingError, AttributeError, TypeError):
                return None
        return Order(
            module=module, script=script, arguments=arguments, folder=str(folder), environment=environment,
            is_own_session=bool(given["start_new_session"]), before=before,
        )  # fmt: skip

    def start(self, order: Order, descriptors: tuple[int, int, int]) -> int:
        """Start a process of ours; its pid."""
        with self._lock:
            return send(self._connection, order, descriptors)

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        if self._process is not None:
            self._process.wait()


_server: _Server | None = None
_is_on = False
_is_refused = False


def prepare() -> None:
    """Start the server of this process, unless it runs. It imports while this process continues."""
    global _server
    if _server is not None or CLONE_NUMBER == 0:
        return
    ours, its = socket.socketpair()
    # Copies write what /proc shows of them over the two paddings: a variable of our own may be
    # longer than all of ours.
    environment = {
        **os.environ,
        _PADDING: "x" * 65536,
        "PYTHONPATH": os.pathsep.join(filter(None, (_TESTS, os.environ.get("PYTHONPATH")))),
    }
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", str(its.fileno()), "x" * 8192],
            env=environment, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], cwd="/",
        )  # fmt: skip
    _server = _Server(ours, process.pid, os.environ, process)


def use(connection: socket.socket, pid: int, environment: Mapping[str, str]) -> None:
    """In a program that a server started and that starts programs: let its own server do so from
    now on.
    """
    global _server, _is_on
    _server = _Server(connection, pid, environment, None)
    _is_on = True
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def close() -> None:
    """End the server of this process."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Start programs of ours by the server until the block ends."""
    global _is_on
    before, _is_on = _is_on, True
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _is_on = before
        if not before:
            subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_START) and name not in _TAKEN_ON
    }


def _paths(environment: Mapping[str, str]) -> set[str]:
    return {path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path}


def _program(command: Any) -> tuple[str, str, tuple[str, ...]] | None:
    """Tell which module or script a command runs, with which arguments.

    None when it is none of ours.
    """
    if not isinstance(command, list | tuple) or not all(isinstance(word, str) for word in command):
        return None
    match list(command):
        case [sys.executable, "-m", module, *arguments] if module.startswith(_OURS):
            return module, "", tuple(arguments)
        case [sys.executable, script, *arguments] if script.endswith(".py"):
            return "", script, tuple(arguments)
        case [script, *arguments] if script.startswith(_SCRIPTS):
            return "", script, tuple(arguments)
        case _:
            return None


def _execute_child(self: Any, *arguments: Any) -> None:
    """Stand in for Popen's own method."""
    global _is_refused
    given = _PARAMETERS.bind(self, *arguments).arguments
    # The server itself is executed, and only it passes descriptors on.
    is_ours = _is_on and not _is_refused and not given["pass_fds"] and _program(given["args"]) is not None
    if is_ours:
        prepare()
    order = _server.order(given) if _server is not None and is_ours else None
    if order is None or _server is None:
        _execute(self, *arguments)
        return
    sys.audit("subprocess.Popen", sys.executable, list(given["args"]), given["cwd"], given["env"])
    ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    stdin, stdout, stderr = (number if end == -1 else end for number, end in enumerate(ends))
    pid = _server.start(order, (stdin, stdout, stderr))
    if pid == 0:
        # A sandbox may know no CLONE_PARENT.
        _is_refused = True
        _execute(self, *arguments)
        return
    try:
        self.pid = pid
        self._child_created = True
    finally:
        self._close_pipe_fds(
            given["p2cread"], given["p2cwrite"], given["c2pread"], given["c2pwrite"], given["errread"], given["errwrite"]  # noqa: E501
        )  # fmt: skip
