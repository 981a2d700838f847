"""Stored pods on a real server: a node for each, claims allocated and reserved with them, and all of it let go again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from support.mortal_bus import died_or, mortal_bus
from support.real_topology import WatchedTopology, real_topology
from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject, PlaceRequest
from topobus.controller.claims.reservations import AllocationMode
from topobus.controller.config import ControllerSettings
from topobus.controller.service import serve
from topobus.domain.device import Inventory
from topobus.domain.machine import Machine
from topobus.domain.outcome import Refusal
from topobus.domain.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.kubernetes.api import (
    admit,
    ask_deletion,
    object_parts,
    parse_manifest,
)
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.runtime.bus import Bus, Change, Conflict, Start
from topobus.runtime.clock import SystemClock
from topobus.runtime.config import NatsSettings
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.simulation.machines import build
from topobus.simulation.nats_server import NatsServer
from topobus.sysfs.machine import read_machine
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.testing.fates import FatedBus
from topobus.testing.reading import Reader

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2)
DELAYED = msgspec.structs.replace(SETTINGS, claim_allocation=AllocationMode.DELAYED)
NOW = "2026-01-01T00:00:00Z"


class Place:
    """Recorded nodes on a bus, and a user of the API."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], nodes: dict[str, WatchedTopology]) -> None:
        self.bus = bus
        self.objects = objects
        self.nodes = nodes
        self._made = 0

    async def apply(self, manifest: str) -> None:
        """Store the objects of a manifest as the CLI does."""
        for api_object in parse_manifest(manifest, where="test.yaml"):
            self._made += 1
            stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}-{self._made}", now=NOW)
            await self.bus.compare_and_set(catalogue.OBJECT, stored, 0, **object_parts(api_object))

    async def until(self, kind: str, name: str, is_enough: Callable[[ApiObject | None], bool], timeout_s: float = 60) -> ApiObject | None:
        """Wait until the newest version of an object satisfies the test; None stands for a deleted one."""

        def newest(items: list[Change[ApiObject]]) -> tuple[bool, ApiObject | None]:
            changes = [change for change in items if (change.parts.get("kind"), change.parts.get("name")) == (kind, name)]
            return bool(changes), changes[-1].value if changes else None

        await self.objects.until(lambda items: newest(items)[0] and is_enough(newest(items)[1]), timeout_s=timeout_s)
        return newest(self.objects.items)[1]

    async def scheduled(self, name: str) -> str:
        """Wait until a pod has its node."""
        api_object = await self.until("pod", name, lambda value: value is not None and condition(value).get("status") == "True")
        assert api_object is not None
        return str(api_object.spec["nodeName"])

    async def told(self, kind: str, name: str, reason: str) -> str:
        """Wait until an object has a condition with this reason; gives the message."""
        api_object = await self.until(kind, name, lambda value: value is not None and condition(value).get("reason") == reason)
        assert api_object is not None
        return str(condition(api_object)["message"])

    async def claim(self, name: str) -> ApiObject:
        """Read a claim as it is now."""
        entry = await self.bus.get(catalogue.OBJECT, kind="resourceclaim", namespace="default", name=name)
        assert entry is not None
        return entry.value

    async def delete(self, kind: str, name: str) -> None:
        """Delete an object as the CLI does: mark it, or remove it when nothing holds it."""
        parts = {"kind": kind, "namespace": "default", "name": name}
        while (entry := await self.bus.get(catalogue.OBJECT, **parts)) is not None:
            marked = ask_deletion(entry.value, now=NOW)
            if marked is None:
                if isinstance(await self.bus.compare_and_delete(catalogue.OBJECT, entry.revision, **parts), Conflict):
                    continue
            elif isinstance(await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts), Conflict):
                continue
            return

    def held(self, node: str) -> dict[str, list[str]]:
        """List what a node's ledger holds: owner to GPUs."""
        allocations = self.nodes[node].ledger.allocations
        return {
            key.rpartition("/")[0]: sorted(name for holding in allocation.holdings for name in holding.devices.get("gpu", ()))
            for key, allocation in sorted(allocations.items())
        }


def condition(api_object: ApiObject) -> dict[str, Any]:
    """Give the first condition of an object."""
    found: dict[str, Any] = (api_object.status.get("conditions") or [{}])[0]
    return found


