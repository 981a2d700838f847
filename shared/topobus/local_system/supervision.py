"""Supervises programs: starts them, watches until they are ready, restarts them with back-off when
they die, and stops them together.

It keeps a status and the last log lines of each program. It has no knowledge of Topobus. Every
program is a session of its own (a Ctrl-C of the terminal reaches only the supervisor, which stops
them in order) and dies with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Self

from topobus.process.backoff import full_jitter
from topobus.values.errors import PeerUnavailable

__all__ = ["Program", "ProgramState", "ProgramStatus", "Supervisor", "die_with_parent", "is_alive", "probe_http"]

# A service promises to stop within 5 s of SIGTERM; one more for a
# loaded machine, then it is killed.
_STOP_GRACE_S = 6.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
# A program that ran so long has recovered: its next death starts the back-off from its first pause.
_STEADY_S = 30.0
# Services wait for each other and do not die. A program that died so often at the start has a
# mistake that waiting does not correct.
_HOPELESS_RESTARTS = 4
_PROBE_PAUSE_S = 0.1
_PROBE_TIMEOUT_S = 1.0
_READY_PAUSE_S = 2.0
# A program that was ready, or that has had so long to become so, is restarted when its check has
# reported for so long that only a restart helps.
_STUCK_S = 5.0
_STUCK_AT_START_S = 20.0
_TAIL_LINES = 40
# PR_SET_PDEATHSIG (linux/prctl.h): the kernel sends this signal to a child whose
# parent is gone, even by SIGKILL.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProgramState(StrEnum):
    """The states of a program."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not-ready"
    """Was ready once, and now reports that it is not."""
    RESTARTING = "restarting"
    """Died; waits out its back-off."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run. `probe` returns whether it is ready.

    It must return within a second or so and never raise.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    probe: Callable[[], Awaitable[bool]]
    is_stuck: Callable[[], Awaitable[bool]] | None = None
    """Called while it runs and is not ready: returns whether only a restart helps. None: no such
    state of it is known."""
    cleanup: tuple[str, ...] = ()
    """A command that removes what a killed program may leave (a
    container); its failure is no news."""


@dataclass(kw_only=True)
class ProgramStatus:
    """The present state of a program. Only the supervisor changes it."""

    name: str
    state: ProgramState = ProgramState.WAITING
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    """How it last ended; negative for a signal."""
    started_at: float = 0.0
    ready_after_s: float | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    @property
    def last_line(self) -> str:
        """The newest log line."""
        return self.tail[-1] if self.tail else ""


class Supervisor:
    """Runs programs until it is closed.

    Use as an async context manager: leaving it stops everything, the last started first.
    """

    def __init__(self, logs: Path, *, stop_grace_s: float = _STOP_GRACE_S) -> None:
        self._logs = logs
        self._stop_grace_s = stop_grace_s
        self._running: list[tuple[ProgramStatus, Program, asyncio.Task[None]]] = []
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._attendants: list[asyncio.Task[None]] = []

    @property
    def statuses(self) -> tuple[ProgramStatus, ...]:
        """All programs in the order they were started."""
        return tuple(status for status, _, _ in self._running)

    def status(self, name: str) -> ProgramStatus:
        """Return a program's status.

        Errors: raises KeyError for a name that was never started.
        """
        for status in self.statuses:
            if status.name == name:
                return status
        raise KeyError(name)

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        # The logs name pods and devices, which not every user of the machine may see.
        self._logs.chmod(0o700)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # A second Ctrl-C must not leave processes behind: stopping is finished whatever is
        # cancelled meanwhile, and only then the caller ends.
        stopping = asyncio.ensure_future(self.stop())
        is_cancelled = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                is_cancelled = True
        stopping.result()
        if is_cancelled:
            raise asyncio.CancelledError

    def start(self, program: Program) -> ProgramStatus:
        """Start a program and keep it running."""
        status = ProgramStatus(name=program.name)
        self._running.append(
            (status, program, asyncio.create_task(self._keep(program, status), name=f"keep-{program.name}"))
        )
        return status

    def attend(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the programs until they are stopped."""
        self._attendants.append(asyncio.create_task(work))

    async def changes(self, *, at_least_every_s: float) -> AsyncIterator[tuple[ProgramStatus, ...]]:
        """Yield the statuses now, on every change, and every so many seconds without one."""
        while True:
            self._changed.clear()
            yield self.statuses
            # Not wait_for: before Python 3.12 it loses a cancellation that comes
            # in the same moment as the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(at_least_every_s):
                    await self._changed.wait()

    async def until_ready(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Wait until all named programs are ready at once, but no longer once one of them dies
        again and again.

        Errors: raises PeerUnavailable that names those which are not, with their last log lines.
        """
        wanted = set(names)
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                async for statuses in self.changes(at_least_every_s=1.0):
                    if wanted <= {status.name for status in statuses if status.state is ProgramState.READY}:
                        return
                    if any(status.name in wanted and status.restarts >= _HOPELESS_RESTARTS for status in statuses):
                        raise TimeoutError
        except TimeoutError as err:
            late = [
                status for status in self.statuses if status.name in wanted and status.state is not ProgramState.READY
            ]
            timeout_s = time.monotonic() - started_at
            what = "".join(
                f"\n  {program_status.name} is {program_status.state}, last line: "
                f"{program_status.last_line[:160] or 'nothing'}"
                for program_status in late
            )
            raise PeerUnavailable(
                f"not ready after {timeout_s:.0f} s:{what}",
                next_step=f"read {self._logs}/{late[0].name if late else '*'}.log",
            ) from err

    async def stop(self) -> None:
        """Stop everything: services together, and what was started before them (their server) after
        them.
        """
        self._stopping.set()
        self._changed.set()
        for attendant in self._attendants:
            attendant.cancel()
        await asyncio.gather(*self._attendants, return_exceptions=True)
        first, rest = self._running[:1], self._running[1:]
        for tier in (rest, first):
            await asyncio.gather(*(self._stop_one(status, program, task) for status, program, task in tier))

    async def _stop_one(self, status: ProgramStatus, program: Program, task: asyncio.Task[None]) -> None:
        process = self._processes.get(status.name)
        if process is not None and process.returncode is None:
            await self._end(process)
        task.cancel()
        await asyncio.wait([task])
        if process is not None:
            _kill_group(process.pid)
        if program.cleanup:
            with contextlib.suppress(OSError):
                cleaner = await asyncio.create_subprocess_exec(
                    *program.cleanup, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
                )
                await cleaner.wait()
        status.state = ProgramState.STOPPED
        self._changed.set()

    async def _keep(self, program: Program, status: ProgramStatus) -> None:
        attempt = 0
        while True:
            await self._run_once(program, status)
            if self._stopping.is_set():
                return
            if time.monotonic() - status.started_at > _STEADY_S:
                attempt = 0
            status.restarts += 1
            self._set(status, ProgramState.RESTARTING)
            await asyncio.sleep(full_jitter(attempt, least_s=_FIRST_PAUSE_S, most_s=_LONGEST_PAUSE_S))
            attempt += 1

    async def _run_once(self, program: Program, status: ProgramStatus) -> None:
        status.started_at = time.monotonic()
        status.ready_after_s = None
        try:
            process = await asyncio.create_subprocess_exec(
                *program.command,
                env=dict(program.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                # Safe although it runs between fork and exec: it is one system call, without a lock
                # or an allocation that another thread could hold.
                preexec_fn=die_with_parent,
                limit=1 << 20,
            )
        except OSError as err:
            status.tail.append(f"cannot start {program.command[0]}: {err.strerror}")
            return
        self._processes[program.name] = process
        status.pid = process.pid
        self._set(status, ProgramState.STARTING)
        prober = asyncio.create_task(self._watch_readiness(program, status))
        freer = asyncio.create_task(self._free(program, status, process))
        reader = asyncio.create_task(self._copy_log(process, status))
        try:
            status.exit_code = await process.wait()
            # The pipe ends with the process unless a grandchild holds it; the last lines
            # are worth a moment, not a hang.
            await asyncio.wait([reader], timeout=1.0)
        finally:
            for task in (prober, reader, freer):
                task.cancel()
            await asyncio.wait([prober, reader, freer])
            status.pid = None

    async def _watch_readiness(self, program: Program, status: ProgramStatus) -> None:
        while True:
            is_ready = await program.probe()
            if is_ready and status.state is not ProgramState.READY:
                if status.ready_after_s is None:
                    status.ready_after_s = time.monotonic() - status.started_at
                self._set(status, ProgramState.READY)
            elif not is_ready and status.state is ProgramState.READY:
                self._set(status, ProgramState.NOT_READY)
            await asyncio.sleep(_READY_PAUSE_S if is_ready else _PROBE_PAUSE_S)

    async def _free(self, program: Program, status: ProgramStatus, process: asyncio.subprocess.Process) -> None:
        """End a program that runs and cannot work any more.

        Its own loop then starts it again, with back-off.
        """
        if program.is_stuck is None:
            return
        since: float | None = None
        while since is None or time.monotonic() - since < _STUCK_S:
            await asyncio.sleep(_FIRST_PAUSE_S)
            has_had_time = status.ready_after_s is not None or time.monotonic() - status.started_at > _STUCK_AT_START_S
            if status.state is ProgramState.READY or not has_had_time or not await program.is_stuck():
                since = None
            elif since is None:
                since = time.monotonic()
        status.tail.append(f"{program.name} runs and does not work any more: it is restarted")
        await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        process.terminate()
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await process.wait()
        except TimeoutError:
            _kill_group(process.pid)
            await process.wait()

    async def _copy_log(self, process: asyncio.subprocess.Process, status: ProgramStatus) -> None:
        assert process.stdout is not None
        with await asyncio.to_thread(self._open_log, status.name) as log:
            while True:
                try:
                    line = await process.stdout.readline()
                except ValueError:
                    # A line above the reader's limit: readline has thrown it away,
                    # the next one is read as usual.
                    continue
                if not line:
                    return
                log.write(line)
                log.flush()
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    status.tail.append(text)
                    self._changed.set()

    def _open_log(self, name: str) -> BinaryIO:
        # 0600 in a folder of 0700 all the same: a log that is copied or moved
        # out of it stays its user's own.
        log = (self._logs / f"{name}.log").open("ab")
        os.fchmod(log.fileno(), 0o600)
        return log

    def announce(self) -> None:
        """Wake all followers of `changes`."""
        self._changed.set()

    def _set(self, status: ProgramStatus, state: ProgramState) -> None:
        status.state = state
        self.announce()


def die_with_parent() -> None:
    """Make the kernel end this process when its parent is gone. Use it as a `preexec_fn`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def is_alive(pid: int) -> bool:
    """Say whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def probe_http(port: int, path: str = "/readyz") -> bool:
    """Ask a service on this machine whether it is ready. False for any trouble."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
