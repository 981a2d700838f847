"""The console as a real process: who gets in, what a browser is told, and the live stream of a
fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec import structs
from starlette.types import ASGIApp, Message

from support.console_pages import ask, stream, until_entry
from support.running import NODE, Service, service
from topobus.bus.bus import Bus
from topobus.console.config import ConsoleSettings, PageSettings
from topobus.console.followers import Followers
from topobus.console.web import console_app
from topobus.formats.messages.catalogue import ALIGNMENT, HEALTH, INVENTORY, REPAIR
from topobus.formats.messages.messages import HealthEvent, RepairState
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock
from topobus.values.device import Device, Inventory
from topobus.values.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.values.repair import Repair, RepairEnd, RepairRule
from topobus.values.request import Owner, OwnerKind
from topobus.values.view import NodeAlignment

pytestmark = pytest.mark.integration

PASSWORD = "correct-horse-battery"
SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(
        Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus", message="gone"),
    ),
)


def inventory(generation: int, health: DeviceHealth = HEALTHY) -> Inventory:
    """Two GPUs, of which the first may be sick."""
    devices = (Device(name="gpu-0", device_class="gpu", health=health), Device(name="gpu-1", device_class="gpu"))
    return Inventory(node=NODE, device_class="gpu", generation=generation, devices=devices)


@asynccontextmanager
async def console(server: NatsServer, **page: str) -> AsyncIterator[tuple[Service, int]]:
    """Run a console at a free port."""
    settings = {
        "TOPOBUS_CONSOLE__PAGE__PORT": "0",
        **{f"TOPOBUS_CONSOLE__PAGE__{key.upper()}": value for key, value in page.items()},
    }
    async with service("console", server.url, settings) as running:
        line = await running.logged("console.listening")
        yield running, urlsplit(line["url"]).port or 0


async def test_console_lets_in_who_knows_the_password_when_it_has_one(nats_server: NatsServer, tmp_path: Path) -> None:
    """Without a session the page leads to the login and the stream is refused.

    The right password gives a cookie that scripts and other sites cannot use.
    """
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n", encoding="utf-8")
    async with console(nats_server, password_file=str(file), attempts="2") as (_, port):
        origin = {"Origin": f"http://127.0.0.1:{port}"}
        first, refused = await ask(port, "/"), await ask(port, "/api/stream")
        wrong = await ask(port, "/login", method="POST", body="password=wrong", **origin)
        right = await ask(port, "/login", method="POST", body=f"password={PASSWORD}", **origin)
        foreign = await ask(port, "/login", method="POST", body=f"password={PASSWORD}", Origin="https://evil.example")
        await ask(port, "/login", method="POST", body="password=wrong", **origin)
        limited = await ask(port, "/login", method="POST", body=f"password={PASSWORD}", **origin)
        cookie = right[1]["set-cookie"]
        page = await ask(port, "/", Cookie=cookie.partition(";")[0])

    assert (first[0], first[1]["location"], refused[0]) == (303, "/login", 401)
    assert (wrong[1]["location"], "set-cookie" in wrong[1]) == ("/login#wrong", False)
    assert right[1]["location"] == "/"
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert (foreign[0], limited[0], int(limited[1]["retry-after"]) > 0) == (403, 429, True)
    assert page[0] == 200


async def test_console_refuses_other_names_and_foreign_content_when_it_answers(nats_server: NatsServer) -> None:
    """A request under a name that is not the console's is refused (DNS rebinding).

    Every answer says that the page may load nothing from elsewhere.
    """
    async with console(nats_server) as (_, port):
        rebound = await ask(port, "/", Host=f"evil.example:{port}")
        page = await ask(port, "/")
        missing = await ask(port, "/api/nodes/nobody")

    assert (rebound[0], page[0], missing[0]) == (421, 200, 404)
    for answer in (rebound, page, missing):
        assert answer[1]["content-security-policy"].startswith("default-src 'self'; frame-ancestors 'none'")
    assert "<script>" not in page[2]
    assert "style=" not in page[2]


async def test_stream_tells_a_fault_with_its_pods_when_a_device_gets_sick(nats_server: NatsServer, bus: Bus) -> None:
    """A page first gets all there is, then what changes.

    Who comes back with the last id gets only what was missed.
    """
    pod = Owner(kind=OwnerKind.POD, name="trainer", uid="u-1")
    await bus.put(INVENTORY, inventory(1), node=NODE, device_class="gpu")
    async with console(nats_server) as (_, port):
        async with stream(port) as events:
            seen, kind, entries = await anext(events)
            assert kind == "snapshot"
            shown = {entry["topic"]: entry["value"] for entry in entries}
            assert shown.keys() == {"nodes", "free"}
            assert (shown["nodes"]["classes"][0]["free"], shown["free"]["free"]) == (2, 2)
            event = HealthEvent(
                node=NODE,
                device_class="gpu",
                device="gpu-0",
                health=SICK,
                generation=1,
                pods=(pod,),
                time="2026-11-24T00:00:00Z",
            )
            await bus.publish(HEALTH, event, event_id="e-1", node=NODE, device_class="gpu", device="gpu-0")
            await bus.put(INVENTORY, inventory(2, SICK), node=NODE, device_class="gpu")
            sick = await until_entry(events, "sick", lambda value: value["users"] == ["pod default/trainer"])
        async with stream(port, Last_Event_ID=seen) as events:
            _, kind, missed = await anext(events)
        async with stream(port, Last_Event_ID="another-1") as events:
            _, strange, _ = await anext(events)

    assert (sick["reason"], sick["state"], sick["device"]) == ("fell-off-bus", "unhealthy", "gpu-0")
    assert (kind, strange) == ("changes", "snapshot")
    assert {entry["topic"] for entry in missed} == {"nodes", "free", "sick", "health"}


async def test_stream_tells_no_first_event_of_a_device_that_is_well(bus: Bus) -> None:
    """A node that comes has one event for each of its devices, hundreds that say nothing.

    That one is well again is told.
    """
    followers = Followers(bus, ConsoleSettings(), ManualClock())
    following = asyncio.create_task(followers.run())
    await followers.is_settled.wait()
    events = [
        HealthEvent(
            node=NODE,
            device_class="gpu",
            device=device,
            health=health,
            previous=previous,
            generation=generation,
            time="t",
        )
        for device, health, previous, generation in (
            ("gpu-0", HEALTHY, None, 1),
            ("gpu-1", SICK, None, 1),
            ("gpu-1", HEALTHY, HealthState.UNHEALTHY, 2),
        )
    ]

    for number, event in enumerate(events):
        await bus.publish(HEALTH, event, event_id=f"e-{number}", node=NODE, device_class="gpu", device=event.device)
    await _shown(followers, lambda: len(followers.board.keys("health")) == 2)
    following.cancel()

    views = [json.loads(followers.board.get("health", key) or b"") for key in followers.board.keys("health")]
    assert [(view["device"], view["previous"], view["state"]) for view in views] == [
        ("gpu-1", "", "unhealthy"),
        ("gpu-1", "unhealthy", "healthy"),
    ]


async def test_stream_shows_repairs_and_devices_that_were_left_to_a_person(bus: Bus) -> None:
    """One entry for each device, and none when the document has it no more."""
    rule = RepairRule(name="bus", device_class="gpu", steps=("maintain", "wait-healthy"))
    repair = Repair(
        id="r-1",
        node=NODE,
        device_class="gpu",
        device="gpu-0",
        rule=rule,
        codes=("fell-off-bus",),
        began_s=0.0,
        step_s=0.0,
    )
    left = structs.replace(repair, id="r-0", device="gpu-1", end=RepairEnd.GAVE_UP, why="still sick")
    over = structs.replace(repair, id="r-2", device="gpu-2", end=RepairEnd.REPAIRED)
    followers = Followers(bus, ConsoleSettings(), ManualClock())
    following = asyncio.create_task(followers.run())
    await bus.put(REPAIR, RepairState(repairs=(repair, left, over)), fleet="_")
    await _shown(followers, lambda: len(followers.board.keys("repairs")) == 2)
    views = [json.loads(followers.board.get("repairs", f"{NODE}/gpu/{name}") or b"") for name in ("gpu-0", "gpu-1")]
    await bus.put(REPAIR, RepairState(repairs=(left,)), fleet="_")
    await _shown(followers, lambda: len(followers.board.keys("repairs")) == 1)
    following.cancel()

    assert [(view["now"], view["is_left"], view["why"]) for view in views] == [
        ("maintain", False, "step 1 of 2, try 1 of 1"),
        ("gave-up", True, "still sick"),
    ]


async def test_stream_tells_who_is_silent_when_topology_says_so_and_when_it_says_nothing_more(bus: Bus) -> None:
    """A device service that its topology hears no more is shown, its devices are Unknown.

    So is a topology that has stopped to talk, until it talks again.
    """
    clock = ManualClock()
    word = NodeAlignment(node=NODE, unheard_classes={"gpu": "2026-11-28T00:00:00.000000Z"})
    await bus.put(INVENTORY, inventory(1), node=NODE, device_class="gpu")
    await bus.put(ALIGNMENT, word, node=NODE)
    followers = Followers(bus, ConsoleSettings(), clock)
    following = asyncio.create_task(followers.run())
    await followers.is_settled.wait()
    by_class = {key: followers.board.get("silent", key) for key in followers.board.keys("silent")}
    row = json.loads(followers.board.get("nodes", NODE) or b"")

    await clock.asleep(5.0)
    clock.advance(101.0)
    await _shown(followers, lambda: f"{NODE}/topology" in followers.board.keys("silent"))
    await bus.put(ALIGNMENT, structs.replace(word, unheard_classes={}), node=NODE)
    await _shown(followers, lambda: not followers.board.keys("silent"))
    following.cancel()
    well = json.loads(followers.board.get("nodes", NODE) or b"")

    assert list(by_class) == [f"{NODE}/gpu"]
    assert (row["silent"], row["classes"][0]["free"], row["classes"][0]["sick"]) == (["gpu"], 0, 2)
    assert (well["silent"], well["classes"][0]["free"]) == ([], 2)


async def _shown(followers: Followers, is_shown: Callable[[], bool]) -> None:
    """Wait until the board is as wanted."""
    async with asyncio.timeout(60):
        while not is_shown():
            await followers.wait_newer(followers.board.version)


async def test_stream_refuses_one_page_more_when_all_are_taken(nats_server: NatsServer, bus: Bus) -> None:
    """The number of open pages has a bound, and who is refused hears it.

    The pages that are open go on.
    """
    async with console(nats_server, streams="1") as (_, port), stream(port) as events:
        await anext(events)
        refused = await ask(port, "/api/stream")
        await bus.put(INVENTORY, inventory(1), node=NODE, device_class="gpu")
        row = await until_entry(events, "nodes", lambda value: True)

    assert refused[0] == 503
    assert row["node"] == NODE


async def test_page_answers_when_one_address_holds_all_it_can(nats_server: NatsServer) -> None:
    """Who only holds connections open, without a whole request, loses the oldest of them to the
    next one.

    A browser of the same address gets in.
    """
    async with console(nats_server, streams="1") as (_, port):
        held = []
        for _ in range(80):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
            held.append((reader, writer))
        page = await ask(port, "/")
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                assert await held[0][0].read() == b""
        for _, writer in held:
            writer.close()

    assert page[0] == 200


async def test_stream_gives_its_place_to_another_page_when_it_had_it_for_a_while(bus: Bus) -> None:
    """Of the address with the most pages the oldest ends, so that nobody keeps everybody out by
    idle ones.

    A page just opened is not pushed out.
    """
    clock = ManualClock()
    followers = Followers(bus, ConsoleSettings(), clock)
    following = asyncio.create_task(followers.run())
    await followers.is_settled.wait()
    app = console_app(followers, PageSettings(streams=1))
    first, early, late = (_Browser(app) for _ in range(3))

    async with asyncio.timeout(60):
        await first.until_answered()
        await early.until_answered()
        clock.advance(10.0)
        await late.until_answered()
        await first.task
    following.cancel()
    late.task.cancel()

    assert (first.status, early.status, late.status) == (200, 503, 200)


class _Browser:
    """Asks an application for the stream, and never leaves by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.status = 0
        self._is_answered = asyncio.Event()
        self._app = app

    async def until_answered(self) -> None:
        """Ask, and wait for the answer's head."""
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/stream",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "query_string": b"",
        }
        self.task = asyncio.create_task(self._app(scope, self._receive, self._send))
        await self._is_answered.wait()

    async def _receive(self) -> Message:
        await asyncio.Event().wait()
        return {}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_answered.set()


