"""Fates on the bus in memory: what a test chooses happens to the
operation, and nothing else does.
"""

from __future__ import annotations

import asyncio

import pytest

from lab.memory_nats.fates import READS, WRITES, Delayed, Died, Dies, Fate, Interrupted, Refused, Unconfirmed
from lab.memory_nats.memory_bus import Fates, MemoryBus, MemoryNats
from support.reading import Reader
from topobus.bus.bus import AmbiguousWrite, Bus, Written
from topobus.bus.failures import ConnectionLost
from topobus.formats.messages.catalogue import LEDGER, PODS
from topobus.formats.messages.messages import PodsReply, PodsRequest
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger

pytestmark = pytest.mark.virtual_time

MINE = Ledger(node="n1", disbelieved=(7,))


async def stored_number(server: MemoryNats) -> int | None:
    """Read what another process finds."""
    async with MemoryBus.session(server, name="topobus-cli") as other:
        entry = await other.get(LEDGER, node="n1")
    return entry.value.disbelieved[0] if entry is not None else None


async def provisioned(server: MemoryNats) -> MemoryNats:
    """Make the streams."""
    async with MemoryBus.session(server, name="topobus-cli") as bus:
        await bus.provision()
    return server


@pytest.mark.parametrize(
    ("fate", "error", "stored"),
    [
        pytest.param(None, None, 7, id="none"),
        pytest.param(Refused(), PeerUnavailable, None, id="refused"),
        pytest.param(Unconfirmed(is_done=False), AmbiguousWrite, None, id="unconfirmed-not-done"),
        pytest.param(Unconfirmed(is_done=True), AmbiguousWrite, 7, id="unconfirmed-done"),
        pytest.param(Dies(is_done=False), Died, None, id="dies-before"),
        pytest.param(Dies(is_done=True), Died, 7, id="dies-after"),
    ],
)
async def test_write_ends_as_its_fate_says_when_it_has_one(
    fate: Fate | None, error: type[BaseException] | None, stored: int | None
) -> None:
    """The writer learns what the fate lets it learn, and others find what the fate lets happen."""
    server = await provisioned(MemoryNats())
    learned: BaseException | None = None

    async with MemoryBus.session(server, name="topology", fates=Fates(lambda _: fate)) as bus:
        try:
            await bus.put(LEDGER, MINE, node="n1")
        except (PeerUnavailable, Died) as err:
            learned = err

    assert (type(learned) if learned else None) is error
    assert await stored_number(server) == stored


async def test_dead_process_does_nothing_more_when_it_died() -> None:
    """After a death no operation is done, reads included; the steps tell what was tried."""
    server = await provisioned(MemoryNats())
    fates = Fates({2: Dies(is_done=True)})
    async with MemoryBus.session(server, name="topology", fates=fates) as bus:
        written = await bus.compare_and_set(LEDGER, Ledger(node="n1", disbelieved=(1,)), 0, node="n1")
        assert isinstance(written, Written)
        with pytest.raises(Died):
            await bus.compare_and_set(LEDGER, MINE, written.revision, node="n1")
        with pytest.raises(Died):
            await bus.get(LEDGER, node="n1")
        with pytest.raises(Died):
            await bus.delete(LEDGER, node="n1")

    assert [str(step) for step in fates.steps] == ["compare_and_set ledger", "compare_and_set ledger"]
    assert fates.died.is_set()
    assert await stored_number(server) == 7


async def test_process_stands_still_when_it_hangs_at_its_death() -> None:
    """One that hangs raises nothing: who waits for it waits until it is cancelled."""
    server = await provisioned(MemoryNats())
    fates = Fates({1: Dies(is_done=False)}, hangs=True)
    async with MemoryBus.session(server, name="topology", fates=fates) as bus:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bus.put(LEDGER, MINE, node="n1"), 3600)

    assert fates.died.is_set()


async def test_process_is_dying_when_others_see_its_last_step_before_it_does() -> None:
    """A step after which its owner dies can be seen by others first: they are told that the death
    is under way.
    """
    server = await provisioned(MemoryNats())
    fates = Fates({1: Dies(is_done=True)}, hangs=True)
    async with (
        MemoryBus.session(server, name="topobus-cli") as other,
        Reader(other.watch(LEDGER)) as ledgers,
        MemoryBus.session(server, name="topology", fates=fates) as bus,
    ):
        before = (fates.is_dying, fates.died.is_set())
        writing = asyncio.create_task(bus.put(LEDGER, MINE, node="n1"))
        await ledgers.until(lambda changes: any(change.value is not None for change in changes))
        seen = fates.is_dying
        await fates.died.wait()
        writing.cancel()

    assert before == (False, False)
    assert seen


async def test_process_dies_when_its_last_step_fails() -> None:
    """Who is to die after a step dies at it, whatever came of the step."""
    fates = Fates({1: Dies(is_done=True)})
    async with MemoryBus.session(MemoryNats(), name="topology", fates=fates) as bus:
        with pytest.raises(Died):
            await bus.put(LEDGER, MINE, node="n1")

    assert fates.died.is_set()


async def test_operations_happen_in_the_chosen_order_when_some_are_delayed_or_interrupted() -> None:
    """A delayed write happens after what it waits for.

    An interrupted one before what happens meanwhile.
    """
    server = await provisioned(MemoryNats())
    order: list[str] = []

    async def note(what: str) -> None:
        order.append(f"{what}: {await stored_number(server)}")

    fates = Fates({1: Delayed(lambda: note("before")), 2: Interrupted(lambda: note("meanwhile"))})
    async with MemoryBus.session(server, name="topology", fates=fates) as bus:
        await bus.put(LEDGER, Ledger(node="n1", disbelieved=(1,)), node="n1")
        await bus.put(LEDGER, MINE, node="n1")

    assert order == ["before: None", "meanwhile: 7"]


async def test_ask_is_lost_and_still_served_when_its_fate_is_unconfirmed() -> None:
    """The peer has acted, and the asker knows only that its connection is gone."""
    server = MemoryNats()
    served: list[PodsRequest] = []

    async def answer(request: PodsRequest) -> PodsReply:
        served.append(request)
        return PodsReply()

    async def pods(bus: Bus) -> PodsReply:
        return await bus.ask(PODS, PodsRequest(), node="n1")

    fates = Fates({1: Unconfirmed(is_done=True)}, counted=READS | WRITES)
    async with (
        MemoryBus.session(server, name="gateway") as peer,
        MemoryBus.session(server, name="topobus-cli", fates=fates) as asker,
    ):
        await peer.answer(PODS, answer, node="n1")
        with pytest.raises(ConnectionLost):
            await pods(asker)
        assert await pods(asker) == PodsReply()

    assert served == [PodsRequest(), PodsRequest()]
