"""The bus on a cluster of three servers with three copies of everything: no write twice, no event
lost, when a server dies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from integration.values import health, inventory
from lab.servers.nats_cluster import NatsCluster
from topobus.bus.bus import AmbiguousWrite, Bus, ChangeKind, Start, Written
from topobus.bus.streams.jetstream import JetStream
from topobus.formats.messages.catalogue import HEALTH, INVENTORY
from topobus.process.config import NatsSettings
from topobus.values.errors import PeerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_KEY = {"node": "n1", "device_class": "gpu"}
_LIMIT_S = 120.0


@pytest_asyncio.fixture
async def cluster(nats_binary: Path) -> AsyncIterator[NatsCluster]:
    """Three servers.

    Skipped where the server's replicated compare-and-set is broken
    (2.9), which provisioning refuses.
    """
    process = await asyncio.create_subprocess_exec(nats_binary, "--version", stdout=asyncio.subprocess.PIPE)
    printed = (await process.communicate())[0].decode()
    match = re.search(r"v(\d+)\.(\d+)", printed)
    assert match is not None, printed
    if (int(match[1]), int(match[2])) < (2, 10):
        pytest.skip(
            f"{printed.strip()} has no exclusive compare-and-set on replicas; `make versions` runs this on newer ones"
        )
    async with NatsCluster(binary=nats_binary) as made:
        yield made


@pytest_asyncio.fixture
async def replicated(cluster: NatsCluster) -> AsyncIterator[Bus]:
    """A bus whose streams and buckets have three copies."""
    async with Bus.session(_settings(cluster), name="topobus-cli") as bus:
        await asyncio.wait_for(bus.provision(), _LIMIT_S)
        yield bus


def _settings(cluster: NatsCluster) -> NatsSettings:
    return NatsSettings(url=cluster.url, replicas=3)


async def _leader(bus: Bus, stream: str) -> str:
    """Name the server that leads a stream."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            try:
                raw = await JetStream(bus._connection).call(f"STREAM.INFO.{stream}")
            except PeerUnavailable:
                await bus.wait_connected()
                continue
            if name := raw["cluster"].get("leader"):
                return str(name)


async def test_compare_and_set_lets_one_writer_win_when_the_bucket_has_three_copies(
    cluster: NatsCluster, replicated: Bus
) -> None:
    """Twenty writers over three connections, to three servers: exactly one wins each round."""
    async with (
        Bus.session(NatsSettings(url=cluster.servers[1].url, replicas=3), name="second") as second,
        Bus.session(NatsSettings(url=cluster.servers[2].url, replicas=3), name="third") as third,
    ):
        revision = 0
        for generation in range(20):
            outcomes = await asyncio.gather(
                *(
                    (replicated, second, third)[number % 3].compare_and_set(
                        INVENTORY, inventory(generation), revision, **_KEY
                    )
                    for number in range(20)
                )
            )
            won = [outcome for outcome in outcomes if isinstance(outcome, Written)]

            assert len(won) == 1
            revision = won[0].revision


async def test_compare_and_set_counts_every_step_when_the_leader_is_killed_between(
    cluster: NatsCluster, replicated: Bus
) -> None:
    """A counter made of compare-and-sets: the leader is killed in the middle, and no step is lost
    or done twice.
    """

    async def step(want: int) -> None:
        """Write `want` on top of `want - 1`; an ambiguous write is read back."""
        while True:
            try:
                entry = await replicated.get(INVENTORY, **_KEY)
                have = 0 if entry is None else entry.value.generation
                if have >= want:
                    return
                assert have == want - 1
                await replicated.compare_and_set(
                    INVENTORY, inventory(want), 0 if entry is None else entry.revision, **_KEY
                )
            except (AmbiguousWrite, PeerUnavailable):
                await replicated.wait_connected()

    async with asyncio.timeout(2 * _LIMIT_S):
        for want in range(1, 11):
            await step(want)
        leader = cluster.named(await _leader(replicated, "KV_topobus_inventories_gpu"))
        await leader.kill()
        for want in range(11, 21):
            await step(want)
        await leader.start()
        for want in range(21, 31):
            await step(want)
    entry = await replicated.get(INVENTORY, **_KEY)

    assert entry is not None
    assert entry.value.generation == 30


async def test_watch_and_follow_miss_nothing_when_each_server_dies_in_turn(
    cluster: NatsCluster, replicated: Bus
) -> None:
    """Every server is killed and started once: a watcher ends at the newest value, a follower has
    every event once and in order.
    """
    seen: list[int] = []
    latest = 0
    moved = asyncio.Event()

    async def follow() -> None:
        async for item in replicated.follow(HEALTH, start=Start.ALL):
            seen.append(item.value.generation)
            moved.set()

    async def watch() -> None:
        nonlocal latest
        async for change in replicated.watch(INVENTORY):
            if change.kind is ChangeKind.PUT and change.value is not None:
                latest = change.value.generation
                moved.set()

    async def publish(generation: int) -> None:
        while True:
            try:
                await replicated.publish(
                    HEALTH,
                    health(generation),
                    event_id=f"e-{generation}",
                    node="n1",
                    device_class="gpu",
                    device="gpu-0",
                )
                await replicated.put(INVENTORY, inventory(generation), **_KEY)
                return
            except PeerUnavailable:
                await replicated.wait_connected()

    async def until(generation: int) -> None:
        while latest != generation or seen[-1:] != [generation]:
            moved.clear()
            await moved.wait()

    tasks = [asyncio.create_task(follow()), asyncio.create_task(watch())]
    try:
        async with asyncio.timeout(4 * _LIMIT_S):
            generation = 0
            for server in cluster.servers:
                for _ in range(5):
                    generation += 1
                    await publish(generation)
                await server.kill()
                for _ in range(5):
                    generation += 1
                    await publish(generation)
                await until(generation)
                await server.start()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert seen == list(range(1, generation + 1))


async def test_write_is_refused_or_unknown_when_the_majority_is_gone(cluster: NatsCluster, replicated: Bus) -> None:
    """One server of three is no cluster: a write is never acknowledged, and goes through when the
    others are back.
    """
    written = await replicated.compare_and_set(INVENTORY, inventory(1), 0, **_KEY)
    assert isinstance(written, Written)
    for server in cluster.servers[1:]:
        await server.kill()
    with pytest.raises(PeerUnavailable):
        await replicated.compare_and_set(INVENTORY, inventory(2), written.revision, **_KEY)
    for server in cluster.servers[1:]:
        await server.start()

    async with asyncio.timeout(_LIMIT_S):
        while True:
            try:
                entry = await replicated.get(INVENTORY, **_KEY)
                assert entry is not None
                if entry.value.generation == 3:
                    break
                await replicated.compare_and_set(INVENTORY, inventory(3), entry.revision, **_KEY)
            except PeerUnavailable:
                await replicated.wait_connected()
    assert entry.value.generation == 3
