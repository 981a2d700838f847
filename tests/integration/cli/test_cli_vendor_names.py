"""`topobus apply` and `diff` take pods that ask by a vendor's resource names, as `place` and
`simulate` do.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.asking import ask_patiently
from support.cli_process import run_cli
from support.controllers import controller
from support.real_topology import real_topology
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, OBJECT, PLAN
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Inventory
from topobus.values.machine import Machine
from topobus.values.request import Owner, OwnerKind, PodRequest

pytestmark = pytest.mark.integration

_POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  containers:
    - {name: main, image: x, resources: {limits: {RESOURCES}}}
"""


def _write(folder: Path, name: str, resources: str) -> str:
    file = folder / f"{name}.yaml"
    file.write_text(_POD.replace("NAME", name).replace("RESOURCES", resources))
    return str(file)


async def test_apply_schedules_a_pod_that_asks_by_a_vendors_name_when_its_profile_is_named(
    nats_server: NatsServer,
    bus: Bus,
    recorded: tuple[Machine, list[Inventory]],
    topologies: AsyncExitStack,
    tmp_path: Path,
) -> None:
    """The pod is stored with our name, which is told, scheduled, and its GPUs are held.

    A class by its own name as ever; `diff` sees no difference then.
    """
    await topologies.enter_async_context(real_topology(bus, *recorded))
    for inventory in recorded[1]:
        await bus.put(INVENTORY, inventory, node=inventory.node, device_class=inventory.device_class)
    by_vendor, of_class = (
        _write(tmp_path, "vendor", "nvidia.com/gpu: 2"),
        _write(tmp_path, "network", "topobus.dev/nic: 1"),
    )
    nobody = PodRequest(owner=Owner(kind=OwnerKind.POD, name="doctor", uid="doctor"), containers=())
    async with controller(nats_server.url):
        await ask_patiently(
            bus, PLAN, PlanRequest(op_id="o", pod=nobody, node="doctor.invalid", is_dry_run=True), node=CLUSTER
        )
        code, output, noted = await run_cli(
            nats_server, "apply", "-f", by_vendor, "-f", of_class, "--profiles", "nvidia"
        )
        same, _, _ = await run_cli(nats_server, "diff", "-f", by_vendor, "--profiles", "nvidia")
        ledger = await bus.get(LEDGER, node=recorded[0].node)

    stored = await bus.get(OBJECT, kind="pod", namespace="default", name="vendor")
    assert (code, same) == (0, 0), f"{output}\n{noted}"
    assert "nvidia.com/gpu is asked for as topobus.dev/gpu" in noted
    assert stored is not None
    assert stored.value.spec["containers"][0]["resources"] == {"limits": {"topobus.dev/gpu": 2}}
    assert ledger is not None
    held = {allocation.owner.name: allocation.holdings[0].devices for allocation in ledger.value.allocations.values()}
    assert {
        name: {device_class: len(names) for device_class, names in devices.items()} for name, devices in held.items()
    } == {
        "vendor": {"gpu": 2},
        "network": {"nic": 1},
    }


async def test_apply_refuses_one_resource_by_two_names(
    nats_server: NatsServer, bus: Bus, recorded: tuple[Machine, list[Inventory]], tmp_path: Path
) -> None:
    """Which of both counts nobody could say; nothing is stored."""
    for inventory in recorded[1]:
        await bus.put(INVENTORY, inventory, node=inventory.node, device_class=inventory.device_class)
    both = _write(tmp_path, "both", "nvidia.com/gpu: 1, topobus.dev/gpu: 1")

    code, _, noted = await run_cli(nats_server, "apply", "-f", both, "--profiles", "nvidia")

    assert code == 2
    assert "asks for nvidia.com/gpu and topobus.dev/gpu" in noted
    assert await bus.get(OBJECT, kind="pod", namespace="default", name="both") is None


async def test_apply_keeps_a_vendors_name_where_no_gateway_stands_in_for_it(
    nats_server: NatsServer, bus: Bus, recorded: tuple[Machine, list[Inventory]], tmp_path: Path
) -> None:
    """Without a profile nothing is put in its place: what is stored is what was written."""
    for inventory in recorded[1]:
        await bus.put(INVENTORY, inventory, node=inventory.node, device_class=inventory.device_class)
    by_vendor = _write(tmp_path, "vendor", "nvidia.com/gpu: 1")

    _, output, _ = await run_cli(nats_server, "apply", "-f", by_vendor, "--no-wait", "--json")

    assert json.loads(output)["applied"][0]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}
