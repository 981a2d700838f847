"""Programs kept running: real processes, small ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from support.looks import next_turn
from topobus.local_system.supervision import (
    Program,
    ProgramState,
    ProgramStatus,
    Supervisor,
)
from topobus.values.errors import PeerUnavailable

pytestmark = pytest.mark.integration

_LIMIT_S = 60.0
_SERVE = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('serving', flush=True); "
    "signal.pause()"
)
_STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('serving', flush=True)\nwhile True: "
    "signal.pause()"
)
_DIES = "import sys; print('cannot find my hat', flush=True); sys.exit(3)"


def program(name: str, code: str, status_of: dict[str, ProgramStatus]) -> Program:
    """Make a Python one-liner a program that is ready once it has said that it serves."""

    async def is_ready() -> bool:
        return status_of[name].last_line == "serving"

    return Program(name=name, command=(sys.executable, "-c", code), environment=os.environ, probe=is_ready)


async def until(supervisor: Supervisor, name: str, state: ProgramState, *, restarts: int = 0) -> ProgramStatus:
    """Wait until a program is in a state, after so many restarts at least."""
    async with asyncio.timeout(_LIMIT_S):
        async for statuses in supervisor.changes(at_least_every_s=1.0):
            for status in statuses:
                if status.name == name and status.state is state and status.restarts >= restarts:
                    return status
    raise AssertionError("unreachable")


def is_alive(pid: int) -> bool:
    """Say whether a process exists (zombies are reaped by the
    supervisor, so they count as alive).
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ending_of(pid: int) -> asyncio.Future[None]:
    """Give a future that is done when the process has ended.

    A pidfd tells it of processes that are not our children, too.
    """
    loop = asyncio.get_running_loop()
    handle = os.pidfd_open(pid)
    ended: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        loop.remove_reader(handle)
        os.close(handle)
        ended.set_result(None)

    loop.add_reader(handle, finish)
    return ended


async def test_supervisor_restarts_a_program_when_it_is_killed(tmp_path: Path) -> None:
    """A killed program runs again under another pid and the restart is counted."""
    statuses: dict[str, ProgramStatus] = {}
    async with Supervisor(tmp_path / "logs") as supervisor:
        statuses["a"] = supervisor.start(program("a", _SERVE, statuses))
        first = (await until(supervisor, "a", ProgramState.READY)).pid
        assert first is not None

        os.kill(first, signal.SIGKILL)
        again = await until(supervisor, "a", ProgramState.READY, restarts=1)

        assert again.pid not in (None, first)
        assert again.restarts == 1


async def test_supervisor_leaves_nothing_running_when_it_is_closed(tmp_path: Path) -> None:
    """Every process is gone, also the child that one of them started and forgot."""
    parent = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import signal; "
        f"signal.pause()']).pid, flush=True); {_SERVE}"
    )
    statuses: dict[str, ProgramStatus] = {}
    async with Supervisor(tmp_path / "logs") as supervisor:
        for name, code in (("a", _SERVE), ("b", parent)):
            statuses[name] = supervisor.start(program(name, code, statuses))
        await supervisor.until_ready(["a", "b"], timeout_s=_LIMIT_S)
        grandchild = ending_of(int(statuses["b"].tail[0]))
        pids = [status.pid for status in supervisor.statuses if status.pid is not None]

    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    await asyncio.wait_for(grandchild, _LIMIT_S)


async def test_supervisor_stops_everything_when_cancelled_twice(tmp_path: Path) -> None:
    """A second Ctrl-C during the stop does not leave a process behind."""
    statuses: dict[str, ProgramStatus] = {}
    pids: list[int] = []

    async def run() -> None:
        async with Supervisor(tmp_path / "logs") as supervisor:
            statuses["a"] = supervisor.start(program("a", _SERVE, statuses))
            pids.append((await until(supervisor, "a", ProgramState.READY)).pid or 0)
            running.set()
            await asyncio.Event().wait()

    running = asyncio.Event()
    task = asyncio.create_task(run())
    await asyncio.wait_for(running.wait(), _LIMIT_S)
    task.cancel()
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.wait([task], timeout=_LIMIT_S)

    assert not is_alive(pids[0])


async def test_supervisor_kills_a_program_when_it_ignores_the_request_to_stop(tmp_path: Path) -> None:
    """SIGTERM that is ignored is followed by SIGKILL."""
    statuses: dict[str, ProgramStatus] = {}
    async with Supervisor(tmp_path / "logs", stop_grace_s=0.2) as supervisor:
        statuses["a"] = supervisor.start(program("a", _STUBBORN, statuses))
        pid = (await until(supervisor, "a", ProgramState.READY)).pid

    assert pid is not None
    assert not is_alive(pid)


