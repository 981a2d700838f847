"""The controller in a cluster and the ledger of a node that runs Topobus: the node has the last
word, and hears when its devices are free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import yaml

from support.cluster_home import ClusterHome, claim, device_class, node, own_class, pod, slice_of
from support.looks import next_look, until
from support.reading import Reader
from support.real_topology import WatchedTopology, real_topology
from topobus.bus.bus import Bus, Start
from topobus.controller.commit.node_ledgers import Held, NodeLedgers, Overtaken
from topobus.controller.state.cluster.api_server_state import ApiServerState
from topobus.controller.state.cluster_objects import read_object
from topobus.engine.claims.attempts import Attempt
from topobus.engine.claims.objects import Claim
from topobus.formats.kubernetes.pool_slices import pool_slices
from topobus.formats.kubernetes.resource import AllocationResult, DevicesAllocated, GrantedDevice
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages import catalogue
from topobus.formats.messages.codec import encode
from topobus.formats.messages.nouns import CLUSTER
from topobus.formats.messages.plan_messages import PlanRequest
from topobus.simulation.nats_server import NatsServer
from topobus.testing.apiserver import ApiServerSimulator
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.errors import PeerUnavailable
from topobus.values.machine import Machine
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus]

NODE = "demo-node"
GPU = "gpu.topobus.dev"
NEAR = Path(__file__).parents[3] / "examples" / "claims" / "gpu-nic-near.yaml"


def published(inventories: list[Inventory], node_uid: str) -> list[dict[str, Any]]:
    """The slices that the node's gateway would publish, one a class, owned by the node's object."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node_uid, "controller": True}
    devices = [slice_device(device) for inventory in inventories for device in inventory.devices]
    return [
        {
            "kind": "ResourceSlice",
            "metadata": {
                "name": f"{NODE}-{class_of_device(DRIVER, spec.devices[0].name)}",
                "ownerReferences": [owner],
            },
            "spec": msgspec.json.decode(encode(spec)),
        }
        for spec in pool_slices(NODE, devices).values()
    ]


class Rig:
    """A cluster with one node that runs Topobus."""

    def __init__(self, home: ClusterHome, bus: Bus, topology: WatchedTopology) -> None:
        self.home = home
        self.bus = bus
        self.topology = topology

    async def ledger_holds(self, *owners: str) -> None:
        """Wait until the node's ledger holds exactly these claims' devices."""
        await until(
            lambda: (
                sorted(allocation.owner.name for allocation in self.topology.ledger.allocations.values())
                == sorted(owners)
            )
        )


@pytest_asyncio.fixture
async def rig(
    nats_server: NatsServer, bus: Bus, recorded: tuple[Machine, list[Inventory]], tmp_path: Path
) -> AsyncIterator[Rig]:
    """The demo node at the API server and on the bus."""
    machine, inventories = recorded
    async with (
        real_topology(bus, machine, inventories) as topology,
        ApiServerSimulator(token="secret", bookmark_s=0.5) as server,
    ):
        home = ClusterHome(server, nats_server.url, tmp_path)
        uid = server.put(node(NODE))["metadata"]["uid"]
        home.put(*published(inventories, uid))
        home.put(own_class("gpu"), own_class("nic"))
        yield Rig(home, bus, topology)


async def test_ledger_holds_the_devices_before_the_claim_says_so(rig: Rig) -> None:
    """The node is asked to hold exactly what the claim gets, under the claim's own name and one
    operation an attempt.

    It is announced once.
    """
    rig.home.put(claim("c", count=2, device_class_name=GPU), pod("p", "c"))
    async with Reader(rig.bus.follow(catalogue.DECISION, start=Start.ALL)) as decisions, rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")
        events = await decisions.until(lambda items: bool(items))

    uid = rig.home.get("ResourceClaim", "c")["metadata"]["uid"]
    (held,) = rig.topology.ledger.allocations.values()
    assert [request.op_id for request in rig.topology.requests] == [f"allocate-{uid}-1"]
    assert list(held.holdings[0].devices["gpu"]) == rig.home.devices("c")
    assert held.owner == Owner(kind=OwnerKind.CLAIM, namespace="default", name="c", uid=uid)
    assert [received_event.value.verb for received_event in events] == ["place"]


