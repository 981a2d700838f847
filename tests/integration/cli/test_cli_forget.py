"""`topobus forget node`: what it prints, and its exit codes, against a real controller."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from integration.values import inventory
from support.asking import ask_patiently
from support.cli_process import run_cli
from support.controllers import controller
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import FORGET, INVENTORY, LEDGER
from topobus.formats.messages.forget_messages import ForgetRequest
from topobus.formats.messages.nouns import CLUSTER
from topobus.simulation.nats_server import NatsServer
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u1")


@pytest_asyncio.fixture
async def ghosts(nats_server: NatsServer, bus: Bus) -> AsyncIterator[Bus]:
    """Two nodes that are none, and one of which somebody still holds a GPU; a controller runs."""
    for node in ("ghost1", "ghost2", "held"):
        await bus.put(INVENTORY, inventory(1, node=node), node=node, device_class="gpu")
    held = {_POD.key: Allocation(owner=_POD, holdings=(Holding(devices={"gpu": ("gpu-0",)}),))}
    await bus.put(LEDGER, Ledger(node="held", allocations=held), node="held")
    async with controller(nats_server.url):
        await ask_patiently(bus, FORGET, ForgetRequest(node="nobody", is_dry_run=True), node=CLUSTER)
        yield bus


async def test_forget_says_what_it_would_remove_and_then_what_it_removed(nats_server: NatsServer, ghosts: Bus) -> None:
    """First a dry run, which changes nothing.

    Then it is done, and once more there is nothing to do.
    """
    dry = await run_cli(nats_server, "forget", "node", "ghost1", "--dry-run")
    stood = await ghosts.keys(INVENTORY, node="ghost1")
    done = await run_cli(nats_server, "forget", "node", "ghost1")
    again = await run_cli(nats_server, "forget", "node", "ghost1")

    assert (dry[0], done[0], again[0]) == (0, 0, 0)
    assert dry[1].splitlines() == [
        "node ghost1 would be forgotten (dry run)",
        "  topobus_inventories_gpu  ghost1.gpu  would be removed",
    ]
    assert len(stood) == 1
    assert done[1].splitlines() == ["node ghost1 forgotten", "  topobus_inventories_gpu  ghost1.gpu  removed"]
    assert again[1].splitlines() == ["node ghost1: nothing is stored about it"]


async def test_forget_names_who_holds_something_and_takes_all_without_a_machine_when_it_is_forced(
    nats_server: NatsServer, ghosts: Bus
) -> None:
    """Without force one is refused and the others go; `doctor` no longer
    counts what was forgotten.
    """
    code, output, noted = await run_cli(nats_server, "forget", "node", "--without-machine")
    forced = await run_cli(nats_server, "forget", "node", "held", "--force", "--json")
    _, empty, none_left = await run_cli(nats_server, "forget", "node", "--without-machine")

    assert code == 1
    assert "node ghost2 forgotten" in output
    assert "node held is not forgotten" in output
    assert "pod default/trainer" in " ".join(output.split())
    assert "topobus holders --node held" in noted
    assert (forced[0], {key["outcome"] for key in json.loads(forced[1])["forgotten"][0]["keys"]}) == (0, {"removed"})
    assert (empty, "every node that has inventories has a machine" in none_left) == ("", True)


async def test_forget_says_that_nothing_was_removed_when_no_controller_runs(nats_server: NatsServer, bus: Bus) -> None:
    """Nobody answers: what stands, stands."""
    await bus.put(INVENTORY, inventory(1, node="ghost1"), node="ghost1", device_class="gpu")

    code, _, noted = await run_cli(nats_server, "forget", "node", "ghost1")

    assert code == 69
    assert "nothing was removed of node ghost1" in noted
    assert len(await bus.keys(INVENTORY)) == 1


@pytest.mark.parametrize("arguments", [("forget", "node"), ("forget", "node", "n1", "--without-machine")])
async def test_forget_wants_names_or_the_word_for_all_when_neither_or_both_are_given(
    nats_server: NatsServer, arguments: tuple[str, ...]
) -> None:
    """Nothing is guessed."""
    code, _, noted = await run_cli(nats_server, *arguments)

    assert code == 2
    assert "topobus forget node" in noted


async def test_delete_of_a_node_names_the_command_that_is_meant(nats_server: NatsServer, bus: Bus) -> None:
    """Users of kubectl type it; nodes are no stored objects."""
    code, _, noted = await run_cli(nats_server, "delete", "node", "n1")

    assert code == 1
    assert "topobus forget node n1 --dry-run" in noted
