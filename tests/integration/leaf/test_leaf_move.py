"""Moving a node from one central server to a server of its own and back, as
docs/how-to/choose-a-nats-shape.md says: the ledger goes along.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from docpages.nats_files import render_server
from support.leaf_pair import leaf_pair
from support.looks import until
from support.relays import relay, until_equal
from support.topology_node import NODE, TRAINER, ask_place, publish_node, topology
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import LEDGER
from topobus.process.config import NatsSettings
from topobus.values.outcome import Placement

pytestmark = pytest.mark.integration


async def _move(source: str, target: str) -> tuple[int, str]:
    """Run the command; its exit code and what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TOPOBUS_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.cli.main", "move-ledger", NODE, "--to", target, "--nats", source,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_ledger_goes_along_when_a_node_gets_a_server_of_its_own_and_gives_it_back(nats_binary: Path) -> None:
    """The pod that was placed under the central server holds its devices under the node's own, and
    again under the central one.
    """
    async with leaf_pair(nats_binary) as pair:
        # Before: the hub is the central server, and knows nothing of leaves.
        hub_text = pair.hub.text
        await pair.hub.stop()
        pair.hub.text = render_server()
        await pair.hub.start()
        async with Bus.session(NatsSettings(url=pair.hub.url), name="topobus-cli") as central:
            await central.provision()
            await publish_node(central)
            async with topology(pair.hub.url):
                placed = await ask_place(central, "op-1", TRAINER)
        assert isinstance(placed.result, Placement)

        await pair.hub.stop()
        pair.hub.text = hub_text
        await pair.hub.start()
        first, second = await _move(pair.hub.url, pair.leaf.url), await _move(pair.hub.url, pair.leaf.url)
        assert (first[0], "copied, 1 owners" in first[1]) == (0, True), first[1]
        assert (second[0], "was there already" in second[1]) == (0, True), second[1]

        async with pair.buses() as (hub, leaf), relay(pair) as running:
            await publish_node(leaf)
            async with topology(pair.leaf.url, TOPOBUS_ALL__NATS__PROVISIONER="topology"):
                again = await ask_place(leaf, "op-1", TRAINER)
                assert again.result == placed.result, "the answer that it was given before, with the same devices"
                await until_equal(hub, leaf, was_central=True)
            await until_equal(hub, leaf, was_central=True)
            await until(lambda: running.remark == "ready")

        async with Bus.session(NatsSettings(url=pair.hub.url), name="topobus-cli") as central, topology(pair.hub.url):
            back = await ask_place(central, "op-1", TRAINER)
            ledger = await central.get(LEDGER, node=NODE)

        assert back.result == placed.result
        assert ledger is not None
        assert set(ledger.value.allocations) == {TRAINER.owner.key}


async def test_move_keeps_another_ledger_when_the_server_has_one(nats_binary: Path) -> None:
    """Nothing is written over: the command says which server has another ledger, and what to look
    at.
    """
    async with leaf_pair(nats_binary) as pair, pair.buses() as (hub, leaf):
        for bus in (hub, leaf):
            await publish_node(bus)
            async with topology(pair.hub.url if bus is hub else pair.leaf.url):
                await ask_place(bus, "op-hub" if bus is hub else "op-leaf", TRAINER)
        code, output = await _move(pair.hub.url, pair.leaf.url)
        kept = await leaf.get(LEDGER, node=NODE)

        assert code == 69
        assert "has another ledger of node" in output
        assert kept is not None
        assert "op-leaf" in kept.value.operations