def claim(name: str, count: int, **annotations: str) -> str:
    """Write a claim for some GPUs."""
    notes = ", ".join(f'"topobus.dev/{key.replace("_", "-")}": {value}' for key, value in annotations.items())
    return f"""
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: {name}, annotations: {{{notes}}}}}
spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: gpu.topobus.dev, count: {count}}}}}]}}}}
"""


def pod(name: str, *claims: str, gpus: int = 0, template: str = "", extra: str = "") -> str:
    """Write a pod with claims by name, one by template, and GPUs of its own."""
    entries = [f"{{name: c{index}, resourceClaimName: {each_claim}}}" for index, each_claim in enumerate(claims)]
    entries += [f"{{name: made, resourceClaimTemplateName: {template}}}"] if template else []
    limits = f"{{topobus.dev/gpu: {gpus}}}" if gpus else "{}"
    return f"""
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  containers: [{{name: main, resources: {{limits: {limits}}}}}]
  resourceClaims: [{", ".join(entries)}]
{extra}
"""


TEMPLATE = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two-gpus}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev, count: 2}}]}}}
"""
SMALL_TEMPLATE = TEMPLATE.replace("two-gpus", "one-gpu").replace("count: 2", "count: 1")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[Inventory]]:
    """The demo machine with what its GPU and NIC drivers find."""
    root = tmp_path_factory.mktemp("dgx")
    build("dgx", root)
    tree = Tree(HardwareSettings(root=str(root)))
    machine = read_machine(tree, "n1")
    gpus = sorted(NvidiaDriver().discover(tree, machine), key=lambda device: device.name)
    nics = sorted(PciNetdevDriver().discover(tree, machine), key=lambda device: device.name)
    return machine, [
        Inventory(node="n1", device_class="gpu", generation=1, devices=tuple(gpus)),
        Inventory(node="n1", device_class="nic", generation=1, devices=tuple(nics)),
    ]


@asynccontextmanager
async def controller(url: str, settings: ControllerSettings = SETTINGS, *, step: int = 0) -> AsyncIterator[asyncio.Event]:
    """Run one replica; with a step it dies before its write or ask of that number, and the event says that it did."""
    async with Bus.session(NatsSettings(url=url), name="controller") as real:
        bus = mortal_bus(real, step, is_done=False) if step else real
        runtime = Runtime(
            name="controller", node="central", bus=bus, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry()
        )
        task = asyncio.create_task(serve(settings, runtime))
        try:
            yield bus.fates.died if isinstance(bus, FatedBus) else asyncio.Event()
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # checked just before


@pytest_asyncio.fixture
async def home(bus: Bus, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]) -> AsyncIterator[Place]:
    """Two nodes of eight GPUs each, no controller yet."""
    nodes: dict[str, WatchedTopology] = {}
    for name in ("n1", "n2"):
        machine = msgspec.structs.replace(recorded[0], node=name)
        inventories = [msgspec.structs.replace(inventory, node=name) for inventory in recorded[1]]
        nodes[name] = await topologies.enter_async_context(real_topology(bus, machine, inventories))
    async with Reader(bus.watch(catalogue.OBJECT)) as objects:
        yield Place(bus, objects, nodes)


@pytest_asyncio.fixture
async def served(home: Place, nats_server: NatsServer) -> AsyncIterator[Place]:
    """Two nodes with a controller."""
    async with controller(nats_server.url):
        yield home


async def test_pod_gets_node_claims_and_own_devices_when_all_fit(served: Place) -> None:
    """A pod with a template, a named claim and GPUs of its own gets all of them on one node, reserved for it, and nothing twice."""
    await served.apply(TEMPLATE)
    await served.apply(claim("named", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("trainer", "named", gpus=3, template="two-gpus"))

    node = await served.scheduled("trainer")

    held = served.held(node)
    (made,) = [name for name in held if name.startswith("claim/default/trainer-made-")]
    assert {name: len(devices) for name, devices in held.items()} == {made: 2, "claim/default/named": 1, "pod/default/trainer": 3}
    assert len({device for devices in held.values() for device in devices}) == 6
    for name in (made.rpartition("/")[2], "named"):
        users = (await served.claim(name)).status["reservedFor"]
        assert [(user["resource"], user["name"]) for user in users] == [("pods", "trainer")]


async def test_pod_lets_go_of_everything_when_it_is_deleted(served: Place) -> None:
    """Own devices, template claims and reservations go with the pod; a delayed claim gives its devices back, an immediate one keeps them."""
    await served.apply(TEMPLATE)
    await served.apply(claim("late", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(claim("early", 1, allocation_mode="Immediate"))
    await served.apply(pod("trainer", "late", "early", gpus=1, template="two-gpus"))
    node = await served.scheduled("trainer")

    await served.delete("pod", "trainer")
    await served.until("pod", "trainer", lambda value: value is None)
    await served.told("resourceclaim", "late", "WaitsForPod")
    await served.until("resourceclaim", "early", lambda value: value is not None and not value.status.get("reservedFor"))

    assert {name: len(devices) for name, devices in served.held(node).items()} == {"claim/default/early": 1}
    names = [entry.value.metadata["name"] for entry in await served.bus.list(catalogue.OBJECT, kind="resourceclaim")]
    assert sorted(names) == ["early", "late"]


async def test_pod_leaves_nothing_when_its_object_is_removed_by_force(served: Place) -> None:
    """A pod deleted past its finalizer leaves no devices held, no reservation and no claim of its own; nor when no controller saw it go."""
    await served.apply(TEMPLATE)
    await served.apply(claim("late", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("lost", "late", gpus=2, template="two-gpus"))
    node = await served.scheduled("lost")

    await served.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="lost")

    await served.told("resourceclaim", "late", "WaitsForPod")
    await served.apply(pod("next", gpus=8, extra=f"  nodeName: {node}"))
    assert await served.scheduled("next") == node


async def test_controller_lets_go_of_a_pod_that_was_removed_while_it_was_away(home: Place, nats_server: NatsServer) -> None:
    """The store's history is the evidence for a controller that was not there; a pod that was never stored keeps what it holds."""
    owner = Owner(kind=OwnerKind.POD, name="placed-by-hand", uid="somebody")
    asked = PodRequest(owner=owner, containers=(ContainerRequest(name="c", devices=(DeviceRequest(device_class="gpu", count=1),)),))
    await home.bus.ask(catalogue.PLACE, PlaceRequest(op_id="by-hand", pod=asked), node="n1")
    await home.apply(pod("lost", gpus=2, extra="  nodeName: n1"))
    async with controller(nats_server.url):
        await home.scheduled("lost")
    await home.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="lost")

    async with controller(nats_server.url):
        await home.apply(pod("next", gpus=7, extra="  nodeName: n1"))
        await home.scheduled("next")

    assert {name: len(devices) for name, devices in home.held("n1").items()} == {"pod/default/next": 7, "pod/default/placed-by-hand": 1}


