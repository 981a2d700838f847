"""The ledger outlives its store: whatever happens to the bucket, a running topology service forgets
nothing that it has answered.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest
import pytest_asyncio

from support.alignment_nodes import container, dgx_facts, pod
from support.asking import ask_patiently
from support.running import LIMIT_S, NODE, Service, service
from topobus.bus.bus import Bus, ChangeKind
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE, PLACE, RELEASE
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import PlaceReply, PlaceRequest, ReleaseRequest
from topobus.formats.messages.releases import RELEASE as RELEASE_HEADER
from topobus.simulation.nats_server import NatsServer
from topobus.values.errors import ContractError
from topobus.values.ledger import Ledger
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import PodRequest

pytestmark = pytest.mark.integration

TRAINER = pod("trainer", container(cpus=16, gpu=6))
GREEDY = pod("greedy", container(gpu=3))
# The machine is a record: no service of its devices runs, and a test that a busy machine makes long
# must not see them called silent.
PATIENT = {"TOPOBUS_TOPOLOGY__SILENCE__HUNG_S": "3600", "TOPOBUS_TOPOLOGY__SILENCE__GONE_S": "3600"}


@pytest_asyncio.fixture
async def bus(client: Bus) -> Bus:
    """A connected bus on which the demo machine is published."""
    machine, inventories = dgx_facts()
    await client.put(MACHINE, machine, node=NODE)
    for device_class, inventory in inventories.items():
        await client.put(INVENTORY, inventory, node=NODE, device_class=device_class)
    return client


@pytest_asyncio.fixture
async def topology(server: NatsServer, bus: Bus) -> AsyncIterator[Service]:
    """The topology service with a pod that holds six of eight GPUs."""
    async with service("topology", server.url, PATIENT) as made:
        await made.until_ready()
        assert isinstance((await place(bus, "op-1", TRAINER)).result, Placement)
        yield made


async def place(bus: Bus, op_id: str, request: PodRequest) -> PlaceReply:
    """Place as soon as the service can be reached."""
    return await ask_patiently(bus, PLACE, PlaceRequest(op_id=op_id, pod=request), node=NODE)


async def ledger_that(bus: Bus, holds: Callable[[Ledger], bool]) -> Ledger:
    """The first ledger in the bucket that is as wanted."""
    async with asyncio.timeout(LIMIT_S), aclosing(bus.watch(LEDGER, node=NODE)) as changes:
        async for change in changes:
            if change.kind is ChangeKind.PUT and change.value is not None and holds(change.value):
                return change.value
    raise AssertionError("unreachable")


@pytest.mark.usefixtures("topology")
async def test_ledger_is_written_back_when_the_store_was_emptied(server: NatsServer, bus: Bus) -> None:
    """NATS comes back without its store while nobody asks anything: holdings stand in the new
    store, as a new epoch, and stay held.
    """
    await server.stop()
    shutil.rmtree(server.store)
    await server.start()
    written = await ledger_that(bus, lambda ledger: ledger.epoch > 1)
    second = await place(bus, "op-2", GREEDY)

    assert written.allocations.keys() == {TRAINER.owner.key}
    assert isinstance(second.result, Refusal)
    assert second.result.reasons[0].code == "not-enough-devices"


@pytest.mark.usefixtures("topology")
async def test_ledger_is_written_back_when_the_store_was_put_back_from_a_copy(server: NatsServer, bus: Bus) -> None:
    """An old copy of the store, put back, does not undo what has been handed out since."""
    await server.stop()
    copy = server.folder / "copy"
    shutil.copytree(server.store, copy)
    await server.start()
    third = pod("third", container(gpu=2))
    assert isinstance((await place(bus, "op-2", third)).result, Placement)
    await server.stop()
    shutil.rmtree(server.store)
    shutil.move(copy, server.store)
    await server.start()
    written = await ledger_that(bus, lambda ledger: ledger.epoch > 1)
    last = await place(bus, "op-3", pod("last", container(gpu=1)))

    assert written.allocations.keys() == {TRAINER.owner.key, third.owner.key}
    assert isinstance(last.result, Refusal)


async def test_ledger_is_written_back_when_somebody_wrote_an_old_one_or_garbage(
    server: NatsServer, bus: Bus, topology: Service
) -> None:
    """Neither an emptied value nor bytes that are no ledger make the service forget or stop."""
    import nats

    await bus.put(LEDGER, Ledger(node=NODE), node=NODE)
    first = await place(bus, "op-2", GREEDY)
    client = await nats.connect(server.url)
    for data in (b"", b"{", b'{"node": 5}', b"\xff" * 1000):
        await client.jetstream().publish(f"$KV.{LEDGER.bucket}.{NODE}", data)
        second = await place(bus, f"after-{len(data)}", GREEDY)
        assert isinstance(second.result, Refusal)
    await client.close()
    entry = await bus.get(LEDGER, node=NODE)

    assert isinstance(first.result, Refusal)
    assert entry is not None
    assert entry.value.allocations.keys() == {TRAINER.owner.key}
    assert topology.process.returncode is None


@pytest.mark.usefixtures("topology")
async def test_ledger_stays_writable_when_requests_are_enormous(bus: Bus) -> None:
    """A request beyond all measure is turned down and takes no room from the next one."""
    enormous = (
        ("x" * 200_000, TRAINER),
        ("op-a", pod("n" * 200_000, container(cpus=1))),
        ("op-b", pod("many", *(container(f"c{n}", cpus=1) for n in range(5000)))),
        ("op-c", pod("long", container("c" * 200_000, cpus=10**6))),
        ("op-d", pod("huge", container(cpus=10**30))),
    )
    for op_id, request in enormous:
        with pytest.raises(ContractError, match=r"wanted|Expected `(str|int)` (of length )?<= "):
            await place(bus, op_id, request)
    for number in range(40):
        wide = pod(f"wide-{number}", *(container(f"c{n}", cpus=1, gpu=1, nic=1, fpga=1) for n in range(200)))
        assert isinstance((await place(bus, f"wide-{number}", wide)).result, Refusal)
    small = await place(bus, "op-e", pod("small", container(cpus=1)))
    released = await bus.ask(RELEASE, ReleaseRequest(op_id="op-f", owner=TRAINER.owner), node=NODE)

    assert isinstance(small.result, Placement)
    assert len(released.devices["gpu"]) == 6


async def garbage(server: NatsServer, *data: bytes) -> None:
    """Write bytes over the ledger, one revision each."""
    import nats

    client = await nats.connect(server.url)
    for payload in data:
        await client.jetstream().publish(f"$KV.{LEDGER.bucket}.{NODE}", payload)
    await client.close()


CONTRADICTION = encode(Ledger(node=NODE, epoch=9, sequence=1)).replace(
    b'"allocations":{}', b'"allocations":{"pod/a/b/c":{}}'
)


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"node": "elsewhere"}', CONTRADICTION], ids=["empty", "cut-off", "elsewhere", "contradiction"]
)
async def test_ledger_is_recalled_from_the_history_when_it_is_garbage_at_the_start(
    server: NatsServer, bus: Bus, topology: Service, data: bytes
) -> None:
    """A service that starts on garbage takes the newest revision that is a ledger, says both
    revisions, and holds what that holds.
    """
    assert await topology.stop() == 0
    before = await bus.get(LEDGER, node=NODE)
    await garbage(server, data)
    async with service("topology", server.url, PATIENT) as again:
        line = await again.logged("ledger.recalled")
        await again.until_ready()
        reply = await place(bus, "op-2", GREEDY)
    after = await bus.get(LEDGER, node=NODE)

    assert before is not None
    assert after is not None
    assert (line["revision"], line["unreadable_revision"]) == (before.revision, before.revision + 1)
    assert isinstance(reply.result, Refusal)
    assert after.value.allocations.keys() == {TRAINER.owner.key}
    assert after.value.epoch > before.value.epoch


async def test_ledger_stays_as_it_is_when_another_release_wrote_what_cannot_be_read(
    server: NatsServer, bus: Bus, topology: Service
) -> None:
    """A service of before ends with status 65, the release and what to do: an older revision would
    lack what is in use.
    """
    assert await topology.stop() == 0
    entry = await bus.get(LEDGER, node=NODE)
    assert entry is not None
    newer = encode(entry.value).replace(b'"format":1', b'"format":2')
    headers = {RELEASE_HEADER: "99.0.0"}
    await bus._connection.request(f"$KV.{LEDGER.bucket}.{NODE}", newer, headers=headers, timeout_s=30.0)
    before = await bus.fingerprint(LEDGER, node=NODE)
    async with service("topology", server.url, PATIENT) as again:
        line = await again.logged("service.failed")
        status = await asyncio.wait_for(again.process.wait(), LIMIT_S)

    assert status == 65
    assert "release 99.0.0 wrote it" in line["error"]
    assert "start that release here again" in line["error"] + line.get("next_step", "")
    assert await bus.fingerprint(LEDGER, node=NODE) == before


async def test_topology_does_not_start_when_no_revision_of_its_ledger_can_be_read(
    server: NatsServer, bus: Bus, topology: Service
) -> None:
    """Garbage in all of the history: exit 65, one line that names the key and how to put a backup
    back, and never an empty ledger.
    """
    assert await topology.stop() == 0
    await garbage(server, *(b'{"node": 5}' for _ in range(LEDGER.history)))
    async with service("topology", server.url, PATIENT) as again:
        line = await again.logged("service.failed")
        status = await asyncio.wait_for(again.process.wait(), LIMIT_S)
    with pytest.raises(ContractError):
        await bus.get(LEDGER, node=NODE)

    assert status == 65
    assert f"nats kv put {LEDGER.bucket} {NODE}" in line["error"]
    assert line["key"] == NODE
    assert not [line for line in again.raw if "Traceback" in line]
