"""`topobus doctor --machine` compares a node with the recording as its CPUs are offered."""

from __future__ import annotations

import json

import pytest

from support.cli_process import run_cli
from topobus.bus.bus import Bus
from topobus.cli.simulation.cpus_offered import read_cpus
from topobus.cli.simulation.node import open_machine
from topobus.formats.messages.catalogue import INVENTORY, MACHINE
from topobus.simulation.nats_server import NatsServer

pytestmark = pytest.mark.integration

_GROUPS = '{"groups": "numa"}'


async def test_node_with_groups_of_cpus_is_as_the_recording_when_doctor_is_given_them(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Without them each CPU is missing: a recording does not tell how the cpu service offers them."""
    with open_machine("dgx", read_cpus(_GROUPS)) as opened:
        machine, inventories = opened.snapshot.machine, opened.snapshot.inventories
    await bus.put(MACHINE, machine, node=machine.node)
    for inventory in inventories:
        await bus.put(INVENTORY, inventory, node=machine.node, device_class=inventory.device_class)

    texts = {}
    for words in ((), ("--cpus", _GROUPS)):
        _, output, _ = await run_cli(nats_server, "doctor", "--json", "--machine", "dgx", *words)
        (template,) = (finding for finding in json.loads(output)["findings"] if finding["what"].endswith(": template"))
        texts[words] = template["found"]

    assert "cpu-0 is missing" in texts[()]
    assert texts["--cpus", _GROUPS] == "its devices are those of the recorded machine"
