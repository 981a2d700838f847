"""State on a real server: compare-and-set is exclusive, deletes and lists mean what they say."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from integration.values import inventory
from topobus.bus.bus import Bus, ChangeKind, Conflict, Written
from topobus.bus.streams import state as state_module
from topobus.bus.streams.jetstream import JetStream, StoredMessage
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, OBJECT
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.stored import from_stored
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.ledger import Allocation, Ledger
from topobus.values.request import Owner, OwnerKind

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_KEY = {"node": "n1", "device_class": "gpu"}


async def test_compare_and_set_lets_one_writer_win_when_twenty_race(nats_server: NatsServer, bus: Bus) -> None:
    """Of many writers that expect the same revision exactly one wins, round after round, over
    several connections.
    """
    async with Bus.session(NatsSettings(url=nats_server.url), name="second") as second:
        revision = 0
        for generation in range(20):
            outcomes = await asyncio.gather(
                *(
                    (bus, second)[number % 2].compare_and_set(INVENTORY, inventory(generation), revision, **_KEY)
                    for number in range(20)
                )
            )
            won = [outcome for outcome in outcomes if isinstance(outcome, Written)]

            assert len(won) == 1
            revision = won[0].revision


async def test_compare_and_set_conflicts_when_the_revision_is_old(bus: Bus) -> None:
    """Who expects an old revision, or none where there is one, gets Conflict and writes nothing."""
    await bus.put(INVENTORY, inventory(1), **_KEY)
    await bus.put(INVENTORY, inventory(2), **_KEY)

    assert await bus.compare_and_set(INVENTORY, inventory(3), 1, **_KEY) == Conflict()
    assert await bus.compare_and_set(INVENTORY, inventory(3), 0, **_KEY) == Conflict()
    entry = await bus.get(INVENTORY, **_KEY)
    assert entry is not None
    assert (entry.revision, entry.value.generation) == (2, 2)


async def test_compare_and_set_creates_when_the_key_was_deleted(bus: Bus) -> None:
    """A deleted key does not exist: expecting 0 writes it, once."""
    await bus.put(INVENTORY, inventory(1), **_KEY)
    await bus.delete(INVENTORY, **_KEY)
    assert await bus.get(INVENTORY, **_KEY) is None

    assert await bus.compare_and_set(INVENTORY, inventory(2), 0, **_KEY) == Written(revision=3)
    assert await bus.compare_and_set(INVENTORY, inventory(3), 0, **_KEY) == Conflict()


async def test_compare_and_delete_leaves_a_value_alone_when_it_was_written_since(bus: Bus) -> None:
    """A deletion that names a revision takes away that one only: a newer value stays, a deleted one
    stays deleted.
    """
    first = await bus.put(INVENTORY, inventory(1), **_KEY)
    second = await bus.put(INVENTORY, inventory(2), **_KEY)

    assert await bus.compare_and_delete(INVENTORY, first, **_KEY) == Conflict()
    assert await bus.get(INVENTORY, **_KEY) is not None
    assert await bus.compare_and_delete(INVENTORY, second, **_KEY) is None
    assert await bus.get(INVENTORY, **_KEY) is None
    assert await bus.compare_and_delete(INVENTORY, second, **_KEY) == Conflict()


async def test_get_gives_none_when_the_key_never_existed(bus: Bus) -> None:
    """Absent is None, not an error."""
    assert await bus.get(INVENTORY, **_KEY) is None


async def test_get_is_a_contract_error_when_the_bytes_are_no_value(bus: Bus) -> None:
    """Bytes that no contract accepts are named with their place."""
    await bus._connection.publish("$KV.topobus_inventories.n1.gpu", b'{"node": 7}')
    await bus._connection.barrier()

    with pytest.raises(ContractError, match=r"topobus_inventories/n1\.gpu"):
        await bus.get(INVENTORY, **_KEY)


async def test_list_gives_all_entries_sorted_when_some_were_deleted(bus: Bus) -> None:
    """A list has each present key once, sorted, and only those of the parts given.

    Names with dots come back as they were.
    """
    for kind, name in (
        ("ResourceClaim", "b"),
        ("ResourceClaim", "a.example.com"),
        ("Pod", "a"),
        ("ResourceClaim", "gone"),
    ):
        await bus.put(
            OBJECT,
            ApiObject(api_version="v1", kind=kind, metadata={"name": name}),
            kind=kind,
            namespace="default",
            name=name,
        )
    await bus.delete(OBJECT, kind="ResourceClaim", namespace="default", name="gone")

    entries = await bus.list(OBJECT, kind="ResourceClaim")
    assert [entry.parts["name"] for entry in entries] == ["a.example.com", "b"]
    assert len(await bus.list(OBJECT)) == 3


async def test_list_names_what_nobody_can_read_and_gives_the_rest(bus: Bus) -> None:
    """Garbage of one node is said with its key and what is wrong with it, and hides nobody else's
    value.

    Once it is gone, nothing is said.
    """
    rejected: list[tuple[str, str]] = []
    await bus.put(INVENTORY, inventory(1), **_KEY)
    for key, data in (("n2.gpu", b'{"node": 7}'), ("n3.gpu", encode(inventory(1)))):
        await bus._connection.publish(f"$KV.{INVENTORY.bucket}.{key}", data)
    await bus._connection.barrier()

    entries = await bus.list(INVENTORY, on_rejected=lambda key, why: rejected.append((key, why)))

    assert [entry.parts["node"] for entry in entries] == ["n1"]
    assert [key for key, _ in rejected] == ["n2.gpu", "n3.gpu"]
    assert "node" in rejected[0][1]
    assert "has node 'n1', its key has 'n3'" in rejected[1][1]


async def test_list_is_complete_when_there_are_thousands_of_entries(bus: Bus) -> None:
    """More entries than one batch holds are all there."""
    await asyncio.gather(
        *(
            bus.put(INVENTORY, inventory(1, node=f"n{number}"), node=f"n{number}", device_class="gpu")
            for number in range(1000)
        )
    )

    assert len(await bus.list(INVENTORY)) == 1000


async def test_list_is_complete_when_the_entries_are_larger_than_one_batch(bus: Bus) -> None:
    """A snapshot of more bytes than the server sends at once does not end early."""
    for number in range(30):
        await bus.put(
            INVENTORY,
            inventory(number, node=f"n{number}", padding_bytes=400_000),
            node=f"n{number}",
            device_class="gpu",
        )

    assert len(await bus.list(INVENTORY)) == 30


async def test_list_has_every_key_when_others_write_meanwhile(bus: Bus) -> None:
    """Keys that change while a snapshot is read are in it all the same: none falls between the old
    value and the new.
    """
    nodes = [f"n{number}" for number in range(200)]
    for node in nodes:
        await bus.put(INVENTORY, inventory(0, node=node), node=node, device_class="gpu")

    async def write() -> None:
        for generation in range(1, 12):
            await asyncio.gather(
                *(bus.put(INVENTORY, inventory(generation, node=node), node=node, device_class="gpu") for node in nodes)
            )

    writing = asyncio.create_task(write())
    sizes = []
    while not writing.done():
        sizes.append(len(await bus.list(INVENTORY)))
    await writing

    assert set(sizes) == {200}


async def test_list_gives_up_when_the_buckets_were_never_made(nats_server: NatsServer) -> None:
    """Reading what is there must end: without its bucket a list is PeerUnavailable, not an endless
    wait.
    """
    async with Bus.session(NatsSettings(url=nats_server.url, timeout_s=0.5), name="test") as bus:
        with pytest.raises(PeerUnavailable, match="topobus_inventories"):
            await bus.list(INVENTORY)


async def test_history_gives_what_can_be_read_when_the_newest_value_is_garbage(bus: Bus) -> None:
    """Older values come oldest first with their revisions.

    Garbage and another's value are left out; a deletion ends what was before.
    """
    assert await bus.history(INVENTORY, **_KEY) == ()
    await bus.put(INVENTORY, inventory(1), **_KEY)
    await bus.delete(INVENTORY, **_KEY)
    await bus.put(INVENTORY, inventory(2), **_KEY)
    await bus.put(INVENTORY, inventory(3, node="elsewhere"), **_KEY)
    await bus.put(INVENTORY, inventory(4), **_KEY)
    await bus._connection.publish(f"$KV.{INVENTORY.bucket}.{INVENTORY.key(**_KEY)}", b"{")
    await bus._connection.barrier()

    with pytest.raises(ContractError):
        await bus.get(INVENTORY, **_KEY)
    assert [(entry.revision, entry.value.generation) for entry in await bus.history(INVENTORY, **_KEY)] == [
        (3, 2),
        (5, 4),
    ]


async def test_history_has_no_gap_when_old_values_are_dropped_while_it_is_read(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While each value is read, three others are written and the bucket drops the oldest: of what
    is given each value follows the one before.
    """
    for generation in range(1, INVENTORY.history + 1):
        await bus.put(INVENTORY, inventory(generation), **_KEY)
    newest = INVENTORY.history
    read_next = JetStream.next_message

    async def read_slowly(jetstream: JetStream, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        nonlocal newest
        message = await read_next(jetstream, stream, subject, sequence)
        for _ in range(3 if newest <= INVENTORY.history + 3 else 0):
            newest += 1
            await bus.put(INVENTORY, inventory(newest), **_KEY)
        return message

    monkeypatch.setattr(JetStream, "next_message", read_slowly)
    generations = [entry.value.generation for entry in await bus.history(INVENTORY, **_KEY)]

    assert newest > INVENTORY.history
    assert generations == list(range(generations[0], generations[0] + len(generations)))
    assert 1 not in generations


async def test_fingerprint_tells_a_value_from_every_other_when_nobody_reads_it(bus: Bus) -> None:
    """It stays as long as nobody writes, is another one after each write, of the same value too,
    and empty for what does not exist.
    """
    absent = await bus.fingerprint(INVENTORY, **_KEY)
    await bus.put(INVENTORY, inventory(1), **_KEY)
    first = [await bus.fingerprint(INVENTORY, **_KEY) for _ in range(2)]
    await bus.put(INVENTORY, inventory(1), **_KEY)
    again = await bus.fingerprint(INVENTORY, **_KEY)
    await bus.delete(INVENTORY, **_KEY)

    assert (absent, await bus.fingerprint(INVENTORY, **_KEY)) == ("", "")
    assert first[0] == first[1] != again
    assert "" not in (first[0], again)


async def test_large_values_are_read_beside_the_loop_when_they_come(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of thousands of devices takes a tenth of a second to read: nobody whom this process
    answers waits for that. Small ones are read at once.
    """
    threads: list[int] = []

    def read(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return from_stored(*arguments, **named)

    monkeypatch.setattr(state_module, "from_stored", read)
    large = inventory(2, padding_bytes=300_000)
    for value in (inventory(1), large):
        await bus.put(INVENTORY, value, **_KEY)
        entry = await bus.get(INVENTORY, **_KEY)
        assert entry is not None
        assert entry.value == value
    async for change in bus.watch(INVENTORY, **_KEY):
        assert change.value == large
        break

    assert [thread == threading.get_ident() for thread in threads] == [True, False, False]


@pytest.mark.parametrize(("parts", "taken_over"), [({"node": "n1"}, True), ({}, False)], ids=["one-node", "all-nodes"])
async def test_unchanged_entries_are_taken_over_when_one_key_is_followed(
    bus: Bus, parts: dict[str, str], taken_over: bool
) -> None:
    """Who follows one node's ledger decodes what has changed.

    Of all nodes nothing is remembered, for it would take their size in memory.
    """
    owners = [Owner(kind=OwnerKind.POD, name=name, uid=name) for name in ("a", "b")]
    written = [
        Ledger(
            node="n1",
            sequence=sequence,
            allocations={owner.key: Allocation(owner=owner) for owner in owners[:sequence]},
        )
        for sequence in (1, 2)
    ]
    await bus.put(LEDGER, written[0], node="n1")
    read: list[Ledger] = []
    async for change in bus.watch(LEDGER, **parts):
        if change.value is not None:
            read.append(change.value)
        if len(read) == 2:
            break
        if change.kind is ChangeKind.SNAPSHOT_END:
            await bus.put(LEDGER, written[1], node="n1")

    assert read == written
    assert (read[1].allocations[owners[0].key] is read[0].allocations[owners[0].key]) == taken_over
