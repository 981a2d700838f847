"""`topobus holders`, and what other commands say of a pod that holds devices and is not stored."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from support.asking import ask_patiently
from support.cli_process import run_cli
from support.garbage import write_garbage
from support.real_topology import real_topology
from topobus.bus.bus import Bus
from topobus.cli.help.value_names import names_of
from topobus.cli.options import BusOptions
from topobus.formats.messages.catalogue import INVENTORY, LEDGER, OBJECT, PLACE
from topobus.formats.messages.messages import ApiObject, PlaceRequest
from topobus.simulation.nats_server import NatsServer
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.ledger import Allocation, Holding, Ledger
from topobus.values.machine import Machine
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = pytest.mark.integration

_POD = Owner(kind=OwnerKind.POD, name="trainer", uid="u1")
_USER = Owner(kind=OwnerKind.POD, namespace="prod", name="web", uid="")


async def _publish(bus: Bus) -> None:
    """Two nodes: on one a placed pod and what kubelet gave to another pod, on the other a claim
    with two pods.
    """
    by_plugin = Owner(kind=OwnerKind.DEVICE_PLUGIN, namespace="", name="topobus.dev/nic", uid="x")
    claim = Owner(kind=OwnerKind.CLAIM, name="fast", uid="u2")
    held = {
        "n1": (
            Allocation(
                owner=_POD,
                decision_id="d-1",
                holdings=(Holding(container="a", devices={"gpu": ("gpu-0",)}, cpus=CpuSet(0, 1)),),
            ),
            Allocation(owner=by_plugin, pods=(_USER,), holdings=(Holding(devices={"nic": ("nic-0",)}),)),
        ),
        "n2": (Allocation(owner=claim, pods=(_USER,), holdings=(Holding(devices={"gpu": ("gpu-7", "gpu-3")}),)),),
    }
    for node, allocations in held.items():
        ledger = Ledger(node=node, allocations={allocation.owner.key: allocation for allocation in allocations})
        await bus.put(LEDGER, ledger, node=node)


def _words(line: str) -> str:
    return " ".join(line.split())


async def test_holders_lists_every_way_on_every_node_when_it_is_asked(nats_server: NatsServer, bus: Bus) -> None:
    """One row an owner: the pod where it is known, what it holds, and who uses it."""
    await _publish(bus)

    code, output, _ = await run_cli(nats_server, "holders")

    assert code == 0
    assert [_words(line) for line in output.splitlines()[1:]] == [
        "pod default/trainer n1 1 gpu: gpu-0; 2 cpu: 0-1 -",
        "pod prod/web n1 1 nic: nic-0 -",
        "claim default/fast n2 2 gpu: gpu-3 gpu-7 prod/web",
    ]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--node", "n2"), ["claim/fast"]),
        (("-n", "prod"), ["pod/web"]),
        (("-l", "way=place"), ["pod/trainer"]),
    ],
    ids=["node", "namespace", "selector"],
)
async def test_holders_are_narrowed_when_options_say_so(
    nats_server: NatsServer, bus: Bus, arguments: tuple[str, ...], wanted: list[str]
) -> None:
    """By node, by the holder's namespace, by a selector."""
    await _publish(bus)

    _, output, _ = await run_cli(nats_server, "holders", "-o", "json", *arguments)

    def shown(holder: dict[str, Any]) -> str:
        owner = holder["allocation"]["owner"]
        if owner["kind"] == OwnerKind.DEVICE_PLUGIN:
            (owner,) = holder["allocation"]["pods"]
        return f"{owner['kind']}/{owner['name']}"

    assert [shown(holder) for holder in json.loads(output)["holders"]] == wanted


async def test_pod_that_is_not_stored_is_described_and_counted_when_it_holds_devices(
    nats_server: NatsServer, bus: Bus
) -> None:
    """`place` stores no object: `describe` answers from the ledger, and
    `get` says where to look.
    """
    await _publish(bus)

    code, output, noted = await run_cli(nats_server, "describe", "pod", "trainer")
    _, _, listed = await run_cli(nats_server, "get", "pods")
    missing, _, why = await run_cli(nats_server, "describe", "pod", "nobody")

    assert code == 0
    assert "pod default/trainer: placed by `topobus place`, not stored" in output
    assert "`topobus release pod default/trainer` releases its devices" in noted
    assert "1 pod holds devices and is not stored: `topobus holders`" in listed
    assert (missing, "there is no pod default/nobody" in why) == (1, True)


async def test_pods_that_can_be_released_are_completed_by_their_names(nats_server: NatsServer, bus: Bus) -> None:
    """Those that hold something by themselves, with their namespaces.

    What a claim or kubelet gave is let go of elsewhere.
    """
    await _publish(bus)

    names = await asyncio.to_thread(names_of, "holders", BusOptions(nats=nats_server.url))

    assert names == ["default/trainer"]


