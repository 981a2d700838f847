"""The parts of the chaos harness by themselves: schedules that can be replayed, a proxy that keeps
messages whole, an observer that sees what is wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import structs

from lab.chaos.command import main
from lab.chaos.faults import CLOCK_FAULTS, HUB_FAULTS, NODE_FAULTS, Fault, Planned, plan_faults, possible_faults
from lab.chaos.hub_side import compare_events
from lab.chaos.nats_proxy import NatsProxy, Trouble
from lab.chaos.observer import Grant, NodeObserver, cdi_devices
from lab.chaos.pod_lives import draw_lives
from lab.chaos.wall_clocks import WallClocks, find_libfaketime
from lab.chaos.workload import operations
from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from topobus.bus.bus import Bus
from topobus.bus.streams.provision import bucket_subject
from topobus.formats.messages.catalogue import LEDGER
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

NODE = "demo-node"
LIMIT_S = 60.0


def test_schedule_is_the_same_when_the_seed_is() -> None:
    """Operations, lives and faults come from the seed alone; another seed gives others."""

    def drawn(seed: int) -> tuple[object, ...]:
        return (
            tuple(islice(operations(seed, 3), 200)),
            tuple(islice(draw_lives(seed, 3), 50)),
            plan_faults(f"{seed}/0", 40, NODE_FAULTS + HUB_FAULTS, ("gpu", "topology"), most_s=5.0),
        )

    assert drawn(7) == drawn(7)
    assert all(first != second for first, second in zip(drawn(7), drawn(8), strict=True))


# What a proxy makes of it: a write with its confirmation, a message with line ends in
# it, and lines without a payload.
WRITE = b"PUB " + bucket_subject(LEDGER, NODE).encode() + b" _INBOX.a.1 5\r\nhello\r\n"
TEXT = b"HPUB some.subject 12 16\r\nNATS/1.0\r\n\r\nPING\r\n"
PLAIN = b"PING\r\n"
END = b"SUB end 9\r\n"
CONFIRMATION = b"MSG _INBOX.a.1 1 2\r\n{}\r\n"
NEWS = b"MSG some.news 1 4\r\nnews\r\n"


@pytest.mark.parametrize(
    ("trouble", "up", "down"),
    [
        pytest.param(Trouble(), WRITE + TEXT + PLAIN + END, CONFIRMATION + NEWS + PLAIN, id="none"),
        pytest.param(Trouble(lose=1.0), PLAIN + END, PLAIN, id="lose"),
        pytest.param(
            Trouble(double=1.0), WRITE * 2 + TEXT * 2 + PLAIN + END, CONFIRMATION * 2 + NEWS * 2 + PLAIN, id="double"
        ),
        pytest.param(Trouble(swallow=1.0), WRITE + TEXT + PLAIN + END, NEWS + PLAIN, id="swallow"),
    ],
)
async def test_proxy_does_to_messages_what_its_trouble_says_and_keeps_them_whole(
    trouble: Trouble, up: bytes, down: bytes
) -> None:
    """Whole messages are lost, doubled or not confirmed, in both directions.

    Lines without a payload always pass.
    """
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(END))
        writer.write(CONFIRMATION + NEWS + PLAIN)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(LIMIT_S), server, NatsProxy(server.sockets[0].getsockname()[1], seed=1) as proxy:
        proxy.trouble = trouble
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(WRITE + TEXT + PLAIN + END)
        got = await reader.readuntil(PLAIN)
        writer.close()

    assert heard == [up]
    assert got == down


async def test_proxy_ends_its_connections_when_they_are_cut() -> None:
    """A cut ends what is open, and who connects again is served."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readuntil(END))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(LIMIT_S), server, NatsProxy(server.sockets[0].getsockname()[1], seed=1) as proxy:
        first, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(END)
        await first.readuntil(END)
        proxy.cut()
        try:
            left = await first.read()
        except ConnectionResetError:
            left = b""
        second, again = await asyncio.open_connection("127.0.0.1", proxy.port)
        again.write(END)
        echoed = await second.readuntil(END)
        writer.close()
        again.close()

    assert left == b""
    assert echoed == END


@pytest_asyncio.fixture
async def bus() -> AsyncIterator[Bus]:
    """A bus in memory with an empty ledger."""
    async with MemoryBus.session(MemoryNats(), name="topology") as made:
        await made.provision()
        await made.put(LEDGER, Ledger(node=NODE), node=NODE)
        yield made


def grant(name: str, *devices: str) -> Grant:
    """What a placed pod was told."""
    return Grant(name, OwnerKind.POD, f"pod/default/{name}/{name}", frozenset(devices))


def ledger(sequence: int, **held: str) -> Ledger:
    """A ledger in which each of these pods holds one GPU."""
    owners = {name: Owner(kind=OwnerKind.POD, name=name, uid=name) for name in held}
    allocations = {
        owners[name].key: Allocation(owner=owners[name], holdings=(Holding(devices={"gpu": (device,)}),))
        for name, device in held.items()
    }
    return Ledger(node=NODE, sequence=sequence, allocations=allocations)


