"""Commands that look at a fleet: what many nodes have alike is said once,
and what differs is seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.machine import Machine

pytestmark = pytest.mark.integration

_NODES = tuple(f"n{number}" for number in range(1, 13))
_OTHER = "n7"


@pytest_asyncio.fixture
async def fleet(bus: Bus, recorded: tuple[Machine, list[Inventory]]) -> list[Inventory]:
    """Twelve nodes whose services are silent.

    One of them has a machine without its NICs' inventory.
    """
    machine, inventories = recorded
    for number, node in enumerate(_NODES):
        await bus.put(MACHINE, structs.replace(machine, node=node, generation=number + 1), node=node)
        for inventory in inventories:
            if (node, inventory.device_class) != (_OTHER, "nic"):
                await bus.put(
                    INVENTORY, structs.replace(inventory, node=node), node=node, device_class=inventory.device_class
                )
    return inventories


async def _run(nats_server: NatsServer, *arguments: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "topobus.cli.main", *arguments, "--nats", nats_server.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    return [" ".join(line.split()) for line in output.decode().splitlines()]


async def test_doctor_says_once_what_many_nodes_have_alike(nats_server: NatsServer, fleet: list[Inventory]) -> None:
    """Lines do not grow with the nodes.

    The one that differs has a line of its own, and failures come last.
    """
    lines = await _run(nats_server, "doctor")

    levels = [line.split()[0] for line in lines if line.split()[0] in ("ok", "warn", "fail")]
    assert levels == sorted(levels, key=("ok", "warn", "fail").index)
    assert len(lines) < 80
    assert any(line.startswith("fail 12 nodes: ledger there is none; on n1, n10, n11 and 9 more") for line in lines)
    assert any(line.startswith("fail 11 nodes: inventory nic") for line in lines)
    assert any(line.startswith(f"warn {_OTHER}: inventory nic no service of this class") for line in lines)


async def test_doctor_leaves_out_what_is_well_when_problems_are_asked_for(
    nats_server: NatsServer, fleet: list[Inventory]
) -> None:
    """The counts at the end are of all checks; JSON has each finding of each node."""
    lines = await _run(nats_server, "doctor", "--problems")
    document: dict[str, Any] = json.loads("".join(await _run(nats_server, "doctor", "--problems", "--json")))

    assert [line for line in lines if line.startswith("ok")] == []
    assert not lines[-1].startswith("0 ok")
    assert {finding["level"] for finding in document["findings"]} == {"warn", "fail"}
    assert {f"{node}: ledger" for node in _NODES} <= {finding["what"] for finding in document["findings"]}


async def test_version_names_nodes_together_when_they_run_the_same(
    nats_server: NatsServer, fleet: list[Inventory]
) -> None:
    """One block for all nodes of which the same is to be said."""
    lines = await _run(nats_server, "version")

    assert [line for line in lines if "nodes:" in line] == ["12 nodes: n1, n10, n11 and 9 more"]
    assert len(lines) < 20


async def test_inventory_sums_up_by_class_when_there_are_several_nodes(
    nats_server: NatsServer, fleet: list[Inventory]
) -> None:
    """Totals stand below the rows; a script that leaves the headers out gets the rows alone."""
    gpus = next(len(inventory.devices) for inventory in fleet if inventory.device_class == "gpu")

    lines = await _run(nats_server, "inventory")
    rows = await _run(nats_server, "inventory", "--no-headers")
    of_one = await _run(nats_server, "inventory", "--node", "n1")

    assert any(line.startswith(f"total of 12 gpu {12 * gpus} 0 0 {12 * gpus}") for line in lines)
    assert not any(line.startswith("total") for line in (*rows, *of_one))
