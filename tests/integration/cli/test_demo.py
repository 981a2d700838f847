"""The demo as `make demo` runs it: it passes, it fails loudly, and it leaves nothing behind
whatever happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_DEMO = (sys.executable, "-m", "topobus.cli.demo")
_LIMIT_S = 200.0


@pytest.fixture
def home() -> Iterator[Path]:
    """Give the demo a folder for its temporary files, short enough for sockets, in which leftovers
    show.
    """
    folder = Path(tempfile.mkdtemp(prefix="td"))
    yield folder
    folder.rmdir()


def processes_below(home: Path) -> list[str]:
    """List processes whose environment or command line names the demo's folder: all that it started
    do.
    """
    processes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or entry.name == str(os.getpid()):
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"{home}/topobus-".encode() in text:
            processes.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().decode()}")
    return processes


def run_demo(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run(
        _DEMO,
        env={**os.environ, "TMPDIR": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


# `make demo`, which CI runs, starts each program as a user does.
def test_demo_passes_and_leaves_nothing_when_all_is_well(home: Path) -> None:
    """Eleven steps, exit 0, no colour in a pipe, no line beyond 100 columns, no process and no file
    left.
    """
    done = run_demo(home)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "11  Everything stops" in done.stdout
    assert "nothing is left running" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert processes_below(home) == []
    assert list(home.iterdir()) == []


def test_demo_fails_and_shows_why_when_a_service_does_not_do_its_part(home: Path) -> None:
    """Without the NVIDIA plugin there are no GPUs: the demo ends with 1 and says what it waited
    for, and cleans up.
    """
    done = run_demo(home, TOPOBUS_GPU__DRIVERS__DENY='["nvidia"]')

    assert done.returncode == 1
    assert "8 devices of class gpu" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert processes_below(home) == []
    assert list(home.iterdir()) == []


def test_demo_shows_the_log_of_a_service_when_it_cannot_start(home: Path) -> None:
    """A service with a broken setting keeps dying: the demo ends with 69 and shows that service's
    last lines.
    """
    done = run_demo(home, TOPOBUS_NIC__HEALTH__POLL_S="never")

    assert done.returncode == 69
    assert "log of nic" in done.stdout
    assert "poll_s" in done.stdout
    assert list(home.iterdir()) == []


def test_demo_cleans_up_when_it_is_interrupted(home: Path) -> None:
    """Ctrl-C in the middle ends everything with 130; no process and no file is left."""
    process = subprocess.Popen(
        _DEMO, env={**os.environ, "TMPDIR": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while " 2  What the node has" not in process.stdout.readline():
        assert process.poll() is None

    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=_LIMIT_S)

    assert process.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest + errors
    assert processes_below(home) == []
    assert list(home.iterdir()) == []
