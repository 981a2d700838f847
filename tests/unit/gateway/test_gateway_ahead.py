"""Which preparations are asked ahead of the ledger, and what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec import structs

from topobus.formats.messages.messages import Prepared, PrepareRequest
from topobus.gateway.asks import NodeAsks
from topobus.gateway.device_plugins.ahead import PreparationAhead
from topobus.gateway.device_plugins.rules.replicas import Chosen, may_ask_ahead
from topobus.values.device import Device, Inventory
from topobus.values.device_sharing import HeldShare
from topobus.values.errors import PeerUnavailable
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import Owner, OwnerKind

OWNER = Owner(kind=OwnerKind.DEVICE_PLUGIN, name="topobus.dev/gpu", uid="u")
INVENTORY = Inventory(
    node="n",
    device_class="gpu",
    generation=3,
    devices=tuple(
        Device(name=name, device_class="gpu", driver=driver)
        for name, driver in (("a", "reads"), ("b", "reads"), ("c", "acts"))
    ),
    reading_drivers=("reads",),
)
PREPARED = Prepared(edits={})


def chosen(*names: str, **shares: HeldShare) -> Chosen:
    """What kubelet chose."""
    return Chosen(devices=names, shares=shares)


@pytest.mark.parametrize(
    ("wanted", "in_vain", "may"),
    [
        pytest.param(chosen("a", "b"), (), True, id="all-read"),
        pytest.param(chosen("a", "c"), (), False, id="one-acts"),
        pytest.param(chosen("a", "gone"), (), False, id="one-unknown"),
        pytest.param(chosen("a", a=HeldShare()), (), False, id="shared"),
        pytest.param(chosen("a", "b"), ("b",), False, id="asked-in-vain"),
        pytest.param(chosen("a"), ("b",), True, id="another-in-vain"),
    ],
)
def test_may_ask_ahead_only_when_every_driver_reads(wanted: Chosen, in_vain: tuple[str, ...], may: bool) -> None:
    """One device that may be changed, shared or unknown is enough to wait for the ledger."""
    assert may_ask_ahead(INVENTORY, wanted, in_vain) is may


class _Service:
    """A device service that answers by rule, and says how often it was asked."""

    def __init__(self, answer: Prepared | Refusal | Exception | None) -> None:
        self.answer = answer
        self.asked = 0
        self.is_given_up = False
        self.is_asked = asyncio.Event()

    async def prepare(self, _: str, request: PrepareRequest) -> Prepared | Refusal:
        assert request.is_ahead
        self.asked += 1
        self.is_asked.set()
        if self.answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.is_given_up = True
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


def _ahead(service: _Service) -> PreparationAhead:
    return PreparationAhead(cast(NodeAsks, service), "gpu")


def _refusal(code: str) -> Refusal:
    return Refusal(reasons=(Reason(code=code, message="no"),))


async def _ask(ahead: PreparationAhead, inventory: Inventory | None = INVENTORY) -> Prepared | None:
    async with ahead.begun("op", OWNER, chosen("a"), inventory) as task:
        return await task if task is not None else None


async def test_answer_is_given_when_the_service_prepares_ahead() -> None:
    """What was prepared is there when the ledger has answered."""
    assert await _ask(_ahead(_Service(PREPARED))) == PREPARED


@pytest.mark.parametrize("code", ["not-ahead", "device-unhealthy"])
async def test_refusal_counts_for_nothing_when_it_came_ahead(code: str) -> None:
    """Whoever holds the device afterwards asks again."""
    assert await _ask(_ahead(_Service(_refusal(code)))) is None


async def test_device_is_asked_in_vain_once_a_generation_when_preparing_it_changes_something() -> None:
    """The next Allocate of the same device waits for the ledger at once, until the inventory is
    another one.
    """
    service = _Service(_refusal("not-ahead"))
    ahead = _ahead(service)

    asked = []
    for inventory in (INVENTORY, INVENTORY, structs.replace(INVENTORY, generation=4), None):
        await _ask(ahead, inventory)
        asked.append(service.asked)

    assert asked == [1, 1, 2, 2]


async def test_other_refusals_are_not_remembered_when_they_pass() -> None:
    """A device that was busy once is asked ahead again."""
    service = _Service(_refusal("device-busy"))
    ahead = _ahead(service)

    await _ask(ahead)
    await _ask(ahead)

    assert service.asked == 2


async def test_question_is_given_up_when_the_ledger_refuses() -> None:
    """Leaving the block ends the ask: nobody waits for a device service that hangs."""
    service = _Service(None)

    async def ask_both() -> None:
        async with _ahead(service).begun("op", OWNER, chosen("a"), INVENTORY):
            await service.is_asked.wait()
            raise PeerUnavailable("the ledger does not answer")

    with pytest.raises(PeerUnavailable):
        await ask_both()

    assert service.is_given_up


async def test_error_is_taken_when_nobody_wants_the_answer_any_more() -> None:
    """A failed ask beside a refusing ledger is no error that nobody took: asyncio would log it,
    long after.
    """
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    service = _Service(PeerUnavailable("gone"))

    async with _ahead(service).begun("op", OWNER, chosen("a"), INVENTORY) as task:
        assert task is not None
        await asyncio.wait({task})
    del task

    assert errors == []