async def test_holders_and_pod_know_each_other_when_only_the_claim_says_it(nats_server: NatsServer, bus: Bus) -> None:
    """Without a kubelet the ledger names no pod of a claim, and the pod none of its devices: what
    the claim is reserved for stands in its status.
    """
    owner = Owner(kind=OwnerKind.CLAIM, name="fast", uid="u2")
    await bus.put(
        LEDGER,
        Ledger(
            node="n1",
            allocations={owner.key: Allocation(owner=owner, holdings=(Holding(devices={"gpu": ("gpu-3",)}),))},
        ),
        node="n1",
    )
    device = Device(name="gpu-3", device_class="gpu", numa_nodes=NodeSet(1))
    await bus.put(
        INVENTORY,
        Inventory(node="n1", device_class="gpu", generation=1, devices=(device,)),
        node="n1",
        device_class="gpu",
    )
    result = {"request": "two", "driver": "topobus.dev", "pool": "n1", "device": "gpu-3"}
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": name, "uid": name} for name in ("web", "batch")],
    }
    metadata = {"name": "fast", "namespace": "default", "uid": "u2"}
    claim = ApiObject(api_version="resource.k8s.io/v1", kind="ResourceClaim", metadata=metadata, spec={}, status=status)
    await bus.put(OBJECT, claim, kind="resourceclaim", namespace="default", name="fast")
    spec = {
        "nodeName": "n1",
        "resourceClaims": [{"name": "card", "resourceClaimName": "fast"}, {"name": "later", "resourceClaimName": "no"}],
    }
    pod = ApiObject(
        api_version="v1", kind="Pod", metadata={"name": "web", "namespace": "default", "uid": "web"}, spec=spec
    )
    await bus.put(OBJECT, pod, kind="pod", namespace="default", name="web")

    _, listed, _ = await run_cli(nats_server, "holders")
    _, described, _ = await run_cli(nats_server, "describe", "pod", "web", "-o", "json")
    _, shown, _ = await run_cli(nats_server, "describe", "pod", "web")

    (granted,) = json.loads(described)["devices"]
    assert _words(listed.splitlines()[1]) == "claim default/fast n1 1 gpu: gpu-3 default/batch, default/web"
    assert (granted["request"], granted["device"], granted["pool"], granted["numa_nodes"]) == (
        "card/two",
        "gpu-3",
        "n1",
        "1",
    )
    assert "card/two" in shown


async def test_claim_without_an_object_is_named_by_doctor_and_freed_by_release(
    nats_server: NatsServer, bus: Bus, recorded: tuple[Machine, list[Inventory]], topologies: AsyncExitStack
) -> None:
    """After an older copy of the store: who holds without an object is told, and let go of by the
    command that is named; a stored claim is not.
    """
    topology = await topologies.enter_async_context(real_topology(bus, *recorded))
    for name in ("lost", "there"):
        owner = Owner(kind=OwnerKind.CLAIM, name=name, uid=f"u-{name}")
        devices = (DeviceRequest(device_class="gpu", count=1),)
        pod = PodRequest(owner=owner, containers=(ContainerRequest(name="r", devices=devices),))
        await ask_patiently(bus, PLACE, PlaceRequest(op_id=f"place-{name}", pod=pod), node=topology.ledger.node)
    stored = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": "there", "namespace": "default", "uid": "u-there"},
    )
    await bus.put(OBJECT, stored, kind="resourceclaim", namespace="default", name="there")

    _, checked, _ = await run_cli(nats_server, "doctor", "--problems", "--json")
    refused, _, why = await run_cli(nats_server, "release", "claim", "there")
    code, output, _ = await run_cli(nats_server, "release", "claim", "lost")
    again, _, _ = await run_cli(nats_server, "release", "claim", "lost")
    await write_garbage(bus, OBJECT, kind="resourceclaim", namespace="default", name="there")
    unread, _, said = await run_cli(nats_server, "release", "claim", "there")

    (finding,) = [finding for finding in json.loads(checked)["findings"] if finding["what"] == "holders"]
    assert "1 holder has no object: claim default/lost on demo-node" in finding["found"]
    assert (refused, "topobus delete claim there -n default" in why) == (2, True)
    assert (code, output.strip()) == (0, "claim default/lost released 1 gpu on demo-node")
    assert again == 1
    assert (unread, "cannot be read" in said, "topobus delete claim there -n default" in said) == (2, True, True)
    assert [allocation.owner.name for allocation in topology.ledger.allocations.values()] == ["there"]
