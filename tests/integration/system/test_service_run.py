"""The life of a real process: start before NATS, become ready, stop on a signal, and the exit
statuses.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from topobus.simulation.nats_server import NatsServer, free_port

pytestmark = pytest.mark.integration

_LIMIT_S = 30.0

_PROGRAM = textwrap.dedent(
    """
    import asyncio, sys, time
    from topobus.values.errors import *
    from topobus.process.config import ServiceSettings
    from topobus.process.logging import get_logger
    from topobus.process.service import run

    class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        mode: str = "serve"

    async def serve(settings, runtime):
        if settings.mode == "serve":
            runtime.readiness.set("work", is_ready=True)
            get_logger().info("test.served", node_name=runtime.node)
            await asyncio.Event().wait()
        elif settings.mode == "stuck":
            # Said by the thread itself: one that has not begun can still be cancelled, and then nothing hangs.
            await asyncio.to_thread(lambda: (get_logger().info("test.served"), time.sleep(60)))
        elif settings.mode == "stubborn":
            get_logger().info("test.served")
            try:
                await asyncio.Event().wait()
            finally:
                raise RuntimeError("while stopping")
        elif settings.mode == "config":
            raise ConfigError("policy: got 'x', wanted one of a, b", next_step="mend it")
        elif settings.mode == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        elif settings.mode == "bug":
            raise KeyError("oops")

    async def fail():
        raise HardwareError("the tree is gone", path="sys")

    sys.exit(run("gpu", Settings, serve))
    """
)


async def _start(tmp_path: Path, *arguments: str, **environ: str) -> asyncio.subprocess.Process:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *arguments,
        env={**clean, "TOPOBUS_GPU__NODE": "n1", **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _line(process: asyncio.subprocess.Process, event: str) -> dict[str, object]:
    """Read the log until an event."""
    return (await _lines(process, event))[-1]


async def _lines(process: asyncio.subprocess.Process, event: str) -> list[dict[str, object]]:
    """Read the log until an event; gives all lines, that one included."""
    assert process.stderr is not None
    lines: list[dict[str, object]] = []
    async with asyncio.timeout(_LIMIT_S):
        while raw := await process.stderr.readline():
            lines.append(json.loads(raw))
            if lines[-1]["event"] == event:
                return lines
    raise AssertionError(f"the process ended without {event}")


async def _end(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_service_waits_then_serves_then_stops_when_nats_comes_late(nats_binary: Path, tmp_path: Path) -> None:
    """Started before NATS it says so and is not ready; with NATS it serves.

    SIGTERM ends it with 0 within five seconds.
    """
    port, http = free_port(), free_port()
    settings = {"TOPOBUS_ALL__NATS__URL": f"nats://127.0.0.1:{port}", "TOPOBUS_GPU__HTTP__PORT": str(http)}
    process = await _start(tmp_path, **settings)
    try:
        waiting = await _line(process, "bus.waiting")
        early = await _end(await _start(tmp_path, "--probe", **settings))
        async with NatsServer(binary=nats_binary, port=port):
            served = await _line(process, "test.served")
            ready = await _end(await _start(tmp_path, "--probe", **settings))
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()

    assert str(port) in str(waiting["url"])
    assert "TOPOBUS_ALL__NATS__URL" in str(waiting["next_step"])
    assert (early[0], ready[0], status) == (1, 0, 0)
    assert "waiting for NATS" in early[1]
    assert (served["service"], served["node"], served["node_name"]) == ("gpu", "n1", "n1")


@pytest.mark.parametrize("has_users", [False, True])
async def test_service_says_at_its_start_when_nats_is_open(nats_binary: Path, tmp_path: Path, has_users: bool) -> None:
    """Whoever reads the log of a service at a server without users learns what that means, and what
    to do; with users there is nothing to say.
    """
    config = 'authorization { user: "gpu", password: "s3cret" }' if has_users else ""
    async with NatsServer(binary=nats_binary, config=config) as server:
        url = server.url.replace("//", "//gpu:s3cret@") if has_users else server.url
        process = await _start(tmp_path, TOPOBUS_ALL__NATS__URL=url)
        lines = await _lines(process, "test.served")
        process.send_signal(signal.SIGTERM)
        status, _, _ = await _end(process)

    opened = [
        (line["level"], "docs/how-to/secure-nats.md" in str(line["next_step"]))
        for line in lines
        if line["event"] == "bus.open"
    ]
    assert status == 0
    assert opened == ([] if has_users else [("warning", True)])


async def test_service_stops_when_it_is_told_while_it_waits_for_nats(tmp_path: Path) -> None:
    """SIGINT during the wait for NATS ends the process cleanly, too."""
    process = await _start(tmp_path, TOPOBUS_ALL__NATS__URL=f"nats://127.0.0.1:{free_port()}")
    await _line(process, "bus.waiting")
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        assert await process.wait() == 0


@pytest.mark.parametrize(("mode", "wanted"), [("stuck", 70), ("stubborn", 0)])
async def test_service_ends_when_its_work_does_not(
    nats_server: NatsServer, tmp_path: Path, mode: str, wanted: int
) -> None:
    """Neither a thread that hangs in a vendor's library nor an error while stopping keeps a process
    alive.
    """
    process = await _start(tmp_path, TOPOBUS_ALL__NATS__URL=nats_server.url, TOPOBUS_GPU__MODE=mode)
    await _line(process, "test.served")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await process.wait() == wanted


@pytest.mark.parametrize(
    ("mode", "status", "words"), [("config", 78, "mend it"), ("group", 74, "the tree is gone"), ("bug", 70, "oops")]
)
async def test_service_exits_with_the_errors_status_when_its_work_fails(
    nats_server: NatsServer, tmp_path: Path, mode: str, status: int, words: str
) -> None:
    """The exit status tells a supervisor what kind of failure it was; the words tell a person.

    No Python traceback text for an operator's mistake.
    """
    process = await _start(tmp_path, TOPOBUS_ALL__NATS__URL=nats_server.url, TOPOBUS_GPU__MODE=mode)
    got, _, err = await _end(process)

    assert got == status
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "environ", "status", "words"),
    [
        (["--check-config"], {}, 0, "the settings are good"),
        (["--check-config"], {"TOPOBUS_GPU__MODDE": "x"}, 78, "did you mean MODE"),
        (["--check-config"], {"TOPOBUS_TOPLOGY__NODE": "x"}, 0, "warning: TOPOBUS_TOPLOGY__NODE sets nothing"),
        (
            ["--check-config"],
            {"TOPOBUS_ALL__NATS__URL": "127.0.0.1"},
            0,
            "'127.0.0.1' is taken for nats://127.0.0.1:4222",
        ),
        (["--version"], {}, 0, "topobus-gpu"),
        (["--config", "none.toml"], {}, 78, "none.toml"),
    ],
)
async def test_service_answers_and_exits_when_asked_about_itself(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], status: int, words: str
) -> None:
    """--check-config, --version and a wrong file need no NATS and end with the right status."""
    got, out, err = await _end(await _start(tmp_path, *arguments, **environ))

    assert got == status
    assert words in out + err


async def test_service_tells_all_mistakes_when_several_settings_are_wrong(tmp_path: Path) -> None:
    """A line for each on stderr, at a start as well as with --check-config; status 78."""
    got, out, err = await _end(
        await _start(tmp_path, TOPOBUS_GPU__MODDE="x", TOPOBUS_GPU__HTTP__PORT="many", TOPOBUS_GPU__NODE="A B")
    )

    assert (got, out) == (78, "")
    assert [line.startswith("topobus-gpu: ") for line in err.splitlines()] == [True, True, True]
    assert [word for word in ("MODDE", "http.port", "'A B'") if word not in err] == []