async def test_delayed_claim_waits_when_no_pod_uses_it(home: Place, nats_server: NatsServer) -> None:
    """With delayed allocation as the setting a claim says that it waits for a pod; the pod's coming allocates it; Immediate in the claim itself wins."""
    async with controller(nats_server.url, DELAYED):
        await home.apply(claim("later", 1))
        await home.apply(claim("now", 1, allocation_mode="Immediate"))
        await home.told("resourceclaim", "later", "WaitsForPod")
        await home.until("resourceclaim", "now", lambda value: value is not None and bool(value.status.get("allocation")))
        assert "allocation" not in (await home.claim("later")).status

        await home.apply(pod("user", "later"))
        await home.scheduled("user")

        assert (await home.claim("later")).status["allocation"]


async def test_claim_is_shared_when_two_pods_name_it(served: Place) -> None:
    """Two pods of one claim run on one node; the claim stays until the last of them is gone."""
    await served.apply(claim("shared", 2, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("one", "shared", gpus=1))
    first = await served.scheduled("one")
    await served.apply(pod("two", "shared", gpus=1))
    second = await served.scheduled("two")
    assert first == second
    assert [user["name"] for user in (await served.claim("shared")).status["reservedFor"]] == ["one", "two"]

    await served.delete("pod", "one")
    await served.until("pod", "one", lambda value: value is None)
    assert (await served.claim("shared")).status["allocation"]
    await served.delete("pod", "two")

    await served.told("resourceclaim", "shared", "WaitsForPod")
    assert served.held(first) == {}


NETWORK = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: volume}
spec: {selectors: [{cel: {expression: 'device.driver == "volume.example.com"'}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: volumes}
spec:
  driver: volume.example.com
  pool: {name: volumes, generation: 1, resourceSliceCount: 1}
  allNodes: true
  devices: [{name: vol-0}, {name: vol-1}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: volume, annotations: {topobus.dev/allocation-mode: WaitForFirstConsumer}}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: volume}}]}}
