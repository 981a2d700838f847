"""One device, three doors, one winner: `place`, a device plugin's Allocate and a DRA claim race for
every GPU of a node.
"""

from __future__ import annotations

import asyncio

import pytest

from support.alignment_nodes import container, dgx_facts, pod
from support.running import service
from topobus.bus.bus import Bus
from topobus.engine.ledger.ledger_invariant import check_holders
from topobus.formats.messages.catalogue import ADOPT, INVENTORY, LEDGER, MACHINE, PLACE
from topobus.formats.messages.messages import Adopted, AdoptRequest, PlaceRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.outcome import Placement
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = pytest.mark.integration

NODE = "demo-node"
GPUS = [f"gpu-{number}" for number in range(8)]


async def by_place(bus: Bus, gpu: str, attempt: int) -> Owner | None:
    """A pod that names its device."""
    owner = Owner(kind=OwnerKind.POD, name=f"pod-{gpu}-{attempt}", uid=f"{gpu}-{attempt}")
    wanted = ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=1, names=(gpu,)),))
    reply = await bus.ask(
        PLACE,
        PlaceRequest(op_id=f"place-{gpu}-{attempt}", pod=PodRequest(owner=owner, containers=(wanted,))),
        node=NODE,
    )
    return owner if isinstance(reply.result, Placement) else None


async def by_kubelet(bus: Bus, gpu: str, attempt: int) -> Owner | None:
    """Allocate; a device has one owner at this door, however often kubelet asks."""
    owner = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="kubelet", name="topobus.dev/gpu", uid=gpu)
    reply = await bus.ask(
        ADOPT, AdoptRequest(op_id=f"allocate-{gpu}-{attempt}", owner=owner, devices={"gpu": (gpu,)}), node=NODE
    )
    return owner if isinstance(reply.result, Adopted) else None


async def by_claim(bus: Bus, gpu: str, attempt: int) -> Owner | None:
    """A claim that is prepared."""
    owner = Owner(kind=OwnerKind.CLAIM, name=f"claim-{gpu}-{attempt}", uid=f"{gpu}-{attempt}")
    request = AdoptRequest(op_id=f"prepare-{gpu}-{attempt}", owner=owner, devices={"gpu": (gpu,)}, is_prepared=True)
    reply = await bus.ask(ADOPT, request, node=NODE)
    return owner if isinstance(reply.result, Adopted) else None


@pytest.mark.parametrize("instances", [1, 2], ids=["one-topology", "two-topologies"])
async def test_every_device_has_one_winner_when_all_doors_ask_at_once(
    nats_server: NatsServer, bus: Bus, instances: int
) -> None:
    """Whoever is first has the device, everybody else is refused, and what was answered is what the
    ledger holds.
    """
    machine, inventories = dgx_facts()
    await bus.put(MACHINE, machine, node=NODE)
    for device_class, inventory in inventories.items():
        await bus.put(INVENTORY, inventory, node=NODE, device_class=device_class)
    async with service("topology", nats_server.url) as first:
        await first.until_ready()
        if instances == 2:
            async with service("topology", nats_server.url) as second:
                await second.until_ready()
                won = await race(bus)
        else:
            won = await race(bus)
        late = await bus.ask(PLACE, PlaceRequest(op_id="late", pod=pod("late", container(gpu=1))), node=NODE)
        entry = await bus.get(LEDGER, node=NODE)

    assert entry is not None
    check_holders(entry.value)
    held = {
        name: allocation.owner
        for allocation in entry.value.allocations.values()
        for h in allocation.holdings
        for name in h.devices.get("gpu", ())
    }
    assert sorted(held) == GPUS
    assert {gpu: {held[gpu]} for gpu in GPUS} == won
    assert not isinstance(late.result, Placement)


async def race(bus: Bus) -> dict[str, set[Owner]]:
    """Ask for every GPU through every door twice, all at once: who was told yes, by GPU."""
    asks = [(gpu, door, attempt) for attempt in range(2) for gpu in GPUS for door in (by_place, by_kubelet, by_claim)]
    answers = await asyncio.gather(*(door(bus, gpu, attempt) for gpu, door, attempt in asks))
    won: dict[str, set[Owner]] = {}
    for (gpu, _, _), owner in zip(asks, answers, strict=True):
        if owner is not None:
            won.setdefault(gpu, set()).add(owner)
    return won
