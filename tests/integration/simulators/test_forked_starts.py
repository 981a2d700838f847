"""A program that the fork server starts is what an executed one is.

Each promise holds for both, so that no test can tell which it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import forked_starts
from topobus.local_system.supervision import die_with_parent, is_alive

pytestmark = [pytest.mark.integration, pytest.mark.real_start]

_TESTS = str(Path(__file__).resolve().parents[2])
_PROGRAM = (sys.executable, "-m", "support.reporting_program")
_LIMIT_S = 60.0


@pytest.fixture(params=["executed", "forked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each way to start a program."""
    monkeypatch.setenv("PYTHONPATH", _TESTS)
    with forked_starts.forked_starts() if request.param == "forked" else contextlib.nullcontext():
        yield request.param


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    return subprocess.run(
        [*_PROGRAM, *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=False, **options
    )


def reported(**options: Any) -> dict[str, Any]:
    """Run the program that reports and read its report."""
    done = run("report", "ü", "", **options)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_program_has_what_it_was_given_when_it_starts(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments, folder, environment, stdin, encoding, signals, parent: as given.

    No descriptor and no thread beside its own.
    """
    environment = {**os.environ, "REPORTED": "ä=1\n2"}
    monkeypatch.setenv("NOT_GIVEN", "1")
    with (tmp_path / "open").open("w") as kept:
        os.set_inheritable(kept.fileno(), True)  # noqa: FBT003 - the name of the function says what
        report = reported(cwd=tmp_path, env=environment, input="asked\n")

    assert sys.__stdout__ is not None
    assert report["name"] == "__main__"
    assert report["arguments"] == ["report", "ü", ""]
    assert report["file"] == "reporting_program.py"
    assert report["folder"] == str(tmp_path)
    assert report["paths"] == [str(tmp_path), _TESTS]
    assert report["told_command"] == ["report", "ü", ""][:2]
    assert sorted(report["told_environment"]) == sorted(f"{name}={value}" for name, value in environment.items())
    assert report["variable"] == "ä=1\n2"
    assert set(report["variables"]) - {"LC_CTYPE"} == set(environment) - {"LC_CTYPE"}
    assert report["stdin"] == "asked\n"
    assert report["parent"] == os.getpid()
    assert report["descriptors"] == [0, 1, 2]
    assert report["threads"] == 1
    assert report["sigint"]
    assert report["sigterm"]
    assert report["sigpipe"]
    assert report["encoding"] == [sys.__stdout__.encoding, sys.__stdout__.errors, "backslashreplace"]
    assert not report["is_own_session"]
    assert report["has_gateway"] is (way == "forked"), "how it was started"


def test_program_has_our_folder_and_environment_when_none_are_given(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test itself has at that moment, not what the server had when it started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPORTED", "now")

    report = reported(start_new_session=True, input="")

    assert (report["folder"], report["variable"], report["is_own_session"]) == (str(tmp_path), "now", True)
    assert report["has_gateway"] is (way == "forked")


def test_script_has_its_own_folder_first_when_it_is_started_by_its_file(way: str, tmp_path: Path) -> None:
    """`python file.py` is known by its file as it was written, and imports from where that lies."""
    script = Path(_TESTS) / "support" / "reporting_program.py"
    link = tmp_path / "linked.py"
    link.symlink_to(script)

    command = [sys.executable, str(link), "report", "more"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=True, stdin=subprocess.DEVNULL
    )
    report = json.loads(done.stdout)

    assert (report["name"], report["file"], report["arguments"]) == ("__main__", "linked.py", ["report", "more"])
    assert report["paths"] == [str(script.parent), _TESTS]
    assert report["has_gateway"] is (way == "forked")


def test_programs_draw_other_random_numbers_when_they_start_one_after_the_other(way: str) -> None:
    """A copy does not repeat what the copy before it drew: instances and operations would have one
    name.
    """
    assert reported(input="")["random"] != reported(input="")["random"]


@pytest.mark.parametrize(
    ("arguments", "status", "stdout", "stderr"),
    [
        pytest.param(("exit", "0"), 0, "", "", id="well"),
        pytest.param(("exit", "78"), 78, "", "", id="status"),
        pytest.param(("exit", "300"), 44, "", "", id="status above a byte"),
        pytest.param(("message",), 1, "", "a message\n", id="message"),
        pytest.param(("raise",), 1, "", "ValueError: a defect\n", id="defect"),
        pytest.param(("late",), 0, "thread\nat exit\n", "", id="thread and atexit"),
        pytest.param(("full",), 120, "", "OSError: [Errno 28] No space left on device\n", id="stdout that is full"),
    ],
)
def test_status_and_streams_are_the_programs_when_it_ends(
    way: str, arguments: tuple[str, ...], status: int, stdout: str, stderr: str
) -> None:
    """Whoever waits gets the status; the streams are complete.

    Threads and atexit come to their end.
    """
    done = run(*arguments, env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"})

    assert (done.returncode, done.stdout) == (status, stdout)
    assert done.stderr.endswith(stderr) if stderr else not done.stderr, done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
async def test_signal_is_the_status_when_a_program_dies_of_it(way: str, number: signal.Signals) -> None:
    """A signal reaches the program itself, and asyncio tells it as it does for any child.

    The process is gone then.
    """
    process = await asyncio.create_subprocess_exec(
        *_PROGRAM, "wait", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    async with asyncio.timeout(_LIMIT_S):
        assert await process.stdout.readline() == b"waiting\n"
        assert is_alive(process.pid)
        process.send_signal(number)
        status = await process.wait()
        rest = await process.stdout.read()

    assert (status, rest) == (-number, b"")
    assert not is_alive(process.pid)


def test_stopped_program_goes_on_when_it_is_continued(way: str) -> None:
    """SIGSTOP holds the program and SIGCONT lets it go, as the freezing tests need."""
    with subprocess.Popen([*_PROGRAM, "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        _, stopped = os.waitpid(process.pid, os.WUNTRACED)
        process.send_signal(signal.SIGTERM)
        was_alive = process.poll() is None
        process.send_signal(signal.SIGCONT)

        assert os.WIFSTOPPED(stopped)
        assert was_alive
        assert process.wait(_LIMIT_S) == -signal.SIGTERM


def test_first_line_is_read_at_once_when_output_is_not_buffered(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONUNBUFFERED is the program's own."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with subprocess.Popen([*_PROGRAM, "unflushed"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()

    assert line == b"waiting\n"


def test_function_runs_before_the_program_when_it_asked_for_that(way: str) -> None:
    """A `preexec_fn` that can be named runs in the program, before its first line."""
    report = reported(preexec_fn=die_with_parent, input="")

    assert report["death_signal"] == signal.SIGTERM
    assert report["has_gateway"] is (way == "forked")


def test_program_is_executed_when_its_function_has_no_name(way: str) -> None:
    """A closure cannot be sent to another process."""
    report = reported(preexec_fn=lambda: os.setsid(), input="")

    assert report["is_own_session"]
    assert not report["has_gateway"]


def test_folder_that_is_not_there_is_an_error_when_a_program_starts(way: str, tmp_path: Path) -> None:
    """The error is subprocess's own."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run("report", cwd=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changed",
    [{"PYTHONHASHSEED": "1"}, {"PYTHONPATH": "/nowhere"}, {"LC_ALL": "C"}, {"GRPC_VERBOSITY": "debug"}],
    ids=lambda changed: next(iter(changed)),
)
def test_program_is_executed_when_an_interpreter_would_start_otherwise(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interpreter, the C library or gRPC read once, at their start, cannot be given to a
    copy.
    """
    monkeypatch.setenv("PYTHONPATH", _TESTS)
    code = "import sys; sys.stdout.write(str('topobus.gateway.service' in sys.modules))"
    with forked_starts.forked_starts():
        forked = reported(input="")["has_gateway"]
        path = {"PYTHONPATH": f"{changed['PYTHONPATH']}{os.pathsep}{_TESTS}"} if "PYTHONPATH" in changed else changed
        executed = reported(env={**os.environ, **path}, input="")["has_gateway"]
        other = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=_LIMIT_S
        ).stdout

    assert (forked, executed, other) == (True, False, "False")


def test_program_is_executed_when_the_kernel_makes_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clone(2) is refused the suite takes longer and stays what it is."""
    monkeypatch.setenv("PYTHONPATH", _TESTS)
    monkeypatch.setattr(forked_starts, "_is_refused", False)
    monkeypatch.setattr(forked_starts, "send", lambda *_: 0)
    with forked_starts.forked_starts():
        reports = [reported(input="")["has_gateway"] for _ in range(2)]

    assert reports == [False, False]


def test_starters_programs_are_its_own_children_when_it_was_forked(way: str, short_folder: Path) -> None:
    """`topobus up` starts its services by a server of its own: they are its children, each of its
    own session, and they are gone when it is.
    """
    command = [sys.executable, "-m", "topobus.cli.main", "up", "--dir", str(short_folder / "up"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids: dict[str, int] = {}
        try:
            for line in process.stdout:
                status = json.loads(line)
                if status.get("pid"):
                    pids[status["service"]] = status["pid"]
                if status.get("system") == "ready":
                    break
            parents = {
                name: int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
                for name, pid in pids.items()
            }
            has_grpc = "cygrpc" in Path(f"/proc/{pids['discovery']}/maps").read_text()
            sessions = {name: os.getsid(pid) for name, pid in pids.items()}
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()

    assert process.returncode in (0, 130, 143), process.returncode
    assert len(pids) >= 8
    assert set(parents.values()) == {process.pid}
    assert sessions == pids
    assert has_grpc is (way == "forked"), "how the services were started: discovery does not load gRPC itself"
    assert not [name for name, pid in pids.items() if is_alive(pid)]