async def test_observer_says_so_when_two_askers_were_told_that_they_have_a_device(bus: Bus, tmp_path: Path) -> None:
    """The second one is a violation while the first one has not begun to give it back, and none
    after.
    """
    await bus.put(LEDGER, ledger(1, a="gpu-0", b="gpu-0"), node=NODE)
    observer = NodeObserver(bus, NODE, tmp_path)
    first = grant("a", "gpu-0")
    await observer.grant(first)
    await observer.grant(grant("b", "gpu-0"))
    first_said = list(observer.violations)
    observer = NodeObserver(bus, NODE, tmp_path)
    await observer.grant(first)
    observer.give_back(first)
    await observer.grant(grant("b", "gpu-0"))

    assert first_said == ["b was given gpu-0, which a has"]
    assert observer.violations == []


async def test_observer_says_so_when_the_ledger_does_not_have_what_was_acknowledged(bus: Bus, tmp_path: Path) -> None:
    """A later revision without the device is a violation.

    An older one is not, for it is what a store shows that was put back.
    """
    await bus.put(LEDGER, ledger(7, a="gpu-0"), node=NODE)
    observer = NodeObserver(bus, NODE, tmp_path)
    await observer.grant(grant("a", "gpu-0"))
    before = await observer.store_is_put_back()
    await bus.put(LEDGER, ledger(3), node=NODE)
    await observer.grant(grant("b", "gpu-1"))
    kept = list(observer.violations)
    await bus.put(LEDGER, ledger(8, b="gpu-1"), node=NODE)
    await observer.until_written_back(before, LIMIT_S)

    assert before == (1, 7)
    assert kept == []
    assert observer.violations == ["a was granted gpu-0 at epoch 1, sequence 7: gone at epoch 1, sequence 8"]


async def test_observer_forgives_a_placed_pod_alone_when_topology_began_from_an_older_ledger(
    bus: Bus, tmp_path: Path
) -> None:
    """Nobody but the ledger knew of a placed pod; a claim that is prepared must come back."""
    claim = Owner(kind=OwnerKind.CLAIM, name="c", uid="c")
    prepared = Allocation(owner=claim, holdings=(Holding(devices={"gpu": ("gpu-1",)}),))
    newest = ledger(7, a="gpu-0")
    await bus.put(LEDGER, structs.replace(newest, allocations={**newest.allocations, claim.key: prepared}), node=NODE)
    observer = NodeObserver(bus, NODE, tmp_path)
    await observer.grant(grant("a", "gpu-0"))
    await observer.grant(Grant("c", OwnerKind.CLAIM, claim.key, frozenset({"gpu-1"})))
    observer.ledger_is_lost()
    await bus.put(LEDGER, ledger(3), node=NODE)
    lost = await observer.until_recovered(0.01)
    first_said = list(observer.violations)
    await bus.put(LEDGER, structs.replace(ledger(4), allocations={claim.key: prepared}), node=NODE)

    assert lost == 1
    assert first_said == ["0.01 s after topology began from an older ledger, it does not have c: gpu-1"]
    assert {each.name for each in observer.grants} == {"c"}
    assert await observer.until_recovered(LIMIT_S) == 0


async def test_observer_takes_no_owner_for_gone_when_the_store_shows_an_earlier_time(bus: Bus, tmp_path: Path) -> None:
    """A ledger without an owner says nothing while the store was put back: what is written back may
    have it, and only then is it known.
    """
    await bus.put(LEDGER, ledger(7, a="gpu-0"), node=NODE)
    observer = NodeObserver(bus, NODE, tmp_path)
    key = grant("a", "gpu-0").key
    seen = [await observer.is_gone(key)]
    before = await observer.store_is_put_back()
    await bus.put(LEDGER, ledger(3), node=NODE)
    seen.append(await observer.is_gone(key))
    await bus.put(LEDGER, ledger(8, a="gpu-0"), node=NODE)
    await observer.until_written_back(before, LIMIT_S)
    seen.append(await observer.is_gone(key))
    await bus.put(LEDGER, ledger(9), node=NODE)

    assert seen == [False, False, False]
    assert await observer.is_gone(key)


def test_cdi_files_say_which_devices_they_hand_out(tmp_path: Path) -> None:
    """Devices of a claim by the variables of its files, of all classes.

    A file that is cut off is none.
    """
    edits = {"env": ["TOPOBUS_GPU_DEVICES=gpu-0,gpu-1", "TOPOBUS_NIC_RDMA_DEVICES=mlx5_0"]}
    spec = {"cdiVersion": "0.5.0", "devices": [{"name": "a", "containerEdits": edits}]}
    (tmp_path / "topobus.dev-gpu_uid-1.json").write_text(json.dumps(spec))
    (tmp_path / "topobus.dev-nic_uid-1.json").write_text(
        json.dumps({"containerEdits": {"env": ["TOPOBUS_NIC_DEVICES=nic-0"]}})
    )
    (tmp_path / "topobus.dev-gpu_uid-2.json").write_text("{")

    assert cdi_devices(tmp_path) == {"uid-1": frozenset({"gpu-0", "gpu-1", "nic-0"})}