def _evil(**changes: Any) -> dict[str, Any]:
    """A slice of somebody else for our driver and our node's pool, of a newer generation."""
    pool = {"name": NODE, "generation": 999_999, "resourceSliceCount": 1}
    spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [{"name": "gpu-fake"}], **changes}
    return {
        "kind": "ResourceSlice",
        "metadata": {"name": "evil"},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


EVIL = {
    "of nobody": _evil(),
    "of all nodes": _evil(nodeName=None, allNodes=True),
    "of another node": _evil(nodeName="n2"),
    "of labels": _evil(
        nodeName=None,
        nodeSelector={"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}]},
    ),
    "owned": _evil(),
    "owned, of a class that the node has not": _evil(devices=[{"name": "tpu-0"}]),
    "owned, of a class of the other pool": _evil(devices=[{"name": "cpu-0"}]),
    "without memory": _evil(devices=[{"name": "gpu-fake", "attributes": {"model": {"string": "x"}}}]),
}


@pytest.mark.parametrize("what", sorted(EVIL))
async def test_foreign_slices_hide_nothing_of_a_nodes_devices(rig: Rig, what: str) -> None:
    """A slice of somebody else in our pool counts for nothing: claims get the node's devices, also
    those whose selector it would break; it is named.
    """
    evil = EVIL[what]
    if what.startswith("owned"):
        uid = rig.home.get("Node", NODE)["metadata"]["uid"]
        evil["metadata"]["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid, "controller": True}
        ]
    picky = claim("c", count=2, device_class_name=GPU)
    expression = f'device.capacity["{DRIVER}"].memory.isGreaterThan(quantity("1Gi"))'
    picky["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = [{"cel": {"expression": expression}}]
    rig.home.put(node("n2"), evil, picky, pod("p", "c"))
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")
        await rig.home.until(lambda: rig.home.events(NODE) or rig.home.events("n2"), "a word to the node's users")

    assert len(rig.home.devices("c")) == 2
    assert "gpu-fake" not in rig.home.devices("c")
    assert [(reason, "evil" in message) for reason, message in rig.home.events(NODE)] == [
        ("ForeignResourceSlice", True)
    ]


async def test_device_that_went_keeps_nobody_from_the_others(
    rig: Rig, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """While a slice still shows a device that the node has no more, claims get the others."""
    gpus = recorded[1][0]
    fewer = msgspec.structs.replace(gpus, generation=2, devices=gpus.devices[1:])
    await rig.bus.put(catalogue.INVENTORY, fewer, node=NODE, device_class="gpu")
    rig.home.put(claim("c", count=7, device_class_name=GPU), pod("p", "c"))
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")

    assert gpus.devices[0].name not in rig.home.devices("c")


async def test_other_devices_are_tried_when_the_node_refuses(rig: Rig) -> None:
    """A node's no takes the intent back, finalizer included, and the next
    one avoids those devices.
    """
    rig.topology.refuse_next = 2
    # Refused devices are left alone for this long, and a busy machine may take longer for an intent.
    settings = msgspec.structs.replace(rig.home.settings, retry_s=30.0)
    rig.home.put(claim("c", device_class_name=GPU), pod("p", "c"))
    async with rig.home.controller(settings=settings):
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")

    gpus = [device["name"] for device in rig.home.get("ResourceSlice", f"{NODE}-gpu")["spec"]["devices"]]
    assert rig.home.devices("c") == [gpus[2]]
    assert len(rig.topology.requests) == 3
    assert {reason for reason, _ in rig.home.events("p")} == {"RefusedByNode"}


async def test_what_a_device_plugins_pod_holds_is_not_given(rig: Rig) -> None:
    """The ledger knows of devices that no claim has: they count as taken."""
    request = PodRequest(
        owner=Owner(kind=OwnerKind.POD, namespace="default", name="plain", uid="uid-plain"),
        containers=(ContainerRequest(name="c", devices=(DeviceRequest(device_class="gpu", count=7),)),),
    )
    async with rig.home.controller():
        reply = await _placed(rig, request)
        held = {name for container in reply.containers for devices in container.devices.values() for name in devices}
        rig.home.put(claim("c", device_class_name=GPU), pod("p", "c"))
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")

    assert len(held) == 7
    assert not held & set(rig.home.devices("c"))


async def _placed(rig: Rig, request: PodRequest) -> Placement:
    """Place a pod by a plan, which this home answers, too."""
    async with asyncio.timeout(60):
        while True:
            try:
                reply = await rig.bus.ask(
                    catalogue.PLAN, PlanRequest(op_id="plan-1", pod=request), timeout_s=60, node=CLUSTER
                )
            except PeerUnavailable:
                await next_look()  # not ready to plan yet
                continue
            if reply.chosen is not None and isinstance(reply.chosen.result, Placement):
                return reply.chosen.result


async def test_ledger_lets_go_when_the_claim_is_deallocated(rig: Rig) -> None:
    """When kube-controller-manager takes the devices back after the pod, or the claim goes, the
    node hears of it.

    Our note goes, and the finalizer with it.
    """
    rig.home.put(claim("c", device_class_name=GPU), pod("p", "c"), claim("d", device_class_name=GPU), pod("q", "d"))
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p") and not rig.home.gates("q"), "open gates")
        for name in ("p", "q"):
            rig.home.server.remove("Pod", name)
        await rig.ledger_holds("c", "d")
        rig.home.server.release_claims()
        rig.home.server.remove("ResourceClaim", "d")
        await rig.ledger_holds()
        await rig.home.until(
            lambda: "topobus.dev/attempt" not in rig.home.get("ResourceClaim", "c")["metadata"]["annotations"],
            "no note",
        )

    assert rig.home.devices("c") == []
    assert rig.home.get("ResourceClaim", "c")["metadata"].get("finalizers", []) == []


async def test_pods_are_served_when_a_node_with_something_to_let_go_is_frozen(rig: Rig) -> None:
    """A node that does not answer keeps nobody waiting: while it is asked to let go, rounds go on
    and a pod gets devices of another node.
    """
    thaw = rig.topology.asks.hold("release")
    rig.home.put(claim("c", device_class_name=GPU), pod("p", "c"), claim("d", device_class_name=GPU), pod("q", "d"))
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p") and not rig.home.gates("q"), "open gates")
        for name in ("p", "q"):
            rig.home.server.remove("Pod", name)
        rig.home.server.release_claims()
        await rig.topology.asks.wait_for("release", 2)
        rig.home.put(device_class(), node("n2"), slice_of("n2", 1), claim("late"), pod("r", "late"))
        await rig.home.until(lambda: not rig.home.gates("r"), "an open gate")
        assert rig.topology.asks.requests("released") == []
        thaw.set()
        await rig.ledger_holds()


async def test_attempt_is_completed_when_a_replica_died_after_the_ledger(rig: Rig) -> None:
    """What a crash left between the ledger and the status is completed with the same operation and
    the same devices.
    """
    rig.home.put(claim("c", count=3, device_class_name=GPU), pod("p", "c"))
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")
    devices = rig.home.devices("c")
    rig.home.set_status("ResourceClaim", "c", allocation=None, reservedFor=None)
    stored = rig.home.get("Pod", "p")
    rig.home.server.remove("Pod", "p")
    again = pod("p", "c") | {"metadata": {"name": "p", "namespace": "default"}}
    rig.home.put(again)
    note = rig.home.get("ResourceClaim", "c")
    text = note["metadata"]["annotations"]["topobus.dev/attempt"]
    uid = rig.home.get("Pod", "p")["metadata"]["uid"]
    note["metadata"]["annotations"]["topobus.dev/attempt"] = text.replace(stored["metadata"]["uid"], uid)
    rig.home.server.put(note)

    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")

    assert rig.home.devices("c") == devices
    assert len({request.op_id for request in rig.topology.requests}) == 1
    assert len(rig.topology.ledger.allocations) == 1


def _attempt(number: int, *devices: str) -> Attempt:
    """What a claim is about to get on the node."""
    results = tuple(GrantedDevice(request="r", driver=DRIVER, pool=NODE, device=device) for device in devices)
    return Attempt(
        number=number, node=NODE, allocation=AllocationResult(devices=DevicesAllocated(results=results)), pod="uid-p"
    )


def _stored_claim() -> Claim:
    """The claim whose attempts these are."""
    stored = read_object(
        "ResourceClaim", "v1", {**claim("c", device_class_name=GPU, uid="uid-c", resourceVersion="5"), "status": {}}
    )
    assert stored is not None
    return Claim(stored)


async def _place(ledgers: NodeLedgers, rig: Rig, number: int, *devices: str) -> None:
    """Have the node hold devices for the claim."""

    async def is_newest() -> bool:
        return True

    assert isinstance(await ledgers.hold(_stored_claim(), _attempt(number, *devices), is_newest), Held)


def _held(rig: Rig) -> list[str]:
    """Name the devices that the claim has in the node's ledger."""
    return [
        device
        for allocation in rig.topology.ledger.allocations.values()
        for holding in allocation.holdings
        for device in holding.devices["gpu"]
    ]


@pytest.mark.parametrize("who", ["ours", "overtaken", "overtaken-late"])
async def test_stale_holding_is_let_go_only_while_the_attempt_is_the_newest(
    rig: Rig, recorded: tuple[Machine, list[Inventory]], who: str
) -> None:
    """What an older attempt left at the node goes.

    What another replica got there by a newer one stays, also when it comes after the second look.
    """
    first, second, third = [device.name for device in recorded[1][0].devices[:3]]
    state = ApiServerState()
    ledgers = NodeLedgers(rig.bus, state, rig.home.settings.ask_timeout_s)
    await _place(ledgers, rig, 1, first)
    rig.topology.refuse_next = 1

    async def is_newest() -> bool:
        if who == "overtaken-late":
            # Between our second look and our release: another replica lets go of
            # the old one and places the next.
            state.put_ledger(rig.topology.ledger)
            await ledgers.release(_stored_claim(), "before-3")
            await _place(ledgers, rig, 3, third)
        return who != "overtaken"

    answer = await ledgers.hold(_stored_claim(), _attempt(2, second), is_newest)

    assert isinstance(answer, Overtaken) if who == "overtaken" else isinstance(answer, Refusal)
    assert _held(rig) == {"ours": [], "overtaken": [first], "overtaken-late": [third]}[who]


async def test_claim_with_wishes_is_served_near_and_the_node_hears_of_them(
    rig: Rig, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """What a claim asks of its alignment is found by the node's own layout, and goes to the node
    with the devices.
    """
    near = yaml.safe_load(NEAR.read_text(encoding="utf-8"))
    rig.home.put(
        near, claim("taken", device_class_name="nic.topobus.dev"), pod("first", "taken"), pod("p", "gpu-nic-near")
    )
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("p") and not rig.home.gates("first"), "open gates")

    switches = {device.name: device.pcie_switch for inventory in recorded[1] for device in inventory.devices}
    gpu, nic = rig.home.devices("gpu-nic-near")
    asked = next(request.pod for request in rig.topology.requests if request.pod.owner.name == "gpu-nic-near")
    assert switches[gpu] == switches[nic]
    assert nic not in rig.home.devices("taken")
    assert [str(locality) for locality in asked.locality] == ["hard:switch"]


async def test_pods_own_wishes_bring_its_claims_together(rig: Rig, recorded: tuple[Machine, list[Inventory]]) -> None:
    """Two claims of one container whose pod wishes for one switch get devices under it, though
    neither claim says a word.
    """
    nic = claim("nic", device_class_name="nic.topobus.dev")
    uses = {"claims": [{"name": "c0"}, {"name": "c1"}]}
    wishing = pod("p", "gpu", "nic", containers=[{"name": "main", "image": "x", "resources": uses}])
    wishing["metadata"]["annotations"] = {"topobus.dev/locality": "hard:switch"}
    rig.home.put(claim("first", device_class_name="nic.topobus.dev"), pod("q", "first"))
    async with rig.home.controller():
        await rig.home.until(lambda: not rig.home.gates("q"), "the first pod served")
        rig.home.put(claim("gpu", device_class_name=GPU), nic, wishing)
        await rig.home.until(lambda: not rig.home.gates("p"), "an open gate")

    switches = {device.name: device.pcie_switch for inventory in recorded[1] for device in inventory.devices}
    assert switches[rig.home.devices("gpu")[0]] == switches[rig.home.devices("nic")[0]]
