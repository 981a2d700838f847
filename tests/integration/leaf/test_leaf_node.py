"""A node with a server of its own, as processes: it places, prepares, releases and tells of sick
devices while it is cut off, and the hub has all of it afterwards.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.alignment_nodes import container, pod
from support.asking import ask_patiently
from support.leaf_pair import leaf_pair, version_of
from support.looks import next_look
from support.reading import Reader
from support.relays import until_equal
from support.running import NODE, Service, all_services, readiness_report, service, system_settings, until_all_ready
from topobus.bus.bus import Bus
from topobus.formats.messages.catalogue import (
    ADOPT,
    COMMIT,
    HEALTH,
    INVENTORY,
    PLACE,
    PLAN,
    PREPARE,
    RELEASE,
    UNPREPARE,
)
from topobus.formats.messages.messages import (
    Adopted,
    AdoptRequest,
    CommitRequest,
    PlaceRequest,
    Prepared,
    PrepareRequest,
    ReleaseRequest,
    UnprepareRequest,
)
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.process.config import NatsSettings
from topobus.simulation.machines import build
from topobus.values.errors import PeerUnavailable
from topobus.values.health import HealthState
from topobus.values.outcome import Placement
from topobus.values.request import Owner, OwnerKind

pytestmark = pytest.mark.integration

_NODE_SERVICES = ("discovery", "gpu", "nic", "cpu", "topology", "gateway", "relay")
_CLAIM = Owner(kind=OwnerKind.CLAIM, namespace="default", name="training", uid="claim-1")
_POD = pod("trainer", container(cpus=8, gpu=1))


def _settings(folder: Path) -> dict[str, str]:
    return {
        **system_settings(folder),
        "TOPOBUS_ALL__NATS__PROVISIONER": "topology",
        "TOPOBUS_RELAY__CHECK_S": "1",
        "TOPOBUS_RELAY__RETRY_S": "0.5",
    }


async def _is_told(running: Service, remark: str) -> None:
    """Wait until the readiness report of a service has a remark."""
    async with asyncio.timeout(90):
        while remark not in await readiness_report(running.port):
            await next_look()


async def test_node_works_on_and_the_hub_catches_up_when_it_was_cut_off(nats_binary: Path) -> None:
    """Cut off, the node's doors answer as ever, and whoever asks it at the hub is told at once that
    nobody is there.

    Joined again, the hub has all of it, each event once.
    """
    if version_of(nats_binary) < (2, 10):
        pytest.skip("a node's own server is 2.10 or later")
    async with AsyncExitStack() as stack:
        # A path so short that sockets below it fit.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tb-")))
        machine = build("dgx", folder / "machine")
        pair = await stack.enter_async_context(leaf_pair(nats_binary))
        hub = await stack.enter_async_context(Bus.session(NatsSettings(url=pair.hub.url), name="topobus-cli"))
        await stack.enter_async_context(service("controller", pair.hub.url))
        node = await stack.enter_async_context(
            all_services(pair.leaf.url, folder, order=_NODE_SERVICES, settings=_settings(folder))
        )
        leaf = await stack.enter_async_context(
            Bus.session(NatsSettings(url=pair.leaf.url, provisioner="topology"), name="gateway")
        )
        await until_all_ready(node)
        await until_equal(hub, leaf)
        gpus = await leaf.get(INVENTORY, node=NODE, device_class="gpu")
        nics = await leaf.get(INVENTORY, node=NODE, device_class="nic")
        assert gpus is not None
        assert nics is not None

        pair.link.cut()
        await _is_told(node["relay"], "cut off since")
        with pytest.raises(PeerUnavailable, match="no service answers"):
            await hub.ask(PLACE, PlaceRequest(op_id="from-hub", pod=_POD, is_dry_run=True), node=NODE)
        await _work(leaf, gpus.value.devices[-1].name)
        nic = next(device for device in nics.value.devices if str(device.pci) == machine.pci("connectx-7")[0])
        async with Reader(leaf.follow(HEALTH, node=NODE, device_class="nic", device=nic.name)) as reader:
            machine.set_carrier(str(nic.pci), is_up=False)
            await reader.until(lambda items: bool(items) and items[-1].value.health.state is HealthState.UNHEALTHY)

        pair.link.join()
        await until_equal(hub, leaf)

        # The hub's controller plans with the hub's copies, and the node is asked over the link.
        plan = await ask_patiently(
            hub, PLAN, PlanRequest(op_id="plan-1", pod=pod("second", container(cpus=8, gpu=1))), node="_"
        )
        assert plan.chosen is not None
        assert isinstance(plan.chosen.result, Placement)
        await until_equal(hub, leaf)

        node["relay"].process.kill()
        await node["relay"].process.wait()
        await _work(leaf, gpus.value.devices[-2].name, suffix="again")
        relay = await stack.enter_async_context(service("relay", pair.leaf.url, _settings(folder)))
        await relay.until_ready()
        await until_equal(hub, leaf)


async def _work(leaf: Bus, gpu: str, suffix: str = "") -> None:
    """Do what the node's doors do, each step acknowledged: place a pod and keep it, adopt a claim's
    device, prepare it, and undo both.
    """
    placed = await leaf.ask(PLACE, PlaceRequest(op_id=f"place{suffix}", pod=_POD), node=NODE)
    assert isinstance(placed.result, Placement)
    await leaf.ask(COMMIT, CommitRequest(op_id=f"commit{suffix}", owner=_POD.owner), node=NODE)
    adopted = await leaf.ask(
        ADOPT, AdoptRequest(op_id=f"adopt{suffix}", owner=_CLAIM, devices={"gpu": (gpu,)}), node=NODE
    )
    assert isinstance(adopted.result, Adopted)
    prepared = await leaf.ask(
        PREPARE, PrepareRequest(op_id=f"prepare{suffix}", owner=_CLAIM, devices=(gpu,)), node=NODE, device_class="gpu"
    )
    assert isinstance(prepared.result, Prepared)
    await leaf.ask(
        UNPREPARE,
        UnprepareRequest(op_id=f"unprepare{suffix}", owner=_CLAIM, devices=(gpu,)),
        node=NODE,
        device_class="gpu",
    )
    for owner in (_CLAIM, _POD.owner):
        released = await leaf.ask(RELEASE, ReleaseRequest(op_id=f"release-{owner.uid}{suffix}", owner=owner), node=NODE)
        assert released.refusal is None
        assert released.devices


async def test_relay_refuses_the_nodes_server_when_it_is_too_old(nats_binary: Path, own_nats_server: object) -> None:
    """2.9 as a node's own server is an operator's mistake: what was got, what is wanted, exit
    status 78.
    """
    if version_of(nats_binary) >= (2, 10):
        pytest.skip("this server may be a node's own")
    url = getattr(own_nats_server, "url", "")
    async with service("relay", url, {"TOPOBUS_ALL__NATS__PROVISIONER": "topology"}) as relay:
        status = await asyncio.wait_for(relay.process.wait(), 90)

    assert status == os.EX_CONFIG
    assert "before 2.10 an acknowledged write is not on the disk" in "\n".join(relay.raw)