async def test_until_ready_names_the_program_and_its_last_words_when_it_keeps_dying(tmp_path: Path) -> None:
    """Who waits in vain learns which program it was, what it said last and where its log lies."""
    statuses: dict[str, ProgramStatus] = {}
    async with Supervisor(tmp_path / "logs") as supervisor:
        statuses["a"] = supervisor.start(program("a", _DIES, statuses))
        await until(supervisor, "a", ProgramState.RESTARTING, restarts=1)

        with pytest.raises(PeerUnavailable, match=r"a is .*cannot find my hat") as caught:
            await supervisor.until_ready(["a"], timeout_s=0.1)

    assert "a.log" in caught.value.next_step
    assert (tmp_path / "logs" / "a.log").read_text().startswith("cannot find my hat")


async def test_supervisor_reports_a_program_when_it_does_not_exist(tmp_path: Path) -> None:
    """A command that cannot be started is shown and tried again, it does not end the supervisor."""

    async def never() -> bool:
        return False

    async with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start(Program(name="a", command=(str(tmp_path / "absent"),), environment={}, probe=never))
        status = await until(supervisor, "a", ProgramState.RESTARTING, restarts=1)

    assert "cannot start" in status.last_line


async def test_supervisor_takes_its_programs_along_when_it_is_killed(tmp_path: Path) -> None:
    """A supervisor that dies without a chance to stop anything leaves nothing behind: the kernel
    ends its programs.
    """
    code = f"""
import asyncio, os, pathlib, sys
from topobus.local_system.supervision import Program, Supervisor
async def main():
    async with Supervisor(pathlib.Path({str(tmp_path / "logs")!r})) as supervisor:
        async def is_ready():
            return status.last_line == "serving"
        status = supervisor.start(Program(name="a", command=(sys.executable, "-c", {_SERVE!r}), environment=os.environ, probe=is_ready))
        await supervisor.until_ready(["a"], timeout_s={_LIMIT_S})
        print(status.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""  # noqa: E501
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), _LIMIT_S))
    ended = ending_of(pid)

    process.kill()

    await asyncio.wait_for(ended, _LIMIT_S)
    await process.wait()


async def test_supervisor_hands_a_cancellation_on_when_it_comes_while_everything_stops(tmp_path: Path) -> None:
    """A Ctrl-C in the last moment ends the caller, too: after everything is stopped, and not
    instead of it.
    """
    gone_on = asyncio.Event()
    statuses: dict[str, ProgramStatus] = {}
    pids: list[int] = []

    async def work() -> None:
        async with Supervisor(tmp_path / "logs") as supervisor:
            statuses["a"] = supervisor.start(program("a", _SERVE, statuses))
            pids.append((await until(supervisor, "a", ProgramState.READY)).pid or 0)
            me = asyncio.current_task()
            assert me is not None
            asyncio.get_running_loop().call_soon(me.cancel)
        gone_on.set()

    task = asyncio.create_task(work())
    await asyncio.wait([task], timeout=_LIMIT_S)

    assert task.cancelled()
    assert not gone_on.is_set()
    assert not is_alive(pids[0])


@pytest.mark.parametrize("ticks", range(5))
async def test_changes_ends_when_cancelled_in_the_moment_of_a_change(ticks: int, tmp_path: Path) -> None:
    """A cancellation that meets a change, at any step of the loop, is not lost: Ctrl-C always stops
    `topobus up`.
    """
    async with Supervisor(tmp_path / "logs") as supervisor:
        waiting = asyncio.Event()

        async def follow() -> None:
            async for _ in supervisor.changes(at_least_every_s=3600):
                waiting.set()

        task = asyncio.create_task(follow())
        await waiting.wait()
        for _ in range(3):
            await next_turn()

        supervisor.announce()
        for _ in range(ticks):
            await next_turn()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=_LIMIT_S)

        assert done
        assert task.cancelled()


async def test_logs_are_for_their_own_user_alone(tmp_path: Path) -> None:
    """What services say of pods and devices is not for everybody on the machine, also where the
    folder was there.
    """
    (tmp_path / "logs").mkdir(mode=0o755)
    (tmp_path / "logs" / "a.log").touch(mode=0o644)
    statuses: dict[str, ProgramStatus] = {}

    async with Supervisor(tmp_path / "logs") as supervisor:
        for name in ("a", "b"):
            statuses[name] = supervisor.start(program(name, _SERVE, statuses))
            await until(supervisor, name, ProgramState.READY)

    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()}
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert modes == {"a.log": 0o600, "b.log": 0o600}
