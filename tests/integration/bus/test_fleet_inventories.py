"""Reading a fleet's inventories where somebody has filled their bucket with nodes that there are
not.
"""

from __future__ import annotations

import pytest

from topobus.bus.bus import Bus
from topobus.cli.listing.fleet_inventories import list_inventories, unread_text
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.machine import Machine, NumaNode

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]


async def _put(bus: Bus, node: str, *classes: str) -> None:
    for device_class in classes:
        devices = (Device(name=f"{device_class}-0", device_class=device_class),)
        inventory = Inventory(node=node, device_class=device_class, generation=1, devices=devices)
        await bus.put(INVENTORY, inventory, node=node, device_class=device_class)


async def _put_machine(bus: Bus, node: str) -> None:
    machine = Machine(node=node, numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=1),), cpus=())
    await bus.put(MACHINE, machine, node=node)


async def test_inventories_of_a_flood_of_nodes_without_a_machine_are_left_unread(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names alone cross the wire.

    Those of the nodes that there are come as always, of every class.
    """
    for node in ("n1", "n2"):
        await _put_machine(bus, node)
        await _put(bus, node, "gpu", "npu")
    for number in range(20):
        await _put(bus, f"ghost{number:02}", "gpu")
    read: list[str] = []
    watch = bus._watch

    def noting(state: object, parts: dict[str, str], *rest: object) -> object:
        read.append(parts.get("node", "everything"))
        return watch(state, parts, *rest)  # type: ignore[arg-type]  # as the bus calls it

    monkeypatch.setattr(bus, "_watch", noting)

    entries, unread = await list_inventories(bus)

    assert [tuple(entry.parts.values()) for entry in entries] == [
        ("n1", "gpu"),
        ("n1", "npu"),
        ("n2", "gpu"),
        ("n2", "npu"),
    ]
    assert unread == tuple(f"ghost{number:02}" for number in range(20))
    assert sorted(read) == ["n1", "n2"]
    assert "20 nodes" in unread_text(unread)


@pytest.mark.parametrize("machines", [("n1",), ()], ids=["few-strangers", "no-discovery-anywhere"])
async def test_inventories_are_all_read_when_nodes_may_be_late(bus: Bus, machines: tuple[str, ...]) -> None:
    """A node whose discovery has not run yet, or a fleet without any, is looked at as it is."""
    for node in machines:
        await _put_machine(bus, node)
    names = [f"n{number}" for number in range(1, 5 if machines else 20)]
    for node in names:
        await _put(bus, node, "gpu")

    entries, unread = await list_inventories(bus)

    assert sorted(entry.parts["node"] for entry in entries) == sorted(names)
    assert unread == ()


async def test_keys_are_named_and_what_is_no_key_is_not(bus: Bus) -> None:
    """Of the common bucket and of those of single classes, once each."""
    await _put(bus, "n1.example", "gpu", "npu")
    await bus._connection.request("$KV.topobus_inventories.stray", b"x", timeout_s=30.0)

    assert await bus.keys(INVENTORY) == (
        {"node": "n1.example", "device_class": "gpu"},
        {"node": "n1.example", "device_class": "npu"},
    )


async def test_keys_that_were_deleted_are_not_named(bus: Bus) -> None:
    """A deletion leaves a marker in its bucket for ever.

    Whoever looks for nodes that are none must not find those that were forgotten.
    """
    await _put(bus, "n1", "gpu", "npu")
    await _put(bus, "n2", "gpu")
    await bus.delete(INVENTORY, node="n1", device_class="gpu")
    await bus.delete(INVENTORY, node="n1", device_class="npu")

    assert await bus.keys(INVENTORY) == ({"node": "n2", "device_class": "gpu"},)


async def test_flood_is_left_unread_when_it_has_pushed_out_the_inventories_of_the_nodes_that_there_are(
    bus: Bus,
) -> None:
    """A full bucket drops its oldest values: what is left is the flood's alone until the owners
    have written theirs again.
    """
    await _put_machine(bus, "n1")
    for number in range(20):
        await _put(bus, f"ghost{number:02}", "gpu")

    entries, unread = await list_inventories(bus)

    assert entries == ()
    assert len(unread) == 20