@pytest.mark.parametrize(
    ("copied", "may_repeat", "problem"),
    [
        pytest.param(["a", "b", "c"], False, "", id="equal"),
        pytest.param(["a", "of-the-hub", "b", "c"], False, "", id="the hub has more"),
        pytest.param(["a", "c"], True, "does not have 1 of 3", id="missing"),
        pytest.param(["a", "b", "b", "c"], False, "more than once, first b", id="twice"),
        pytest.param(["a", "b", "b", "c"], True, "", id="twice after a store was put back"),
        pytest.param(["b", "a", "c"], False, "another order", id="order"),
    ],
)
def test_hub_is_compared_with_the_node_by_the_ids_of_events(copied: list[str], may_repeat: bool, problem: str) -> None:
    """An event that is missing, twice or in another order at the hub is said.

    A repetition after a store was put back is not.
    """
    said = compare_events("health", ["a", "b", "c"], copied, may_repeat=may_repeat)

    assert problem in "; ".join(said)
    assert bool(said) == bool(problem)


def test_clock_is_moved_for_askers_and_for_processes_when_it_is_stepped_or_skewed(tmp_path: Path) -> None:
    """A step counts for all, also for processes that start later.

    A skew for one process, until it is over.
    """
    clocks = WallClocks(tmp_path, tmp_path / "library")
    files = {name: Path(clocks.environment(name)["FAKETIME_TIMESTAMP_FILE"]) for name in ("gpu", "topology")}

    clocks.step(7200.0)
    clocks.skew("gpu", -3600.0)
    skewed = {name: file.read_text("utf-8").strip() for name, file in files.items()}
    clocks.skew("gpu", 0.0)
    late = Path(clocks.environment("late")["FAKETIME_TIMESTAMP_FILE"])

    assert skewed == {"gpu": "+3600.000", "topology": "+7200.000"}
    assert {file.read_text("utf-8").strip() for file in (*files.values(), late)} == {"+7200.000"}
    assert abs((clocks.machine.now() - datetime.now(UTC)).total_seconds() - 7200) < 1800


@pytest.mark.skipif(find_libfaketime() is None, reason="libfaketime is not installed")
async def test_process_sees_its_wall_clock_move_and_its_monotonic_clock_stay(tmp_path: Path) -> None:
    """A running process has the moved time at its next look, and waits no
    longer or shorter for it.
    """
    clocks = WallClocks(tmp_path, find_libfaketime())
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        env={**os.environ, **clocks.environment("a")},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    seen: list[tuple[float, float]] = []
    async with asyncio.timeout(LIMIT_S):
        for by_s in (0.0, 5 * 3600.0, -9 * 3600.0):
            clocks.step(by_s)
            process.stdin.write(b"\n")
            wall, monotonic = (await process.stdout.readline()).split()
            seen.append((float(wall), float(monotonic)))
        process.stdin.close()
        await process.wait()

    hours = [round((after[0] - before[0]) / 3600) for before, after in itertools.pairwise(seen)]
    assert hours == [5, -9]
    assert all(0 <= after[1] - before[1] < LIMIT_S for before, after in itertools.pairwise(seen))


def test_clock_is_moved_by_hours_both_ways_when_faults_are_drawn() -> None:
    """The schedule sets clocks forward and back, by minutes to hours,
    the same for the same fault.
    """
    moves = [Planned(at=0.0, fault=Fault.STEP_CLOCK, lasts_s=0.2 + step / 10).moves_s for step in range(50)]

    assert min(moves) < -3600
    assert max(moves) > 3600
    assert moves == [Planned(at=0.0, fault=Fault.STEP_CLOCK, lasts_s=0.2 + step / 10).moves_s for step in range(50)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--only", "twin"], "invalid choice", id="of-a-ledger-alone"),
        pytest.param(["--only", "cut-link"], "needs a node with a server of its own", id="of-a-hub"),
        pytest.param(["--only", "kill", "step-clock"], "needs libfaketime", id="of-clocks"),
    ],
)
def test_command_refuses_faults_that_cannot_happen_here(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, and with what it would need."""
    monkeypatch.setattr("lab.chaos.command.find_libfaketime", lambda: None)

    with pytest.raises(SystemExit, match="2"):
        main(words)

    assert said in capsys.readouterr().err


def test_faults_move_no_clock_when_that_of_the_services_cannot_be_moved() -> None:
    """The asker's clock alone would make its requests hours old: topology is right to refuse those,
    and the run must not call that a violation.
    """
    without, everything = (
        possible_faults(has_hub=True, can_move_clocks=False),
        possible_faults(has_hub=True, can_move_clocks=True),
    )

    assert {*everything} - {*without} == {*CLOCK_FAULTS}
    assert {*everything} == {*NODE_FAULTS, *HUB_FAULTS}


def test_clocks_of_askers_stay_when_no_other_can_be_moved(tmp_path: Path) -> None:
    """Who asks has the time of those who answer."""
    clocks = WallClocks(tmp_path, None)

    clocks.step(3600.0)

    assert clocks.machine.ahead_s == 0.0
