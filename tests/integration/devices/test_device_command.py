"""`topobus device` with the real topology and a real device service: what it does stands over
restarts of all of them, the NATS server included.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.asking import ask_patiently
from support.device_bench import NODE, DeviceBench, has_state
from support.topology_node import topology
from support.toy_driver import ToyDriver
from topobus.devicekit.maintenance import device_operator
from topobus.devicekit.settings import BurnInSettings
from topobus.formats.messages.catalogue import PLACE
from topobus.formats.messages.messages import PlaceRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.health import HealthState
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = pytest.mark.integration

LIMIT_S = 60.0
BOTH = PodRequest(
    owner=Owner(kind=OwnerKind.POD, name="both", uid="u1"),
    containers=(ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=2),)),),
)


async def _begin(url: str, *arguments: str) -> asyncio.subprocess.Process:
    """Begin one command with --json."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "topobus.cli.main",
        *arguments,
        "--json",
        "--nats",
        url,
        env={**os.environ},
        stdout=-1,
        stderr=-1,
    )


async def _topobus(url: str, *arguments: str, code: int = 0) -> Any:
    """Run one command with --json."""
    process = await _begin(url, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == code, f"{arguments}: {process.returncode}\n{out.decode()}\n{err.decode()}"
    return json.loads(out) if out else err.decode()


def _kept_back(inventory: Inventory) -> list[str]:
    return [device.name for device in inventory.devices if device.maintenance is not None]


async def test_word_stands_when_service_topology_and_server_begin_anew(
    own_bench: DeviceBench, own_nats_server: NatsServer
) -> None:
    """The command says it is done, nothing is placed there from then on, all restart, and it is
    still so until it is returned; the stream has who and why.
    """
    bench, url = own_bench, own_nats_server.url
    await bench.publish_machine()
    async with topology(url, TOPOBUS_ALL__NODE=NODE), bench.service(ToyDriver(count=2)):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        await _until_placeable(bench)
        done = await _topobus(url, "device", "maintain", "gpu-toy-0", "--why", "fan", "--who", "ada")
        refused = await ask_patiently(bench.bus, PLACE, PlaceRequest(op_id="place-1", pod=BOTH), node=NODE)
        unknown = await _topobus(url, "device", "exclude", "gpu-toy-7", "--why", "fan", code=1)
    await own_nats_server.stop()
    await own_nats_server.start()
    async with topology(url, TOPOBUS_ALL__NODE=NODE), bench.service(ToyDriver(count=2)):
        inventory = await bench.inventory(lambda each: _kept_back(each) == ["gpu-toy-0"])
        listed = await _topobus(url, "device", "list")
        decisions = await _topobus(url, "decisions")
        await ask_patiently(bench.bus, PLACE, PlaceRequest(op_id="dry", pod=BOTH, is_dry_run=True), node=NODE)
        await _topobus(url, "device", "return", "--class", "gpu", "--node", NODE)
        placed = await ask_patiently(bench.bus, PLACE, PlaceRequest(op_id="place-2", pod=BOTH), node=NODE)

    assert done["devices"][0]["reply"]["result"]["maintenance"]["why"] == "fan"
    assert isinstance(refused.result, Refusal)
    assert "1 withheld by an operator" in " ".join(reason.message for reason in refused.result.reasons)
    assert "did you mean gpu-toy-" in unknown
    assert inventory.device("gpu-toy-1") is not None
    assert [(device["device"], device["maintenance"]["who"]) for device in listed["devices"]] == [("gpu-toy-0", "ada")]
    said = [
        (event["verb"], event["operation"]["who"], event["operation"]["why"])
        for event in decisions["decisions"]
        if event["operation"]
    ]
    assert said == [("maintain", "ada", "fan")]
    assert isinstance(placed.result, Placement)


async def test_command_waits_for_the_result_when_a_burn_in_takes_longer_than_an_answer(
    own_bench: DeviceBench, own_nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints how to ask later, and ends with the result of the one test."""
    monkeypatch.setattr(device_operator, "_ANSWER_S", 0.2)
    bench, url = own_bench, own_nats_server.url
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    os.mkfifo(gate)
    burn_in = BurnInSettings(command=("/bin/sh", "-c", f"echo run >> {runs}; read _ < {gate}"))
    await bench.publish_machine()
    async with topology(url, TOPOBUS_ALL__NODE=NODE), bench.service(ToyDriver(count=2), burn_in=burn_in):
        await bench.inventory(has_state(HealthState.HEALTHY, "gpu-toy-0"))
        await _until_placeable(bench)
        await _topobus(url, "device", "maintain", "gpu-toy-0", "--why", "fan")
        process = await _begin(url, "device", "burn-in", "gpu-toy-0")
        assert process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while (note := (await process.stderr.readline()).decode()) and "--operation" not in note:
                pass
            await asyncio.to_thread(gate.write_text, "go\n", encoding="utf-8")
            out, _ = await process.communicate()

    assert note.startswith("it goes on without this command")
    assert process.returncode == 0
    assert json.loads(out)["devices"][0]["reply"]["result"]["outcome"] == "operated"
    assert runs.read_text(encoding="utf-8") == "run\n"


async def _until_placeable(bench: DeviceBench) -> None:
    """Wait until topology knows both devices.

    It follows the inventory as the bench does, and tells nobody when it has.
    """
    async with asyncio.timeout(LIMIT_S):
        for number in itertools.count():
            request = PlaceRequest(op_id=f"dry-{number}", pod=BOTH, is_dry_run=True)
            if isinstance((await ask_patiently(bench.bus, PLACE, request, node=NODE)).result, Placement):
                return