"""


async def test_claim_of_the_network_is_shared_by_pods_on_two_nodes(served: Place) -> None:
    """A device that every node reaches binds no pod to a node: two pods share it, each where its own devices are, and it is given back after the second."""
    await served.apply(NETWORK)
    await served.apply(pod("one", "volume", gpus=8))
    await served.apply(pod("two", "volume", gpus=8))

    assert {await served.scheduled("one"), await served.scheduled("two")} == {"n1", "n2"}
    shared = await served.claim("volume")
    assert "nodeSelector" not in shared.status["allocation"]
    assert [user["name"] for user in shared.status["reservedFor"]] == ["one", "two"]
    for name in ("one", "two"):
        await served.delete("pod", name)
    await served.told("resourceclaim", "volume", "WaitsForPod")
    assert {**served.held("n1"), **served.held("n2")} == {}


async def test_allocation_is_taken_back_when_the_pod_fits_only_elsewhere(served: Place) -> None:
    """A claim allocated at once on a node that the pod cannot use is allocated again where the pod fits."""
    await served.apply(claim("card", 1, allocation_mode="Immediate"))
    await served.until("resourceclaim", "card", lambda value: value is not None and bool(value.status.get("allocation")))
    assert served.held("n1") == {"claim/default/card": ["gpu-0000-18-00-0"]}
    await served.apply(pod("big", "card", gpus=1, extra="  nodeSelector: {kubernetes.io/hostname: n2}"))

    assert await served.scheduled("big") == "n2"

    assert served.held("n1") == {}
    assert {name: len(devices) for name, devices in served.held("n2").items()} == {"claim/default/card": 1, "pod/default/big": 1}


async def test_allocation_stays_when_another_pod_has_reserved_it(served: Place) -> None:
    """A claim in use is never taken away; the pod is told where it is and waits, and goes on when the other is gone."""
    await served.apply(claim("card", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("first", "card", extra="  nodeName: n1"))
    await served.scheduled("first")
    await served.apply(pod("second", "card", extra="  nodeName: n2"))

    message = await served.told("pod", "second", "Unschedulable")
    assert "node n2: ResourceClaim default/card is allocated for node n1" in message
    assert len(served.held("n1")) == 1
    await served.delete("pod", "first")

    assert await served.scheduled("second") == "n2"


async def test_pod_tries_another_node_when_one_refuses(served: Place) -> None:
    """A node that said yes and then refuses is left alone for a while; the claim moves along."""
    await served.apply(claim("card", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("trainer", gpus=1, extra="  schedulingGates: [{name: hold}]"))
    await served.told("pod", "trainer", "SchedulingGated")
    served.nodes["n1"].refuse_next = 1000
    await served.apply(pod("mover", "card", gpus=1))

    assert await served.scheduled("mover") == "n2"

    assert served.held("n1") == {}
    assert {name: len(devices) for name, devices in served.held("n2").items()} == {"claim/default/card": 1, "pod/default/mover": 1}


async def test_pod_waits_quietly_when_its_claims_take_what_it_needs_itself(served: Place) -> None:
    """Eight GPUs of its own and one by claim fit on no node of eight: it is told so and its claim is not moved around for ever."""
    await served.apply(claim("one-more", 1, allocation_mode="WaitForFirstConsumer"))
    await served.apply(pod("glutton", "one-more", gpus=8))

    message = await served.told("pod", "glutton", "Unschedulable")

    assert "node n1" in message
    assert "node n2" in message
    writes = [change for change in served.objects.items if change.parts.get("name") == "one-more"]
    assert "allocation" not in (await served.claim("one-more")).status
    assert len(writes) <= 3


async def test_pod_is_told_per_node_when_it_fits_nowhere(served: Place) -> None:
    """The pod's condition and its claim's name what each node lacks; when something is freed the pod goes on."""
    await served.apply(claim("full", 6, allocation_mode="Immediate"))
    await served.until("resourceclaim", "full", lambda value: value is not None and bool(value.status.get("allocation")))
    await served.apply(claim("all", 8))
    await served.apply(pod("greedy", "all", extra="  nodeName: n1"))

    message = await served.told("pod", "greedy", "Unschedulable")
    claim_message = await served.told("resourceclaim", "all", "DoesNotFit")
    assert "node n1: request r wants 8 devices of class gpu.topobus.dev, found 2 of 8 (6 devices: held by claim default/full)" in message
    assert "6 devices: held by claim default/full" in claim_message
    await served.delete("resourceclaim", "full")

    assert await served.scheduled("greedy") == "n1"


@pytest.mark.parametrize("seed", range(6))
async def test_pods_are_whole_or_gone_when_replicas_die_after_any_write(home: Place, nats_server: NatsServer, seed: int) -> None:
    """Two replicas are cut off after some writes, again and again, while pods come and go; in the end each pod has all and nothing is left of the others."""
    random = Random(seed)
    await home.apply(SMALL_TEMPLATE)
    names = [
        f"p{index}" for index in range(3)
    ]  # three pods, the last one and the shared claim fill a node: all of them are bound to the claim's
    deaths = 0
    for _ in range(8):
        name, steps = random.choice(names), (random.randrange(1, 12), random.randrange(1, 12))
        if random.random() < 0.35:
            await home.delete("pod", name)
        else:
            await home.apply(claim("shared", 1, allocation_mode="WaitForFirstConsumer"))
            await home.apply(pod(name, "shared", gpus=1, template="one-gpu"))
        async with controller(nats_server.url, step=steps[0]) as first, controller(nats_server.url, step=steps[1]) as second:
            deaths += await died_or(_settled(home), first, second)
    assert deaths >= 2

    async with controller(nats_server.url), controller(nats_server.url):
        await home.apply(claim("shared", 1, allocation_mode="WaitForFirstConsumer"))
        await home.apply(pod("last", "shared", gpus=1))
        await home.scheduled("last")
        pods = await _settled(home)
        await _agreed(home, pods)

    held = {owner: devices for node in home.nodes for owner, devices in home.held(node).items()}
    wanted = {"claim/default/shared": 1} | {f"pod/default/{api_object.metadata['name']}": 1 for api_object in pods}
    made = {
        f"claim/default/{status['resourceClaimName']}": 1
        for api_object in pods
        for status in api_object.status.get("resourceClaimStatuses") or ()
    }
    assert {owner: len(devices) for owner, devices in held.items()} == wanted | made
    assert {user["uid"] for user in (await home.claim("shared")).status["reservedFor"]} == {
        api_object.metadata["uid"] for api_object in pods
    }
    everything = [(node, device) for node in home.nodes for devices in home.held(node).values() for device in devices]
    assert len(set(everything)) == len(everything) == sum((wanted | made).values())


class Replicas:
    """Controllers as processes of their own, killed without notice and started again."""

    def __init__(self, url: str) -> None:
        self._environment = {**os.environ, "TOPOBUS_ALL__NATS__URL": url, "TOPOBUS_CONTROLLER__RETRY_S": "0.2"}
        self._running: list[asyncio.subprocess.Process] = []
        self._reading: list[asyncio.Task[bytes]] = []

    async def start(self) -> None:
        """Start one more, and wait until it works."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "topobus.controller.main",
            env=self._environment | {"TOPOBUS_ALL__LOG__FORMAT": "json", "TOPOBUS_ALL__HTTP__PORT": "0"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._running.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            async for line in process.stdout:
                if b"controller.ready" in line:
                    break
        # A full pipe would stop it.
        self._reading.append(asyncio.create_task(process.stdout.read()))

    async def kill(self, index: int) -> None:
        """Kill one as the kernel does when memory is short."""
        process = self._running.pop(index)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def stop(self) -> None:
        """Kill all."""
        while self._running:
            await self.kill(0)
        await asyncio.gather(*self._reading)


@pytest.mark.real_server
async def test_pods_are_whole_or_gone_when_three_processes_are_killed_in_turn(home: Place, nats_server: NatsServer) -> None:
    """Three controllers as real processes, one of them killed with each change: pods and ledgers agree in the end, and no device is held twice."""
    random = Random(7)
    await home.apply(SMALL_TEMPLATE)
    replicas = Replicas(nats_server.url)
    try:
        for _ in range(3):
            await replicas.start()
        for turn in range(6):
            name = f"p{turn % 3}"
            await home.apply(claim("shared", 1, allocation_mode="WaitForFirstConsumer"))
            if turn >= 3:
                await home.delete("pod", name)
            else:
                await home.apply(pod(name, "shared", gpus=1, template="one-gpu"))
            await replicas.kill(random.randrange(3))
            await replicas.start()
        await home.apply(pod("last", "shared", gpus=1, template="one-gpu"))
        await home.scheduled("last")
        pods = await _settled(home)
        await home.until("resourceclaim", "shared", lambda value: value is not None and len(value.status.get("reservedFor") or ()) == 1)
        await _agreed(home, pods)
    finally:
        await replicas.stop()

    (last,) = pods
    made = last.status["resourceClaimStatuses"][0]["resourceClaimName"]
    held = {owner: len(devices) for node in home.nodes for owner, devices in home.held(node).items()}
    assert held == {"pod/default/last": 1, "claim/default/shared": 1, f"claim/default/{made}": 1}


async def _settled(home: Place) -> list[ApiObject]:
    """Wait until no pod waits or goes and each claim belongs to one that stays; gives the pods."""

    def newest(items: list[Change[ApiObject]], kind: str) -> list[ApiObject]:
        api_objects = {change.parts["name"]: change.value for change in items if change.parts.get("kind") == kind}
        return [api_object for api_object in api_objects.values() if api_object is not None]

    def is_settled(items: list[Change[ApiObject]]) -> bool:
        pods = newest(items, "pod")
        uids = {api_object.metadata["uid"] for api_object in pods}
        is_whole = all(
            not api_object.metadata.get("deletionTimestamp") and condition(api_object).get("status") == "True" for api_object in pods
        )
        owners = {
            owner["uid"] for api_object in newest(items, "resourceclaim") for owner in api_object.metadata.get("ownerReferences") or ()
        }
        users = {user["uid"] for api_object in newest(items, "resourceclaim") for user in api_object.status.get("reservedFor") or ()}
        return is_whole and owners <= uids and users <= uids

    await home.objects.until(is_settled, timeout_s=60)
    return newest(home.objects.items, "pod")


async def _agreed(home: Place, pods: list[ApiObject]) -> None:
    """Wait until the ledgers name nobody else than these pods and their claims: what was placed for a pod that went meanwhile is let go after it."""
    owners = {"claim/default/shared", *(f"pod/default/{api_object.metadata['name']}" for api_object in pods)}
    owners |= {
        f"claim/default/{status['resourceClaimName']}"
        for api_object in pods
        for status in api_object.status.get("resourceClaimStatuses") or ()
    }
    async with Reader(home.bus.watch(catalogue.LEDGER)) as ledgers:
        await ledgers.until(lambda _: {owner for node in home.nodes for owner in home.held(node)} == owners, timeout_s=60)


async def test_claim_is_advised_when_it_does_not_fit(served: Place) -> None:
    """Beside the reasons stands the nearest miss and what would fit, in a condition of its own and in the event; it goes when the claim is allocated."""
    await served.apply(claim("taker", 6, allocation_mode="Immediate"))
    await served.until("resourceclaim", "taker", lambda value: value is not None and bool(value.status.get("allocation")))
    async with Reader(served.bus.follow(catalogue.DECISION, start=Start.ALL)) as decisions:
        await served.apply(claim("greedy", 9))
        await served.told("resourceclaim", "greedy", "DoesNotFit")
        events = await decisions.until(lambda items: any(isinstance(received_event.value.outcome, Refusal) for received_event in items))

    advice = (await served.claim("greedy")).status["conditions"][1]
    assert (advice["type"], advice["reason"]) == ("Advice", "NearestMiss")
    assert advice["message"] == (
        "nearest miss: node n2 has 8 of 9 devices for request r; would fit on node n2 with 8 devices instead of 9 for request r"
    )
    refusal = next(received_event.value.outcome for received_event in events if isinstance(received_event.value.outcome, Refusal))
    assert [reason.code for reason in refusal.reasons] == ["too-few-devices", "too-few-devices", "nearest-miss", "would-fit"]
