"""`topobus slices` prints before a node exists what its gateway then publishes."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.running import NODE, service, system_settings, until_all_ready
from topobus.cli.application import run
from topobus.cli.exits import ExitCode
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

CLASSES = ("cpu", "fpga", "gpu", "nic")


WORKERS = '[{"name": "worker", "parts": {"gpu": 1, "nic": 1, "cpu": 6}, "within": "machine"}]'


@pytest.mark.parametrize(
    ("profile", "shapes", "own_shapes"),
    [
        ("dgx", False, ""),
        *((profile, True, "") for profile in ("dgx", "epyc-8numa", "gb200", "laptop")),
        *((profile, True, WORKERS) for profile in ("dgx", "epyc-8numa", "laptop")),
    ],
)
async def test_slices_are_those_that_the_gateway_publishes_when_the_machine_is_the_same(
    profile: str, *, shapes: bool, own_shapes: str, nats_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The specs of all slices are equal, for every class, but for the time of a taint: some of these
    machines have a port without a cable. Where the operator's shapes have CPUs, cores are given whole.
    """
    async with ApiServerSimulator() as server, AsyncExitStack() as stack:
        server.put({"kind": "Node", "metadata": {"name": NODE}})
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sl")))
        build(profile, folder / "machine")
        settings = {
            **system_settings(folder),
            "TOPOBUS_GATEWAY__CLUSTER__MODE": "kubeconfig",
            "TOPOBUS_GATEWAY__CLUSTER__SHAPES": str(shapes).lower(),
            "TOPOBUS_GATEWAY__CLUSTER__KUBECONFIG": str(server.write_kubeconfig(folder / "kubeconfig")),
        }
        if own_shapes:
            settings["TOPOBUS_TOPOLOGY__OWN_SHAPES"] = own_shapes
            settings["TOPOBUS_CPU__CPUS__GROUPS"] = "numa"
            settings["TOPOBUS_CPU__CPUS__WHOLE_CORES"] = "true"
            settings["TOPOBUS_TOPOLOGY__ALIGNMENT__RESERVED_CPUS"] = "0-1"
        beside = {
            name: await stack.enter_async_context(service(name, nats_server.url, settings))
            for name in ("discovery", *CLASSES, "topology")
        }
        # A gateway that saw one class after the other would publish its pool anew for each.
        await until_all_ready(beside)
        await stack.enter_async_context(service("gateway", nats_server.url, settings))
        await server.until(lambda: _is_whole(server, NODE) and _is_whole(server, f"{NODE}/cpu"), what="both pools")
        published = {_place(api_object["spec"]): api_object["spec"] for api_object in server.objects("ResourceSlice")}
        for device in (device for spec in published.values() for device in spec.get("devices", ())):
            for taint in device.get("taints", ()):
                del taint["timeAdded"]

    words = ["slices", "--machine", profile, "--node", NODE, *(["--shapes"] if shapes else []), "--output", "json"]
    if own_shapes:
        cpus = '{"groups": "numa", "whole_cores": true}'
        words += ["--own-shapes", own_shapes, "--cpus", cpus, "--reserved-cpus", "0-1"]
    code = await asyncio.to_thread(run, words)

    said = capsys.readouterr()
    assert code == ExitCode.OK, said.err
    printed = json.loads(said.out)["items"]
    assert {_place(api_object["spec"]): api_object["spec"] for api_object in printed} == published


def _is_whole(server: ApiServerSimulator, pool: str) -> bool:
    pools = [api_object["spec"]["pool"] for api_object in server.objects("ResourceSlice")]
    counts = [each["resourceSliceCount"] for each in pools if each["name"] == pool]
    return bool(counts) and len(counts) == counts[0]


def _place(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Name a slice by its pool and by what comes first in it."""
    first = (*spec.get("devices", ()), *spec.get("sharedCounters", ()), {"name": ""})[0]
    return spec["pool"]["name"], first["name"]
