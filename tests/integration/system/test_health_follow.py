"""`topobus.health.follow`: what a program of the user's own imports."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from integration.values import health
from support.account_nats import LIMIT_S, AccountNats, account_nats
from topobus.bus.bus import Bus
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.formats.messages.catalogue import HEALTH
from topobus.health import follow
from topobus.simulation.nats_server import NatsServer, free_port

pytestmark = pytest.mark.integration

_ASKS = b"is NATS there, and the login that of its user `user`?\n"
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "health_short.py"


@pytest.fixture
async def nats(nats_binary: Path) -> AsyncIterator[AccountNats]:
    """A server with the accounts as shipped, and its streams."""
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as server:
        async with server.bus("controller") as controller:
            await controller.provision()
        yield server


async def _publish(bus: Bus, device: str, generation: int) -> None:
    event = health(generation, device)
    await bus.publish(HEALTH, event, event_id=f"{device}-{generation}", node="n1", device_class="gpu", device=device)


async def test_follow_gives_the_present_and_then_each_change_when_the_user_has_an_account_of_its_own(
    nats: AccountNats,
) -> None:
    """The newest event of each device comes first, then every change once, in order.

    No consumer is made, and no right is missed.
    """
    settings = nats.settings("user")
    async with nats.bus("gpu") as gpu, asyncio.timeout(LIMIT_S):
        for device, generation in (("gpu-0", 1), ("gpu-0", 2), ("gpu-1", 1)):
            await _publish(gpu, device, generation)
        async with aclosing(follow(nats.server.url, password_file=settings.password_file)) as events:
            present = {(event.device, event.generation) for event in [await anext(events), await anext(events)]}
            for generation in (3, 4):
                await _publish(gpu, "gpu-0", generation)
            changes = [(event.device, event.generation) for event in [await anext(events), await anext(events)]]

    assert present == {("gpu-0", 2), ("gpu-1", 1)}
    assert changes == [("gpu-0", 3), ("gpu-0", 4)]


async def test_short_example_shows_the_present_and_what_comes_when_it_runs_as_the_user(nats: AccountNats) -> None:
    """The first program that the page shows runs as it stands, on the accounts as shipped."""
    async with nats.bus("gpu") as gpu, asyncio.timeout(LIMIT_S):
        await _publish(gpu, "gpu-0", 1)
        url = nats.server.url.replace("//", "//user:user@")
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(_EXAMPLE), url, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert program.stdout is not None
            present = json.loads(await program.stdout.readline())
            await _publish(gpu, "gpu-0", 2)
            change = json.loads(await program.stdout.readline())
        finally:
            program.kill()
            await program.wait()

    assert [(event["device"], event["generation"]) for event in (present, change)] == [("gpu-0", 1), ("gpu-0", 2)]


async def _said_until(program: asyncio.subprocess.Process, event: str) -> str:
    """Read what a program says beside its output until a line has an event; the line."""
    assert program.stderr is not None
    async for line in program.stderr:
        if event in line.decode():
            return line.decode()
    raise AssertionError(f"it ended without {event}")


_PROGRAM = """
import asyncio, sys
from topobus.health import follow

async def main():
    async for event in follow(sys.argv[1], password_file=sys.argv[2]):
        print(event.device, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("trouble", ["wrong-password", "nobody-listens", "no-stream"])
async def test_follow_says_on_standard_error_why_nothing_comes_when_a_program_only_imports_it(
    nats_binary: Path, tmp_path: Path, trouble: str
) -> None:
    """A refused login names user and server as an error.

    A port where nobody listens, and a server without the stream, are
    warnings. Nothing goes to its output.
    """
    async with account_nats(accounts(Shape.CENTRAL), binary=nats_binary) as server, asyncio.timeout(LIMIT_S):
        password = tmp_path / "password"
        password.write_text("wrong12345" if trouble == "wrong-password" else "user")
        password.chmod(0o600)
        url = f"nats://127.0.0.1:{free_port()}" if trouble == "nobody-listens" else server.server.url
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, url, str(password)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            line = await _said_until(program, "health.waiting" if trouble == "no-stream" else "bus.waiting")
        finally:
            program.kill()
            output, _ = await program.communicate()

    assert output == b""
    if trouble == "wrong-password":
        assert "error" in line.partition("bus.waiting")[0]
        assert "user=user" in line
        assert url in line
    elif trouble == "nobody-listens":
        assert "warning" in line
        assert "attempt=2" in line
        assert url in line
    else:
        assert "TOPOBUS_HEALTH" in line


async def test_short_example_ends_without_a_traceback_when_its_reader_has_enough(nats: AccountNats) -> None:
    """`| head` ends it at the next event, quietly and well."""
    async with nats.bus("gpu") as gpu, asyncio.timeout(LIMIT_S):
        await _publish(gpu, "gpu-0", 1)
        url = nats.server.url.replace("//", "//user:user@")
        read, write = os.pipe()
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(_EXAMPLE), url, stdout=write, stderr=asyncio.subprocess.PIPE
        )
        os.close(write)
        assert await asyncio.to_thread(os.read, read, 65536)
        os.close(read)
        await _publish(gpu, "gpu-0", 2)
        _, error = await program.communicate()

    assert (program.returncode, error) == (0, b"")


@pytest.mark.parametrize(
    ("example", "arguments", "said"),
    [
        ("health_short.py", (), b"usage: health_short.py nats://user:PASSWORD@HOST:4222\n"),
        (
            "health_short.py",
            ("nats://user:wrong@{server}",),
            b"health_short.py: {server}: nats: 'Authorization Violation'; " + _ASKS,
        ),
        (
            "health_short.py",
            ("nats://127.0.0.1:1",),
            b"health_short.py: 127.0.0.1:1: nats: no servers available for connection; " + _ASKS,
        ),
    ],
)
async def test_example_says_in_one_line_what_is_wrong_when_it_cannot_begin(
    nats: AccountNats, example: str, arguments: tuple[str, ...], said: bytes
) -> None:
    """Whoever tries it for the first time reads a sentence, and no traceback."""
    server = nats.server.url.removeprefix("nats://")
    program = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            str(_EXAMPLE.with_name(example)),
            *(argument.format(server=server) for argument in arguments),
        ),
        env={"NATS_URL": f"nats://cli:wrong@{server}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, error = await program.communicate()

    assert (program.returncode, output, error) == (1, b"", said.replace(b"{server}", server.encode()))


async def test_follow_gives_changes_alone_when_the_server_has_no_accounts(
    own_nats_server: NatsServer, own_bus: Bus
) -> None:
    """A server of the user's own serves the same program, with one word more."""
    await _publish(own_bus, "gpu-0", 1)
    async with (
        asyncio.timeout(LIMIT_S),
        aclosing(follow(own_nats_server.url, has_accounts=False, changes_only=True)) as events,
    ):
        heard = asyncio.ensure_future(anext(events))
        generation = 1
        while not heard.done():
            generation += 1
            await _publish(own_bus, "gpu-0", generation)
            await asyncio.wait([heard], timeout=0.05)

    assert heard.result().generation > 1
