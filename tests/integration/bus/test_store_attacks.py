"""Attacks on the store with the credential of one principal, on a real server under the shipped
permissions: what they may not do, and whom they may harm.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from integration.values import health
from support.account_nats import account_nats
from support.reading import Reader
from support.secured_nats import SecuredNats, secured_nats
from topobus.bus.bus import Bus
from topobus.bus.failures import StoreFull
from topobus.bus.server_config.nats_accounts import Shape, accounts
from topobus.bus.server_config.nats_permissions import PRINCIPALS
from topobus.bus.server_config.streams import stream_names, wanted_streams
from topobus.formats.messages.catalogue import HEALTH, INVENTORY, LEDGER, MAINTENANCE, PROVISIONER
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.values.device import Inventory
from topobus.values.ledger import Ledger, OperationRecord
from topobus.values.maintenance import DeviceVerb, Maintenance

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def secured(nats_binary: Path, tmp_path: Path) -> AsyncIterator[SecuredNats]:
    """The server of an installation with users."""
    async with secured_nats(tmp_path, binary=nats_binary) as server:
        yield server


@pytest.mark.parametrize("principal", sorted(set(PRINCIPALS) - {PROVISIONER}))
async def test_nobody_but_the_controller_makes_streams_when_permissions_are_on(
    secured: SecuredNats, principal: str
) -> None:
    """Neither a missing stream nor a changed one is anybody's but the controller's: a stream made
    beforehand could copy the ledger anywhere.
    """
    async with secured.bus(PROVISIONER) as controller:
        await controller._jetstream.call(f"STREAM.UPDATE.KV_{INVENTORY.bucket}", wanted_streams(1)[1])
    async with secured.attacker(principal) as attacker:
        for name in stream_names():
            for verb in ("CREATE", "UPDATE", "DELETE", "PURGE"):
                await attacker.send(
                    f"$JS.API.STREAM.{verb}.{name}", json.dumps({"name": name, "subjects": [f"x.{name}"]}).encode()
                )

        assert len(attacker.denials) == 4 * len(stream_names())


async def _bound(controller: Bus, stream: str, max_bytes: int) -> None:
    """Make a stream small, so that it is soon full; only who makes streams may."""
    info = await controller._jetstream.stream_info(stream)
    assert info is not None
    await controller._jetstream.call(f"STREAM.UPDATE.{stream}", {**info.config, "max_bytes": max_bytes})


_SMALL = 24 * 1024 * 1024
# Somewhat less than the largest value that a bucket takes.
_GHOST = b"x" * 500_000


@asynccontextmanager
async def _fleet(
    shape: str, folder: Path, binary: Path
) -> AsyncIterator[tuple[Callable[[str], Any], Callable[[str], Any], str]]:
    """Run a server as a shipped form has its users.

    Gives buses and attackers by principal, and the ending of the names of a node's users.
    """
    if shape == "permissions":
        async with secured_nats(folder, binary=binary) as secured:
            yield secured.bus, secured.attacker, ""
        return
    described = accounts(Shape.CENTRAL, nodes=["n1", "n2"] if shape == "named-nodes" else [])
    ending = "-n1" if shape == "named-nodes" else ""
    async with account_nats(described, binary=binary) as server:
        yield server.bus, server.client, ending


@pytest.mark.parametrize("shape", ["permissions", "accounts", "named-nodes"])
async def test_one_class_starves_nobody_else_when_it_fills_its_inventories(
    nats_binary: Path, tmp_path: Path, shape: str
) -> None:
    """A class that writes inventories of nodes that do not exist, as often as it likes, pushes out
    its own alone: nobody else's goes for a moment, or has to be said again.
    """
    others = {name: Inventory(node="n1", device_class=name, generation=1) for name in ("nic", "cpu", "ssd")}
    async with _fleet(shape, tmp_path, nats_binary) as (bus, attacker, ending), bus(PROVISIONER) as controller:
        await controller.provision()
        for state in INVENTORY.buckets():
            await _bound(controller, f"KV_{state.bucket}", _SMALL)
        revisions = {}
        for name, inventory in others.items():
            async with bus(f"{'gateway' if name == 'ssd' else name}{ending}") as owner:
                revisions[name] = await owner.put(INVENTORY, inventory, node="n1", device_class=name)
        own = INVENTORY.home(device_class="gpu").bucket
        async with attacker(f"gpu{ending}") as hostile:
            nodes = ["n1"] if ending else [f"ghost-{number}" for number in range(20)]
            # Twice what the bucket holds; who may speak for one node has one key,
            # which keeps its newest values only.
            for number in range(100):
                await hostile.ask(f"$KV.{own}.{nodes[number % len(nodes)]}.gpu", _GHOST)
            for bucket in (state.bucket for state in INVENTORY.buckets() if state.bucket != own):
                await hostile.send(f"$KV.{bucket}.n1.gpu", _GHOST)
                await hostile.send(f"$KV.{bucket}.n1.{bucket.rpartition('_')[2]}", _GHOST)
        stored = {name: await controller.get(INVENTORY, node="n1", device_class=name) for name in others}
        troubles = await controller.inspect()

    # Each of the other buckets, and the common one, by the class's own
    # key and by that of who owns it.
    assert len(hostile.denials) == 2 * len(INVENTORY.classes_apart)
    assert {name: (entry.revision, entry.value) for name, entry in stored.items()} == {
        name: (revisions[name], inventory) for name, inventory in others.items()
    }
    if not ending:
        # The bucket's name and the class that floods it: an operator knows whom to stop.
        assert re.search(
            r"it is full \(24 MiB\) and drops its oldest.* of (\d+) are of device_class 'gpu'",
            troubles.pop(f"KV_{own}"),
        )
    assert set(troubles.values()) == {""}


@pytest.mark.parametrize("shape", ["permissions", "accounts", "named-nodes"])
async def test_one_class_starves_nobody_else_when_it_fills_what_operators_said(
    nats_binary: Path, tmp_path: Path, shape: str
) -> None:
    """A class whose bucket of kept-back devices is full keeps none back any more.

    What stands stands, and the other classes write on.
    """
    kept_back = ClassMaintenance(
        node="n1", device_class="nic", devices={"nic-0": Maintenance(verb=DeviceVerb.EXCLUDE, why="fan", who="ada")}
    )
    key = {"node": "n1", "device_class": "nic"}
    async with _fleet(shape, tmp_path, nats_binary) as (bus, attacker, ending), bus(PROVISIONER) as controller:
        await controller.provision()
        for state in MAINTENANCE.buckets():
            await _bound(controller, f"KV_{state.bucket}", 2 * 1024 * 1024)
        async with bus(f"nic{ending}") as nic, attacker(f"gpu{ending}") as hostile:
            before = await nic.put(MAINTENANCE, kept_back, **key)
            own = MAINTENANCE.home(device_class="gpu").bucket
            nodes = ["n1"] if ending else [f"ghost-{number}" for number in range(20)]
            for number in range(40):
                await hostile.ask(f"$KV.{own}.{nodes[number % len(nodes)]}.gpu", b"x" * 200_000)
            for state in MAINTENANCE.buckets():
                if state.bucket != own:
                    await hostile.send(f"$KV.{state.bucket}.n1.nic", b"x")
            stored = await nic.get(MAINTENANCE, **key)
            after = await nic.put(MAINTENANCE, kept_back, **key)

    assert len(hostile.denials) == len(MAINTENANCE.classes_apart)
    assert stored is not None
    assert (stored.revision, stored.value) == (before, kept_back)
    assert after > before


async def test_full_bucket_is_named_when_it_refuses(secured: SecuredNats) -> None:
    """A write into a full ledger bucket fails at once and says what is full and who can help.

    The check-up says it, too.
    """
    async with secured.bus(PROVISIONER) as controller, secured.bus("topology") as topology:
        await _bound(controller, f"KV_{LEDGER.bucket}", 48 * 1024 * 1024)
        with pytest.raises(StoreFull, match=rf"stream KV_{LEDGER.bucket} is full.*nats stream edit"):
            await _fill_ledgers(topology)
        troubles = await topology.inspect()

    assert "it is full" in troubles[f"KV_{LEDGER.bucket}"]
    assert {trouble for name, trouble in troubles.items() if name != f"KV_{LEDGER.bucket}"} == {""}


async def _fill_ledgers(bus: Bus) -> None:
    padding = OperationRecord(verb="release", owner_key="x" * 850_000)
    for number in range(70):
        node = f"n{number}"
        await bus.put(LEDGER, Ledger(node=node, sequence=1, operations={"op": padding}), node=node)


async def test_services_go_on_when_a_user_takes_every_reader_of_health(secured: SecuredNats) -> None:
    """What a service says and reads of its own needs no consumer.

    Followers say why they wait, the check-up names it, and both go on when readers end.
    """
    key = {"node": "n1", "device_class": "gpu", "device": "gpu-0"}
    prefix = f"{HEALTH.stream}.taken"
    queue: asyncio.Queue[str] = asyncio.Queue()
    async with secured.bus("gpu") as gpu, secured.bus("cli") as cli, secured.attacker("user") as attacker:
        await gpu.publish(HEALTH, health(1), event_id="1", **key)
        taken = 0
        while taken < 2000:
            config = {
                "name": f"taken-{taken}",
                "filter_subject": "topobus.v1.health.>",
                "ack_policy": "none",
                "inactive_threshold": 3600 * 10**9,
            }
            request = json.dumps({"stream_name": HEALTH.stream, "config": config}).encode()
            answer = await attacker.ask(f"$JS.API.CONSUMER.CREATE.{prefix}-{taken}.topobus.v1.health.>", request)
            if b'"error"' in answer.data:
                break
            taken += 1
        last = await gpu.last(HEALTH, limit=1, **key)
        await gpu.publish(HEALTH, health(2), event_id="2", **key)
        async with Reader(cli.follow(HEALTH, on_waiting=queue.put_nowait)) as events:
            why = await queue.get()
            troubles = await cli.inspect()
            await attacker.ask(f"$JS.API.CONSUMER.DELETE.{prefix}-0")
            await attacker.ask(f"$JS.API.CONSUMER.DELETE.{prefix}-1")
            items = await events.until(lambda seen: len(seen) == 1)

    assert taken == 1024
    assert [received_event.value.generation for received_event in last] == [1]
    assert "as many readers as it may have" in why
    assert "1024 readers" in troubles[HEALTH.stream]
    assert items[0].value.generation == 2
