"""`topobus top` on a pseudo terminal: what it shows as things happen, and the terminal as it was
before, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from msgspec import structs

from support.terminals import TerminalSession
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import DECISION, HEALTH, INVENTORY, LEDGER, MACHINE
from topobus.formats.messages.messages import DecisionEvent, HealthEvent
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Machine
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_TOP = (sys.executable, "-m", "topobus.cli.main", "top")
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_TRAINER = Owner(kind=OwnerKind.POD, name="trainer", uid="1")


async def _put_nodes(bus: Bus, recorded: tuple[Machine, list[Inventory]], *nodes: str) -> list[Inventory]:
    machine, inventories = recorded
    for node in nodes:
        await bus.put(MACHINE, structs.replace(machine, node=node), node=node)
        for inventory in inventories:
            await bus.put(
                INVENTORY, structs.replace(inventory, node=node), node=node, device_class=inventory.device_class
            )
    return inventories


@pytest_asyncio.fixture
async def machines(bus: Bus, recorded: tuple[Machine, list[Inventory]]) -> list[Inventory]:
    """Two nodes on the bus, as recorded."""
    return await _put_nodes(bus, recorded, "demo-node", "other-node")


@asynccontextmanager
async def _top(
    server: NatsServer, *arguments: str, columns: int = 80, lines: int = 24, **more: str
) -> AsyncIterator[TerminalSession]:
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "TOPOBUS_ALL__NATS__URL": server.url,
        "PYTHONIOENCODING": "utf-8",
    } | more
    session = TerminalSession((*_TOP, *arguments), environment, columns=columns, lines=lines)
    try:
        yield session
    finally:
        session.close()


def _says(*texts: str) -> Callable[[list[str]], bool]:
    return lambda screen: all(any(text in line for line in screen) for text in texts)


async def test_top_shows_what_happens_when_it_happens(
    nats_server: NatsServer, bus: Bus, machines: list[Inventory]
) -> None:
    """A new holder, a refusal, a sick device, another node and another size are on the screen
    without a key or a command.
    """
    gpus = next(inventory for inventory in machines if inventory.device_class == "gpu")
    name = gpus.devices[0].name
    condition = Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus")
    sick = DeviceHealth(state=HealthState.UNHEALTHY, conditions=(condition,))
    async with _top(nats_server, "--node", "demo-node", columns=100, lines=40) as session:
        first = await session.until(_says("topobus top  demo-node", name, "q quit", "1 of 2"))

        holding = Holding(container="main", devices={"gpu": (name,)})
        allocations = {_TRAINER.key: Allocation(owner=_TRAINER, holdings=(holding,))}
        await bus.put(LEDGER, Ledger(node="demo-node", allocations=allocations), node="demo-node")
        await session.until(_says("1 holder", f"T?{name}"))
        refusal = Refusal(reasons=(Reason(code="too-few", message="too few"),))
        decision = DecisionEvent(
            id="d-1",
            verb="place",
            node="demo-node",
            op_id="o",
            time="2026-11-24T00:00:00Z",
            owner=_TRAINER,
            outcome=refusal,
            ledger_sequence=1,
        )
        await bus.publish(DECISION, decision, event_id="d-1", node="demo-node")
        await session.until(_says("place pod default/trainer: refused: too-few"))
        event = HealthEvent(
            node="demo-node",
            device_class="gpu",
            device=name,
            health=sick,
            previous=HealthState.HEALTHY,
            generation=2,
            time="2026-11-24T00:00:01Z",
        )
        await bus.publish(HEALTH, event, event_id="h-1", node="demo-node", device_class="gpu", device=name)
        await session.until(_says(f"demo-node/{name}  healthy -> unhealthy  fell-off-bus"))
        session.press(b"\x1b[C")
        await session.until(_says("topobus top  other-node", "0 holders"))
        session.resize(60, 12)
        small = await session.until(lambda screen: len(screen) == 12 and "q quit" in screen[-1])
        session.press(b"q")
        code = await session.end()

    assert [len(line) for line in first if "socket 0" in line] == [100]
    assert max(map(len, small)) <= 60
    assert code == 0


async def test_top_shows_a_fleet_whose_sick_node_is_opened_and_left(
    nats_server: NatsServer, bus: Bus, machines: list[Inventory]
) -> None:
    """The node that falls ill stands first, Enter draws it, Esc goes back to the table, and a
    filter leaves what it finds.
    """
    gpus = next(inventory for inventory in machines if inventory.device_class == "gpu")
    condition = Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus")
    sick = structs.replace(gpus.devices[0], health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(condition,)))
    after = structs.replace(gpus, node="other-node", generation=9, devices=(sick, *gpus.devices[1:]))
    async with _top(nats_server) as session:
        first = await session.until(_says("topobus top  2 nodes, all well", "> demo-node", "not well first"))

        await bus.put(INVENTORY, after, node="other-node", device_class="gpu")
        ill = await session.until(_says("2 nodes, 1 not well", f"{sick.name} fell-off-bus"))
        session.press(b"\r")
        await session.until(_says("topobus top  other-node (1 of 2)", f"!{sick.name}", "Esc all nodes"))
        session.press(b"\x1b")
        back = await session.until(_says("2 nodes, 1 not well", "> other-node"))
        session.press(b"/gpu:sick")
        filtered = await session.until(_says("/gpu:sick_  1 of 2 nodes"))
        session.press(b"\r?")
        await session.until(_says("Filters", "Esc close"))
        session.press(b"\x1b")
        await session.until(_says("/gpu:sick  1 of 2 nodes; Esc: all"))
        session.resize(60, 12)
        small = await session.until(lambda screen: len(screen) == 12 and "q quit" in screen[-1])
        session.press(b"q")
        code = await session.end()

    assert [line.split()[0] for line in first if "other-node" in line] == ["other-node"]
    rows = [[line.split()[-3:] for line in screen if "-node" in line] for screen in (ill, back)]
    assert [len(of_screen) for of_screen in rows] == [2, 2]
    assert next(line for line in ill if "-node" in line).startswith("> other-node")
    assert [line for line in filtered if line.startswith("  demo-node")] == []
    assert max(map(len, small)) <= 60
    assert code == 0


async def test_top_draws_the_node_at_once_when_there_is_one(
    nats_server: NatsServer, bus: Bus, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """No table of one row; when a second node comes, Esc shows both."""
    await _put_nodes(bus, recorded, "demo-node")
    async with _top(nats_server) as session:
        alone = await session.until(_says("topobus top  demo-node  ", "socket 0"))

        await _put_nodes(bus, recorded, "other-node")
        await session.until(_says("demo-node (1 of 2)", "Esc all nodes"))
        session.press(b"\x1b")
        await session.until(_says("2 nodes, all well"))
        session.press(b"\x04")
        code = await session.end()

    assert "Esc" not in alone[-1]
    assert code == 0


async def test_top_is_in_ascii_when_the_terminal_has_nothing_else(
    nats_server: NatsServer, machines: list[Inventory]
) -> None:
    """Table and drawing use signs that every terminal has, and no line is wider than it."""
    async with _top(nats_server, columns=60, PYTHONIOENCODING="ascii") as session:
        table = await session.until(_says("2 nodes, all well", "q quit"))
        session.press(b"j\r")
        drawing = await session.until(_says("topobus top  other-node", "root complex"))
        session.press(b"q")
        await session.end()

    assert "".join((*table, *drawing)).isascii()
    assert max(map(len, (*table, *drawing))) <= 60
    assert len({line.rindex("|") for line in drawing if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    "ending", [b"q", b"\x04", signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=str
)
async def test_top_gives_the_terminal_back_however_it_ends(
    nats_server: NatsServer, machines: list[Inventory], ending: bytes | signal.Signals
) -> None:
    """A key or a signal: exit code 0, modes as before, the cursor and the user's screen back, and
    nothing written after that.
    """
    async with _top(nats_server) as session:
        await session.until(_says("q quit"))
        during = session.modes()

        if isinstance(ending, bytes):
            session.press(ending)
        else:
            session.process.send_signal(ending)
        code = await session.end()

        assert during != session.modes_before
        assert session.modes() == session.modes_before
    assert code == 0
    assert session.written.endswith(_LEAVE)


async def test_top_ends_quietly_when_its_terminal_is_closed(nats_server: NatsServer, machines: list[Inventory]) -> None:
    """The end, and no failure: nothing on stderr, no file about a defect, exit code 0."""
    async with _top(nats_server) as session:
        await session.until(_says("q quit"))

        session.hang_up()
        code = await asyncio.to_thread(session.process.wait, 60)
        assert session.process.stderr is not None
        errors = await asyncio.to_thread(session.process.stderr.read)

    assert errors == b""
    assert code == 0


async def test_top_gives_the_terminal_to_the_shell_while_it_is_stopped(
    nats_server: NatsServer, machines: list[Inventory]
) -> None:
    """Ctrl-Z: the terminal is as it was while the program is stopped.

    After `fg` it is drawn anew.
    """
    async with _top(nats_server, "--node", "demo-node") as session:
        await session.until(_says("q quit"))

        session.process.send_signal(signal.SIGTSTP)
        _, status = await asyncio.to_thread(os.waitpid, session.process.pid, os.WUNTRACED)
        stopped = session.modes()
        await session.until_written(_LEAVE)
        session.written = session.written.replace(_LEAVE, "")
        session.process.send_signal(signal.SIGCONT)
        await session.until(_says("topobus top  demo-node", "q quit"))
        session.press(b"q")
        await session.end()

    assert os.WIFSTOPPED(status)
    assert stopped == session.modes_before


def test_top_prints_once_when_there_is_no_terminal(nats_server: NatsServer, machines: list[Inventory]) -> None:
    """The whole drawing and the events on stdout, why on stderr, and the end."""
    done = subprocess.run(
        [*_TOP, "--node", "other-node", "--nats", nats_server.url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0
    assert "topobus top  other-node" in done.stdout
    assert "\x1b" not in done.stdout
    assert "stdout is no terminal: printed once" in done.stderr


def test_top_prints_the_table_once_when_there_are_several_nodes(
    nats_server: NatsServer, machines: list[Inventory]
) -> None:
    """Every node has a row, as text and as JSON."""
    done, as_json = (
        subprocess.run(
            [*_TOP, *options, "--nats", nats_server.url],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for options in ((), ("--json",))
    )

    assert (done.returncode, as_json.returncode) == (0, 0)
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["demo-node", "other-node"]
    document = json.loads(as_json.stdout)
    assert [(row["node"], row["state"]) for row in document["nodes"]] == [("demo-node", "well"), ("other-node", "well")]
    assert document["nodes"][0]["classes"]["gpu"]["used"] == 0
