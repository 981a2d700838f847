"""`topobus place` and `topobus doctor` where only some services were started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli_process import run_cli
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, MACHINE, OBJECT, PLAN
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanReply, PlanRequest
from topobus.process.config import NatsSettings
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.machine import Machine, NumaNode

pytestmark = pytest.mark.integration

_POD = """apiVersion: v1
kind: Pod
metadata: {name: trainer}
spec: {containers: [{name: main, resources: {limits: {topobus.dev/gpu: 1}}}]}
"""


async def _publish(bus: Bus, *nodes: str) -> None:
    for node in nodes:
        await bus.put(
            MACHINE, Machine(node=node, numa_nodes=(NumaNode(id=0, cpus=CpuSet(), memory_bytes=0),), cpus=()), node=node
        )
        await bus.put(LEDGER, Ledger(node=node), node=node)


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["place", "dry-run"])
async def test_place_says_that_nothing_was_placed_when_no_controller_runs(
    nats_server: NatsServer, bus: Bus, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The server knows that nobody listens: there is nothing to look for, and the way past the
    controller is named with its nodes.
    """
    await _publish(bus, "n1", "n2")
    (tmp_path / "pod.yaml").write_text(_POD)

    code, _, said = await run_cli(nats_server, "place", str(tmp_path / "pod.yaml"), *arguments)

    assert code == 69
    assert "nothing was placed: the controller, which chooses among the nodes, does not run" in said
    assert "`topobus place … --node NODE` asks a node itself (nodes: n1, n2)" in said
    assert "it may have" not in said


async def test_place_says_which_service_is_missing_when_the_named_node_has_no_topology(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """The same for one node: nothing was placed, and what must be started there."""
    await _publish(bus, "n1")
    (tmp_path / "pod.yaml").write_text(_POD)

    code, _, said = await run_cli(nats_server, "place", str(tmp_path / "pod.yaml"), "--node", "n1")

    assert code == 69
    assert "nothing was placed: no topology service answers on n1" in said
    assert "start topobus-topology on n1" in said


async def test_place_names_the_service_that_keeps_silent_behind_the_controller(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """The controller answers, and a node's topology did not answer it:
    that one is to be looked at.
    """
    await _publish(bus, "n1")
    (tmp_path / "pod.yaml").write_text(_POD)

    async def plan(_request: PlanRequest) -> PlanReply:
        return PlanReply(silent_nodes=("n1",))

    async with Bus.session(NatsSettings(url=nats_server.url), name="controller") as controller:
        await controller.answer(PLAN, plan, node=CLUSTER)
        code, output, said = await run_cli(nats_server, "place", str(tmp_path / "pod.yaml"))

    assert code == 69
    assert "topology on n1 did not answer in time: unknown, not refused" in output
    assert "no node answered: topology did not answer on n1" in said


async def test_device_asks_a_node_no_more_when_it_did_not_answer(nats_server: NatsServer, bus: Bus) -> None:
    """Ten devices of a service that hangs cost one wait, not ten."""
    devices = tuple(Device(name=f"gpu-{number}", device_class="gpu") for number in range(10))
    await bus.put(
        INVENTORY,
        Inventory(node="n1", device_class="gpu", generation=1, devices=devices),
        node="n1",
        device_class="gpu",
    )

    code, output, said = await run_cli(nats_server, "device", "maintain", "--class", "gpu", "--why", "fan", "--json")

    errors = [answer["error"] for answer in json.loads(output)["devices"]]
    assert code == 69
    assert [error for error in errors[:8] if error.startswith("not asked")] == []
    assert [error for error in errors[8:] if not error.startswith("not asked any more: ")] == []
    assert "it is not known whether it was done for gpu-0" in said


async def test_doctor_warns_of_services_that_nobody_started_and_fails_where_something_waits_for_one(
    nats_server: NatsServer, bus: Bus
) -> None:
    """Who runs a few services alone has a script that tells well from ill.

    A stored claim without a controller is ill.
    """
    await _publish(bus, "n1")
    alone = await _levels(nats_server)
    claim = ApiObject(
        api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata={"name": "a", "namespace": "default"}, spec={}
    )
    await bus.put(OBJECT, claim, kind="resourceclaim", namespace="default", name="a")

    waited_for = await _levels(nats_server)

    wanted = {"controller": "warn", "n1: gateway": "warn", "n1: inventory cpu": "warn", "n1: topology": "fail"}
    assert {what: alone[what] for what in wanted} == wanted
    assert waited_for["controller"] == "fail"


async def _levels(nats_server: NatsServer) -> dict[str, str]:
    _, output, _ = await run_cli(nats_server, "doctor", "--json")
    return {finding["what"]: finding["level"] for finding in json.loads(output)["findings"]}
