"""The number of virtual functions is kept at what the operator asks for, by the ledger's leave.

On virtual time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lab.memory_nats.memory_bus import MemoryBus, MemoryNats
from support.physical_functions import ADDRESS, Function
from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.formats.messages.catalogue import LEDGER
from topobus.nic.config import VirtualFunctions
from topobus.nic.virtual_functions import check_virtual_functions, keep_virtual_functions
from topobus.values.errors import ConfigError, PeerUnavailable
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

NODE = "n1"
OWNER = Owner(kind=OwnerKind.CLAIM, name="net", uid="u1")


def ledger(*devices: str) -> Ledger:
    """A ledger in which a claim holds these NICs."""
    holding = Holding(devices={"nic": devices})
    return Ledger(node=NODE, allocations={OWNER.key: Allocation(owner=OWNER, holdings=(holding,))} if devices else {})


@pytest.mark.virtual_time
async def test_number_is_brought_to_the_wish_when_the_last_function_is_let_go(tmp_path: Path) -> None:
    """Held, it stays; a look later it is as wanted, without a restart."""
    function = Function(tmp_path, 2)
    wish = VirtualFunctions(address=ADDRESS, count=4)
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        await bus.provision()
        await bus.put(LEDGER, ledger("nic-0000-3b-02-1"), node=NODE)
        holders = DeviceHolders(bus, node=NODE, device_class="nic")
        keeping = asyncio.create_task(keep_virtual_functions([wish], holders, str(function.sys)))
        await asyncio.sleep(1)
        held = function.number
        await bus.put(LEDGER, ledger(), node=NODE)
        await asyncio.sleep(31)
        keeping.cancel()

    assert (held, function.number) == (2, 4)


@pytest.mark.virtual_time
async def test_number_stays_when_the_physical_function_itself_is_held(tmp_path: Path) -> None:
    """Its functions would change it under its user."""
    function = Function(tmp_path, 0)
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        await bus.provision()
        await bus.put(LEDGER, ledger("nic-0000-3b-00-0"), node=NODE)
        holders = DeviceHolders(bus, node=NODE, device_class="nic")
        keeping = asyncio.create_task(
            keep_virtual_functions([VirtualFunctions(address=ADDRESS, count=4)], holders, str(function.sys))
        )
        await asyncio.sleep(1)
        keeping.cancel()

    assert function.number == 0


@pytest.mark.virtual_time
async def test_number_stays_when_nobody_knows_who_holds_what(tmp_path: Path) -> None:
    """While the ledger cannot be read, everything counts as held."""
    function = Function(tmp_path, 2)
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        # No bucket: the bus has never been provisioned.
        holders = DeviceHolders(bus, node=NODE, device_class="nic")
        keeping = asyncio.create_task(
            keep_virtual_functions([VirtualFunctions(address=ADDRESS, count=4)], holders, str(function.sys))
        )
        await asyncio.sleep(1)
        keeping.cancel()

    assert (holders.held, function.number) == (None, 2)


@pytest.mark.virtual_time
async def test_number_stays_when_the_ledger_cannot_be_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who held it when it was last read says nothing of who holds it now."""
    function = Function(tmp_path, 2)
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        await bus.provision()
        await bus.put(LEDGER, ledger("nic-0000-3b-02-1"), node=NODE)
        holders = DeviceHolders(bus, node=NODE, device_class="nic")
        wish = VirtualFunctions(address=ADDRESS, count=4)
        keeping = asyncio.create_task(keep_virtual_functions([wish], holders, str(function.sys)))
        await asyncio.sleep(1)
        await bus.put(LEDGER, ledger(), node=NODE)
        await holders.read()

        async def fail(*_: object, **__: object) -> None:
            raise PeerUnavailable("no answer")

        monkeypatch.setattr(bus, "get", fail)
        await asyncio.sleep(31)
        number = function.number
        monkeypatch.undo()
        await asyncio.sleep(31)
        keeping.cancel()

    assert (number, function.number) == (2, 4)


@pytest.mark.virtual_time
async def test_ledger_is_read_again_before_each_card(tmp_path: Path) -> None:
    """Making the functions of one card takes seconds, in which a claim may have got those of the
    next.
    """
    first = Function(tmp_path, 2)
    wishes = [VirtualFunctions(address=ADDRESS, count=4)] * 2
    async with MemoryBus.session(MemoryNats(), name="topology") as bus:
        await bus.provision()
        await bus.put(LEDGER, ledger(), node=NODE)
        holders = DeviceHolders(bus, node=NODE, device_class="nic")
        reads: list[int] = []
        read = holders.read

        async def count() -> bool:
            reads.append(first.number)
            return await read()

        holders.read = count  # type: ignore[method-assign]
        keeping = asyncio.create_task(keep_virtual_functions(wishes, holders, str(first.sys)))
        await asyncio.sleep(1)
        keeping.cancel()

    assert reads == [2, 4]


@pytest.mark.parametrize(
    ("addresses", "key"),
    [(["3b"], "virtual_functions[0].address"), ([ADDRESS, "3b:00.0"], "virtual_functions[1].address")],
    ids=["no address", "one address in two spellings"],
)
def test_settings_are_refused_when_an_address_is_none_or_stands_twice(addresses: list[str], key: str) -> None:
    """The operator reads which key."""
    with pytest.raises(ConfigError) as refused:
        check_virtual_functions([VirtualFunctions(address=address, count=1) for address in addresses])

    assert refused.value.facts["key"] == key
