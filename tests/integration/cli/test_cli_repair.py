"""`topobus repair`: what is listed and explained, and the pause that controllers see."""

from __future__ import annotations

import json

import pytest

from support.cli_process import run_cli
from topobus.bus.bus import Bus
from topobus.engine.repair.fleet import Fleet
from topobus.engine.repair.plan import is_paused, plan
from topobus.formats.messages.catalogue import DECISION, INVENTORY, LEDGER, REPAIR
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import RepairState
from topobus.formats.messages.nouns import CLUSTER
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState
from topobus.values.ledger import Ledger
from topobus.values.repair import RepairPolicy, RepairRuleSettings

pytestmark = pytest.mark.integration

_NOW_S = 1_790_000_000.0
_RULE = RepairRuleSettings(
    name="bus", device_class="gpu", reasons=("fell-off-bus",), steps=("maintain", "wait-healthy", "return")
)
_POLICY = RepairPolicy(rules=(_RULE,))


async def _begin_repair(bus: Bus) -> RepairState:
    """Write the document of a repair of gpu-0 that has just begun."""
    fault = Condition(dimension=Dimension.PRESENCE, state=HealthState.UNHEALTHY, reason="fell-off-bus")
    devices = (
        Device(
            name="gpu-0",
            device_class="gpu",
            health=DeviceHealth(state=HealthState.UNHEALTHY, conditions=(fault,)),
        ),
        Device(name="gpu-1", device_class="gpu"),
    )
    sick = Inventory(node="n1", device_class="gpu", generation=1, devices=devices)
    fleet = Fleet({("n1", "gpu"): sick}, {}, {})
    document = plan(_POLICY, RepairState(policy=encode(_POLICY).decode()), fleet, _NOW_S)
    await bus.put(INVENTORY, sick, node="n1", device_class="gpu")
    await bus.put(LEDGER, Ledger(node="n1"), node="n1")
    await bus.put(REPAIR, document, fleet=CLUSTER)
    return document


async def test_repair_is_listed_and_explained_with_its_step_when_it_is_under_way(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Rule, evidence and step; of a healthy device, that no rule has steps for it."""
    await _begin_repair(bus)
    listed = await run_cli(nats_server, "repair", "list")
    explained = await run_cli(nats_server, "repair", "explain", "gpu-0")
    healthy = await run_cli(nats_server, "repair", "explain", "gpu-1", "--json")

    assert (listed[0], explained[0], healthy[0]) == (0, 0, 0)
    assert [word in listed[1] for word in ("gpu-0", "maintain", "bus", "fell-off-bus")] == [True] * 4
    assert explained[1].splitlines()[:3] == ["gpu-0 of node n1", "  rule bus for fell-off-bus", "  > 1. maintain"]
    assert json.loads(healthy[1])["reason"]["code"] == "repair-observed"


async def test_pause_is_in_the_document_until_it_is_resumed(nats_server: NatsServer, bus: Bus) -> None:
    """The document keeps its repairs, the list says who paused them, and nonsense is refused."""
    before = await _begin_repair(bus)
    paused = await run_cli(nats_server, "repair", "pause", "--for", "2h", "--why", "driver", "--who", "ada")
    during = await bus.get(REPAIR, fleet=CLUSTER)
    listed = await run_cli(nats_server, "repair", "list")
    resumed = await run_cli(nats_server, "repair", "resume")
    after = await bus.get(REPAIR, fleet=CLUSTER)

    assert (paused[0], resumed[0]) == (0, 0)
    assert during is not None
    assert during.value.repairs == before.repairs
    pause = during.value.pause
    assert pause is not None
    assert pause.until_s is not None
    assert (pause.who, pause.why, pause.until_s - pause.since_s) == ("ada", "driver", 7200.0)
    assert "paused by ada" in listed[2]
    assert after is not None
    assert not is_paused(after.value, pause.since_s + 60.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--for", "0s"], "--for is 0:00:00, wanted more than nothing"),
        (["--for", "9999999d"], "at most 366 days"),
        (["--why", "x" * 1000], "why has 1000 characters, wanted at most 512"),
        (["--who", "a\nb"], "who is 'a\\nb', wanted printable characters only"),
    ],
)
async def test_pause_is_refused_when_the_document_could_not_have_it(
    nats_server: NatsServer, bus: Bus, options: list[str], words: str
) -> None:
    """One text that is too long would make the document of all repairs unreadable."""
    before = await _begin_repair(bus)
    code, _, error = await run_cli(nats_server, "repair", "pause", *options)
    after = await bus.get(REPAIR, fleet=CLUSTER)

    assert (code, words in " ".join(error.split())) == (2, True)
    assert after is not None
    assert after.value == before


async def test_decisions_show_what_was_decided_about_a_repair(nats_server: NatsServer, bus: Bus) -> None:
    """Device, rule and evidence, and the step."""
    (event,) = (await _begin_repair(bus)).events
    await bus.publish(DECISION, event, event_id=event.id, node="n1")

    code, output, _ = await run_cli(nats_server, "decisions")

    assert code == 0
    assert [word in output for word in ("repair gpu-0 by rule bus", "(fell-off-bus)", "begun")] == [True] * 3
