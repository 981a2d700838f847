"""A state whose classes have buckets of their own: read as if there were one, each class written to
its own, and what a relay wrote to the common one is seen until it is written anew.
"""

from __future__ import annotations

import pytest

from integration.values import inventory
from support.reading import Reader
from topobus.bus.bus import Bus, Change, ChangeKind
from topobus.formats.messages.catalogue import INVENTORY
from topobus.formats.messages.codec import encode
from topobus.values.device import Inventory

pytestmark = [pytest.mark.integration, pytest.mark.both_buses]

_GPU = {"node": "n1", "device_class": "gpu"}
_SSD = {"node": "n1", "device_class": "ssd"}


async def _put_in_common(bus: Bus, value: Inventory) -> None:
    """Write as a relay does at a hub."""
    key = INVENTORY.key(node=value.node, device_class=value.device_class)
    await bus._jetstream.store(
        f"$KV.{INVENTORY.bucket}.{key}", encode(value), stream=f"KV_{INVENTORY.bucket}", headers={}
    )


def _seen(items: list[Change[Inventory]]) -> list[tuple[ChangeKind, str, int]]:
    return [
        (item.kind, item.parts.get("device_class", ""), item.value.generation if item.value is not None else 0)
        for item in items
    ]


async def test_class_is_written_to_its_own_bucket_and_others_to_the_common_one(bus: Bus) -> None:
    """Who fills the bucket of a class takes no room of another's.

    Whoever reads sees all of them.
    """
    await bus.put(INVENTORY, inventory(1), **_GPU)
    await bus.put(INVENTORY, inventory(2, device_class="ssd"), **_SSD)
    counts = {
        name: await bus._jetstream.subject_counts(f"KV_{INVENTORY.bucket}{name}") for name in ("", "_gpu", "_nic")
    }

    assert counts == {
        "": {"$KV.topobus_inventories.n1.ssd": 1},
        "_gpu": {"$KV.topobus_inventories_gpu.n1.gpu": 1},
        "_nic": {},
    }
    assert [(entry.parts["device_class"], entry.value.generation) for entry in await bus.list(INVENTORY)] == [
        ("gpu", 1),
        ("ssd", 2),
    ]
    assert [entry.value.generation for entry in await bus.list(INVENTORY, node="n1")] == [1, 2]
    assert await bus.list(INVENTORY, node="n2") == ()


@pytest.mark.parametrize("parts", [{}, {"node": "n1"}, _GPU], ids=["all", "node", "key"])
async def test_newest_counts_when_a_value_stands_in_both_buckets(bus: Bus, parts: dict[str, str]) -> None:
    """A node goes from a server of its own to the hub as its central server, and back: what was
    written last counts, in whichever bucket.
    """
    await _put_in_common(bus, inventory(4))
    before = await bus.get(INVENTORY, **_GPU)
    listed = [[entry.value.generation for entry in await bus.list(INVENTORY, **parts)]]
    await bus.put(INVENTORY, inventory(5), **_GPU)
    after = await bus.get(INVENTORY, **_GPU)
    listed.append([entry.value.generation for entry in await bus.list(INVENTORY, **parts)])
    own = await bus.fingerprint(INVENTORY, **_GPU)
    await _put_in_common(bus, inventory(6))
    moved_back = await bus.get(INVENTORY, **_GPU)
    listed.append([entry.value.generation for entry in await bus.list(INVENTORY, **parts)])

    assert [entry.value.generation for entry in (before, after, moved_back) if entry is not None] == [4, 5, 6]
    assert listed == [[4], [5], [6]]
    assert await bus.fingerprint(INVENTORY, **_GPU) != own


async def test_watch_tells_changes_of_every_bucket_and_no_older_value_after_a_newer_one(bus: Bus) -> None:
    """One snapshot with one end, then what comes in any bucket.

    A deletion in the class's bucket does not bring the relay's older value back.
    """
    await _put_in_common(bus, inventory(1))
    await bus.put(INVENTORY, inventory(2), **_GPU)
    async with Reader(bus.watch(INVENTORY, node="n1")) as reader:
        snapshot = _seen(
            await reader.until(lambda items: items[-1:] != [] and items[-1].kind is ChangeKind.SNAPSHOT_END)
        )
        await bus.put(INVENTORY, inventory(3, device_class="ssd"), **_SSD)
        await reader.until(lambda items: (ChangeKind.PUT, "ssd", 3) in _seen(items))
        await bus.delete(INVENTORY, **_GPU)
        changes = _seen(await reader.until(lambda items: (ChangeKind.DELETE, "gpu", 0) in _seen(items)))

    assert snapshot == [(ChangeKind.PUT, "gpu", 2), (ChangeKind.SNAPSHOT_END, "", 0)]
    assert changes == [*snapshot, (ChangeKind.PUT, "ssd", 3), (ChangeKind.DELETE, "gpu", 0)]
    assert await bus.get(INVENTORY, **_GPU) is None
    assert await bus.list(INVENTORY) == (await bus.get(INVENTORY, **_SSD),)


async def test_watch_begins_anew_when_one_bucket_was_lost(bus: Bus) -> None:
    """All is told again after the RESET, also of the buckets that are as they were.

    What stood in the lost one is not.
    """
    await bus.put(INVENTORY, inventory(1), **_GPU)
    await bus.put(INVENTORY, inventory(2, device_class="ssd"), **_SSD)
    async with Reader(bus.watch(INVENTORY)) as reader:
        await reader.until(lambda items: items[-1:] != [] and items[-1].kind is ChangeKind.SNAPSHOT_END)
        await bus._jetstream.call(f"STREAM.DELETE.KV_{INVENTORY.home(**_GPU).bucket}")
        await bus.provision()
        await bus.put(INVENTORY, inventory(3, device_class="nic"), node="n1", device_class="nic")
        items = await reader.until(lambda items: [item.kind for item in items].count(ChangeKind.SNAPSHOT_END) == 2)
        kinds = [item.kind for item in items]
        again = _seen(items)[kinds.index(ChangeKind.RESET) + 1 :]

    assert kinds.count(ChangeKind.RESET) == 1
    assert (ChangeKind.PUT, "ssd", 2) in again
    assert not any(kind is ChangeKind.PUT and device_class == "gpu" for kind, device_class, _ in again)


async def test_key_of_another_class_is_not_told_when_a_stranger_wrote_it_into_a_classs_bucket(bus: Bus) -> None:
    """Where nobody has users anybody may write anywhere: a bucket of a class speaks for that class
    alone.
    """
    own = INVENTORY.home(device_class="nic").bucket
    await bus._jetstream.store(f"$KV.{own}.n1.gpu", encode(inventory(9)), stream=f"KV_{own}", headers={})
    await bus.put(INVENTORY, inventory(1, device_class="nic"), node="n1", device_class="nic")

    assert [entry.parts["device_class"] for entry in await bus.list(INVENTORY)] == ["nic"]
