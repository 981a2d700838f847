"""The console as a real process: who gets in, what a browser is told, and the live stream of a fleet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec import structs

from support.console_pages import ask, stream, until_entry
from support.running import NODE, Service, service
from topobus.console.config import ConsoleSettings
from topobus.console.followers import Followers
from topobus.contracts.catalogue import ALIGNMENT, HEALTH, INVENTORY
from topobus.contracts.messages import HealthEvent
from topobus.domain.device import Device, Inventory
from topobus.domain.health import HEALTHY, Condition, DeviceHealth, Dimension, HealthState
from topobus.domain.request import Owner, OwnerKind
from topobus.domain.view import NodeAlignment
from topobus.runtime.bus import Bus
from topobus.simulation.nats_server import NatsServer
from topobus.testing.clock import ManualClock

pytestmark = pytest.mark.integration

PASSWORD = "correct-horse-battery"
SICK = DeviceHealth(
    state=HealthState.UNHEALTHY,
    conditions=(Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus", message="gone"),),
)


def inventory(generation: int, health: DeviceHealth = HEALTHY) -> Inventory:
    """Two GPUs, of which the first may be sick."""
    devices = (Device(name="gpu-0", device_class="gpu", health=health), Device(name="gpu-1", device_class="gpu"))
    return Inventory(node=NODE, device_class="gpu", generation=generation, devices=devices)


@asynccontextmanager
async def console(server: NatsServer, **page: str) -> AsyncIterator[tuple[Service, int]]:
    """Run a console at a free port."""
    settings = {"TOPOBUS_CONSOLE__PAGE__PORT": "0", **{f"TOPOBUS_CONSOLE__PAGE__{key.upper()}": value for key, value in page.items()}}
    async with service("console", server.url, settings) as running:
        line = await running.logged("console.listening")
        yield running, urlsplit(line["url"]).port or 0


async def test_console_lets_in_who_knows_the_password_when_it_has_one(nats_server: NatsServer, tmp_path: Path) -> None:
    """Without a session the page leads to the login and the stream is refused; the right password gives a cookie that scripts and other sites cannot use."""
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
    """A request under a name that is not the console's is refused (DNS rebinding); every answer says that the page may load nothing from elsewhere."""
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
    """A page first gets all there is, then what changes; who comes back with the last id gets only what was missed."""
    pod = Owner(kind=OwnerKind.POD, name="trainer", uid="u-1")
    await bus.put(INVENTORY, inventory(1), node=NODE, device_class="gpu")
    async with console(nats_server) as (_, port):
        async with stream(port) as events:
            seen, kind, entries = await anext(events)
            assert kind == "snapshot"
            assert [(entry["topic"], entry["value"]["classes"][0]["free"]) for entry in entries] == [("nodes", 2)]
            event = HealthEvent(
                node=NODE, device_class="gpu", device="gpu-0", health=SICK, generation=1, pods=(pod,), time="2026-11-24T00:00:00Z"
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
    assert {entry["topic"] for entry in missed} == {"nodes", "sick", "health"}


async def test_stream_tells_no_first_event_of_a_device_that_is_well(bus: Bus) -> None:
    """A node that comes has one event for each of its devices, hundreds that say nothing; that one is well again is told."""
    followers = Followers(bus, ConsoleSettings(), ManualClock())
    following = asyncio.create_task(followers.run())
    await followers.is_settled.wait()
    events = [
        HealthEvent(node=NODE, device_class="gpu", device=device, health=health, previous=previous, generation=generation, time="t")
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


async def test_stream_tells_who_is_silent_when_topology_says_so_and_when_it_says_nothing_more(bus: Bus) -> None:
    """A device service that its topology hears no more is shown, its devices are Unknown; so is a topology that has stopped to talk, until it talks again."""
    clock = ManualClock()
    word = NodeAlignment(node=NODE, unheard_classes={"gpu": "2026-11-28T00:00:00.000000Z"}, is_said_every_s=30.0)
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
    """The number of open pages has a bound, and who is refused hears it; the pages that are open go on."""
    async with console(nats_server, streams="1") as (_, port), stream(port) as events:
        await anext(events)
        refused = await ask(port, "/api/stream")
        await bus.put(INVENTORY, inventory(1), node=NODE, device_class="gpu")
        row = await until_entry(events, "nodes", lambda value: True)

    assert refused[0] == 503
    assert row["node"] == NODE
