"""The fleet benchmark: real controllers, a real nats-server, nodes played from a recorded machine.

A test of what it does, not of how fast it is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from lab.bench import fleet
from lab.fleet.fleet_node import FleetNode, node_template
from lab.fleet.fleet_run import FleetRun, measure_run
from support.alignment_nodes import dgx_facts
from support.node_contents import content_of
from topobus.bus.bus import Bus
from topobus.formats.messages import catalogue

pytestmark = pytest.mark.integration

MACHINE, _FACTS = dgx_facts()
# With the memory and the uuids that a recorded GPU has.
_GPUS = tuple(
    structs.replace(gpu, uuid=f"GPU-{gpu.name}", capacity={"memory": 80 * 1024**3}) for gpu in _FACTS["gpu"].devices
)
INVENTORIES = {**_FACTS, "gpu": structs.replace(_FACTS["gpu"], devices=_GPUS)}
CLASSES = frozenset({"gpu", "nic"})
CONTENT = content_of(MACHINE, INVENTORIES.values())


async def test_no_claim_is_lost_when_a_controller_is_killed_during_the_fill() -> None:
    """The next controller goes on with what is stored.

    The check at the end has compared all claims with all ledgers.
    """
    said: list[str] = []
    run = FleetRun(nodes=6, claims=24, content=CONTENT, classes=CLASSES, kills=1, singles=2, limit_s=60.0)

    row = await measure_run(run, said.append)

    assert row["controllers killed"] == 1
    # Stored after the kill: the controller that came then has allocated them.
    assert row["a single claim_ms, median"] > 0
    assert any(text.startswith("killed controller with ") for text in said)
    assert {name for name in row if name.startswith("processor_ms a claim, ")} >= {
        f"processor_ms a claim, {name}" for name in ("nats-server", "nodes", "benchmark")
    }
    assert row["claims a second, part of the floor"] > 0


@pytest.mark.memory_bus
@pytest.mark.virtual_time
async def test_nodes_differ_in_what_is_their_own_when_they_are_played(bus: Bus) -> None:
    """Names, uuids and times are each node's own; all else is as recorded."""
    template = node_template(CONTENT, CLASSES)
    for index in range(2):
        await FleetNode(bus, template, index).start()
    entries = [entry.value for entry in await bus.list(catalogue.INVENTORY)]
    uuids = [device.uuid for inventory in entries for device in inventory.devices if device.uuid]

    assert sorted((inventory.node, inventory.device_class) for inventory in entries) == [
        (node, name) for node in ("node-00000", "node-00001") for name in sorted(CLASSES)
    ]
    assert len(set(uuids)) == len(uuids)
    assert len({device.health.since for inventory in entries for device in inventory.devices}) == 2
    assert {device.model for inventory in entries for device in inventory.devices} == {
        device.model for name in CLASSES for device in INVENTORIES[name].devices
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--nodes", "2", "--claims", "30"],
            "--claims and --singles together is 130, wanted at most 10: 2 nodes have 16 GPUs",
        ),
        (["--nodes", "0"], "--nodes is 0, wanted 1 or more"),
        (["--replicas", "0", "--kill", "-1"], "--replicas is 0, wanted 1 or more; --kill is -1, wanted 0 or more"),
    ],
    ids=["too-many-claims", "no-nodes", "two-problems"],
)
def test_bench_refuses_what_cannot_be_run(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What, wanted, and every problem at once; nothing is started."""
    content = tmp_path / "content.json"
    content.write_bytes(msgspec.json.encode(CONTENT))

    status = fleet.main([*arguments, "--content", str(content)])

    assert status == 64
    assert problem in capsys.readouterr().err