@asynccontextmanager
async def _command(server: NatsServer, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `topobus console`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "topobus.cli.main", "console", "--port", str(port), "--nats", server.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(120):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_command_leaves_nothing_behind_when_a_signal_ends_it(
    nats_server: NatsServer, number: signal.Signals
) -> None:
    """The address is printed when the page is there; who has it is let in, and nobody else.

    After the signal nobody answers there any more.
    """
    async with _command(nats_server, 0) as process:
        assert process.stdout is not None
        url = urlsplit((await process.stdout.readline()).decode().split()[1])
        port = url.port or 0
        stranger = await ask(port, "/api/nodes/n1")
        guessed = await ask(port, "/open?token=guess")
        opened = await ask(port, f"{url.path}?{url.query}")
        friend = await ask(port, "/api/nodes/n1", Cookie=opened[1]["set-cookie"].partition(";")[0])
        process.send_signal(number)
        await process.wait()
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", port)

    assert (stranger[0], guessed[0], opened[0], friend[0]) == (401, 403, 303, 404)


async def test_command_promises_no_page_when_the_port_is_taken(nats_server: NatsServer) -> None:
    """A port of somebody else is said as such, and no address is printed that leads there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with _command(nats_server, taken.getsockname()[1]) as process:
            output, _ = await process.communicate()

    assert (process.returncode, output) == (78, b"")


async def test_node_is_a_bad_request_when_its_name_is_none(nats_server: NatsServer) -> None:
    """A name that no node can have is the asker's mistake, not the bus's."""
    async with console(nats_server) as (_, port):
        answer = await ask(port, "/api/nodes/a%20b")

    assert answer[0] == 400
