"""The controller on a real server: claims become allocations at a node, or are told why not; plans find a node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from support.mortal_bus import died_or, mortal_bus
from support.real_topology import WatchedTopology, real_topology
from topobus.contracts import catalogue
from topobus.contracts.messages import ApiObject, DecisionEvent, PlanRequest
from topobus.controller.config import ControllerSettings
from topobus.controller.service import serve
from topobus.domain.device import Inventory
from topobus.domain.machine import Machine
from topobus.domain.outcome import Refusal
from topobus.domain.request import ContainerRequest, DeviceRequest, Owner, OwnerKind, PodRequest, Policy
from topobus.gpu.plugins.nvidia import NvidiaDriver
from topobus.kubernetes.api import (
    admit,
    ask_deletion,
    object_parts,
    parse_manifest,
)
from topobus.nic.plugins.pci_netdev import PciNetdevDriver
from topobus.runtime.bus import Bus, Change, ChangeKind, Conflict, Start
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
from topobus.topology.config import TopologySettings
from topobus.topology.service import serve as serve_topology

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NODE = "demo-node"
EXAMPLES = Path(__file__).parents[2] / "examples" / "claims"
SETTINGS = ControllerSettings(ask_timeout_s=30.0, retry_s=0.2)

PAIR = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: pair}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: gpu.topobus.dev
        selectors:
        - cel:
            expression: >-
              device.attributes["gpu.topobus.dev"].model.contains("H100") &&
              device.capacity["gpu.topobus.dev"].memory.compareTo(quantity("40Gi")) >= 0
    - name: nic
      exactly:
        deviceClassName: nic.topobus.dev
    constraints:
    - matchAttribute: resource.kubernetes.io/pcieRoot
"""


def claim(name: str, *, device_class: str = "gpu.topobus.dev", count: int = 1, expression: str = "true", **metadata: Any) -> ApiObject:
    """Make a claim for some devices of one class."""
    request = {"deviceClassName": device_class, "count": count, "selectors": [{"cel": {"expression": expression}}]}
    api_object = ApiObject(
        api_version="resource.k8s.io/v1",
        kind="ResourceClaim",
        metadata={"name": name, **metadata},
        spec={"devices": {"requests": [{"name": "r", "exactly": request}]}},
    )
    return admit(api_object, uid=f"uid-{name}", now="2026-01-01T00:00:00Z")


class Home:
    """One recorded node on a bus, and a user of the API."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], topology: WatchedTopology, inventories: list[Inventory]) -> None:
        self.bus = bus
        self.objects = objects
        self.topology = topology
        self.inventories = inventories
        self._made = 0

    async def apply(self, api_object: ApiObject) -> None:
        """Store an object as the CLI does."""
        await self.bus.put(catalogue.OBJECT, api_object, **object_parts(api_object))

    async def until(self, name: str, is_enough: Callable[[ApiObject | None], bool]) -> ApiObject | None:
        """Wait until the newest version of a claim satisfies the test; None stands for a deleted one."""

        def newest(items: list[Change[ApiObject]]) -> tuple[bool, ApiObject | None]:
            changes = [change for change in items if change.parts.get("name") == name and change.parts.get("kind") == "resourceclaim"]
            return bool(changes), changes[-1].value if changes else None

        await self.objects.until(lambda items: newest(items)[0] and is_enough(newest(items)[1]))
        return newest(self.objects.items)[1]

    async def allocated(self, name: str) -> list[dict[str, Any]]:
        """Wait until a claim is allocated; gives its results."""
        api_object = await self.until(name, lambda value: value is not None and bool(value.status.get("allocation")))
        assert api_object is not None
        results: list[dict[str, Any]] = api_object.status["allocation"]["devices"]["results"]
        return results

    async def told(self, name: str, reason: str) -> str:
        """Wait until a claim has a condition with this reason; gives the message."""
        api_object = await self.until(name, lambda value: _condition(value).get("reason") == reason)
        return str(_condition(api_object)["message"])

    async def apply_new(self, api_object: ApiObject) -> None:
        """Create an object unless there is one of its name; each has a uid of its own."""
        self._made += 1
        fresh = admit(api_object, uid=f"{api_object.metadata['uid']}-{self._made}", now="2026-01-01T00:00:00Z")
        await self.bus.compare_and_set(catalogue.OBJECT, fresh, 0, **object_parts(api_object))

    async def until_settled(self) -> None:
        """Wait until every claim is allocated, or told why not, and none is being deleted or attempted."""
        probe = claim("probe-settled", count=9)
        await self.apply(probe)
        await self.told("probe-settled", "DoesNotFit")
        await self.objects.until(_is_settled)

    async def delete(self, name: str) -> None:
        """Delete a claim as the CLI does: mark it, or remove it when nothing holds it."""
        parts = {"kind": "resourceclaim", "namespace": "default", "name": name}
        while True:
            entry = await self.bus.get(catalogue.OBJECT, **parts)
            if entry is None:
                return
            marked = ask_deletion(entry.value, now="2026-01-02T00:00:00Z")
            if marked is None:
                if isinstance(await self.bus.compare_and_delete(catalogue.OBJECT, entry.revision, **parts), Conflict):
                    continue
                return
            if not isinstance(await self.bus.compare_and_set(catalogue.OBJECT, marked, entry.revision, **parts), Conflict):
                return


def _condition(api_object: ApiObject | None) -> dict[str, Any]:
    conditions = (api_object.status.get("conditions") if api_object is not None else None) or [{}]
    found: dict[str, Any] = conditions[0]
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[Inventory]]:
    """The demo machine with what its GPU and NIC drivers find."""
    root = tmp_path_factory.mktemp("dgx")
    build("dgx", root)
    tree = Tree(HardwareSettings(root=str(root)))
    machine = read_machine(tree, NODE)
    gpus = sorted(NvidiaDriver().discover(tree, machine), key=lambda device: device.name)
    nics = sorted(PciNetdevDriver().discover(tree, machine), key=lambda device: device.name)
    return machine, [
        Inventory(node=NODE, device_class="gpu", generation=1, devices=tuple(gpus)),
        Inventory(node=NODE, device_class="nic", generation=1, devices=tuple(nics)),
    ]


@asynccontextmanager
async def controller(url: str, *, mortal: Callable[[Bus], Bus] = lambda bus: bus) -> AsyncIterator[Readiness]:
    """Run one replica; gives its readiness. `mortal` puts something between it and the bus."""
    readiness = Readiness()
    async with Bus.session(NatsSettings(url=url), name="controller") as real:
        bus = mortal(real)
        runtime = Runtime(
            name="controller", node="central", bus=bus, clock=SystemClock(), readiness=readiness, registry=CollectorRegistry()
        )
        task = asyncio.create_task(serve(SETTINGS, runtime))
        try:
            yield readiness
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # checked just before


@pytest_asyncio.fixture
async def home(bus: Bus, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]) -> AsyncIterator[Home]:
    """The demo node with its topology, no controller yet."""
    machine, inventories = recorded
    topology = await topologies.enter_async_context(real_topology(bus, machine, inventories))
    async with Reader(bus.watch(catalogue.OBJECT)) as objects:
        yield Home(bus, objects, topology, inventories)


@pytest_asyncio.fixture
async def served(home: Home, nats_server: NatsServer) -> AsyncIterator[Home]:
    """The demo node with a controller."""
    async with controller(nats_server.url):
        yield home


async def test_controller_allocates_gpu_and_nic_under_one_root_when_claim_asks_for_it(served: Home) -> None:
    """A claim with a CEL selector and matchAttribute pcieRoot gets a GPU and a NIC of one root, held at the node and announced."""
    (api_object,) = parse_manifest(PAIR, where="pair.yaml")

    async with Reader(served.bus.follow(catalogue.DECISION, start=Start.ALL)) as decisions:
        await served.apply(admit(api_object, uid="uid-pair", now="2026-01-01T00:00:00Z"))
        results = await served.allocated("pair")
        events = await decisions.until(lambda items: any(event.value.verb == "allocate" for event in items))

    roots = {device.name: device.pcie_root for inventory in served.inventories for device in inventory.devices}
    assert [result["driver"] for result in results] == ["gpu.topobus.dev", "nic.topobus.dev"]
    assert len({roots[result["device"]] for result in results}) == 1
    assert {result["pool"] for result in results} == {NODE}
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="pair", uid="uid-pair")
    held = served.topology.ledger.allocations[owner.key].holdings[0].devices
    assert held == {"gpu": (results[0]["device"],), "nic": (results[1]["device"],)}
    event: DecisionEvent = next(event.value for event in events if event.value.verb == "allocate")
    assert (event.node, event.owner) == (NODE, owner)


async def test_example_claim_is_allocated_on_the_demo_machine(served: Home) -> None:
    """The claim of the examples, with its classes, gets a GPU and an RDMA NIC below one root."""
    for file in ("classes.yaml", "gpu-nic-pair.yaml"):
        for api_object in parse_manifest((EXAMPLES / file).read_text(encoding="utf-8"), where=file):
            await served.apply(admit(api_object, uid=f"uid-{api_object.metadata['name']}", now="2026-01-01T00:00:00Z"))

    results = await served.allocated("gpu-nic-pair")

    roots = {device.name: device.pcie_root for inventory in served.inventories for device in inventory.devices}
    assert [result["request"] for result in results] == ["gpu", "nic"]
    assert len({roots[result["device"]] for result in results}) == 1


async def test_controller_writes_kubernetes_status_when_allocated(served: Home) -> None:
    """The status has Kubernetes' shape: node selector, time, finalizer, and no attempt left behind."""
    await served.apply(claim("one"))
    await served.allocated("one")

    api_object = await served.until("one", lambda value: _condition(value).get("status") == "True")

    assert api_object is not None
    field = api_object.status["allocation"]["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]
    assert field == {"key": "metadata.name", "operator": "In", "values": [NODE]}
    assert api_object.status["allocation"]["allocationTimestamp"]
    assert api_object.metadata["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert "topobus.dev/attempt" not in api_object.metadata["annotations"]


async def test_controller_says_why_when_claim_cannot_fit(served: Home) -> None:
    """A claim for more than there is gets the first failing check of the devices, grouped with numbers."""
    await served.apply(claim("taker", count=2))
    await served.allocated("taker")
    await served.apply(claim("greedy", count=7))

    message = await served.told("greedy", "DoesNotFit")

    assert message == (
        "node demo-node: request r wants 7 devices of class gpu.topobus.dev, found 6 of 8 (2 devices: held by claim default/taker)"
    )


async def test_controller_allocates_waiting_claim_when_devices_become_free(served: Home) -> None:
    """A claim that did not fit is allocated as soon as another one is released."""
    await served.apply(claim("first", count=8))
    await served.allocated("first")
    await served.apply(claim("second", count=8))
    await served.told("second", "DoesNotFit")

    await served.delete("first")

    assert len(await served.allocated("second")) == 8


@pytest.mark.parametrize(
    ("one", "reason", "wanted"),
    [
        pytest.param(
            claim("bad", expression="device.drivr == 1"),
            "Invalid",
            ("line 1, column 7", "undefined field 'drivr'"),
            id="cel-does-not-compile",
        ),
        pytest.param(
            claim("bad", expression='device.attributes["gpu.topobus.dev"].colour == "red"'),
            "Invalid",
            ("selector #0", "colour"),
            id="cel-missing-key",
        ),
        pytest.param(claim("bad", device_class="tpu"), "Invalid", ("no DeviceClass 'tpu'", "gpu.topobus.dev"), id="no-such-class"),
        pytest.param(claim("bad", count=0), "Malformed", ("count", "at least 1"), id="breaks-a-limit"),
        pytest.param(
            ApiObject(
                api_version="resource.k8s.io/v1",
                kind="ResourceClaim",
                metadata={"name": "bad", "uid": "u"},
                spec={"devices": {"requests": 5}},
            ),
            "Malformed",
            ("requests", "array"),
            id="wrong-type",
        ),
    ],
)
async def test_controller_says_where_when_claim_is_wrong(served: Home, one: ApiObject, reason: str, wanted: tuple[str, ...]) -> None:
    """A wrong claim is told the place; others are served as before."""
    await served.apply(one)
    await served.apply(claim("good"))

    message = await served.told("bad", reason)

    assert [part for part in wanted if part not in message] == []
    assert len(await served.allocated("good")) == 1


async def test_controller_survives_stored_class_that_nobody_can_read(served: Home) -> None:
    """A malformed DeviceClass counts as absent and takes nobody down."""
    broken = ApiObject(api_version="resource.k8s.io/v1", kind="DeviceClass", metadata={"name": "odd"}, spec={"selectors": "x"})
    await served.apply(broken)
    await served.apply(claim("user", device_class="odd"))

    assert "no DeviceClass 'odd'" in await served.told("user", "Invalid")


async def test_controller_releases_devices_when_claim_is_deleted(served: Home) -> None:
    """A deleted claim lets go at its node first, and only then the object goes."""
    await served.apply(claim("gone", count=3))
    await served.allocated("gone")

    await served.delete("gone")
    await served.until("gone", lambda value: value is None)

    assert served.topology.ledger.allocations == {}


@pytest.mark.parametrize("is_forced", [False, True])
async def test_controller_waits_with_the_release_while_a_container_may_use_the_devices(served: Home, *, is_forced: bool) -> None:
    """Devices that are prepared stay held, whoever deletes their claim; they go when the node has undone it."""
    await served.apply(claim("used", count=8))
    await served.allocated("used")
    owner = Owner(kind=OwnerKind.CLAIM, namespace="default", name="used", uid="uid-used")
    await served.topology.set_prepared(owner, is_prepared=True)
    async with Reader(served.bus.watch(catalogue.LEDGER)) as ledgers:
        await ledgers.until(lambda items: any(change.value is not None and owner.key in change.value.allocations for change in items))
    if is_forced:
        await served.bus.delete(catalogue.OBJECT, kind="resourceclaim", namespace="default", name="used")
    else:
        await served.delete("used")
        waiting = await served.until("used", lambda value: value is not None and len(value.status.get("conditions") or []) == 2)
        assert waiting is not None
        assert "let go when that is undone" in waiting.status["conditions"][1]["message"]
    await served.apply(claim("next"))
    await served.told("next", "DoesNotFit")

    assert owner.key in served.topology.ledger.allocations
    await served.topology.set_prepared(owner, is_prepared=False)
    assert len(await served.allocated("next")) == 1
    assert owner.key not in served.topology.ledger.allocations


async def test_controller_releases_devices_when_object_is_removed_by_force(served: Home) -> None:
    """An object deleted past its finalizer does not leak what it held."""
    await served.apply(claim("forced", count=8))
    await served.allocated("forced")
    await served.bus.delete(catalogue.OBJECT, kind="resourceclaim", namespace="default", name="forced")

    await served.apply(claim("next", count=8))

    assert len(await served.allocated("next")) == 8


async def test_controller_searches_anew_when_node_refuses(served: Home) -> None:
    """A node that refuses the attempt is asked again with another operation, never with the refused one."""
    served.topology.refuse_next = 1

    await served.apply(claim("again"))
    await served.allocated("again")

    assert [request.op_id for request in served.topology.requests] == ["allocate-uid-again-1", "allocate-uid-again-2"]


async def test_controller_does_not_hammer_a_node_that_refuses_for_ever(served: Home) -> None:
    """A node that refuses every device is asked about each once, and then only after a while; the claim says why it waits."""
    served.topology.refuse_next = 1000

    await served.apply(claim("unwanted"))
    message = await served.told("unwanted", "DoesNotFit")

    assert "8 devices: refused by the node: refused by the test" in message
    assert len(served.topology.requests) == 8


async def test_controller_completes_attempt_when_another_replica_died_after_placing(home: Home, nats_server: NatsServer) -> None:
    """What a crash left between the node's ledger and the claim's status is completed with the same devices."""
    await home.apply(claim("crashed", count=2))
    async with controller(nats_server.url):
        await home.allocated("crashed")
    attempt = next(
        change.value
        for change in home.objects.items
        if change.value is not None and "topobus.dev/attempt" in (change.value.metadata.get("annotations") or {})
    )
    await home.apply(attempt)

    async with controller(nats_server.url):
        api_object = await home.until(
            "crashed", lambda value: value is not None and "topobus.dev/attempt" not in value.metadata["annotations"]
        )

    assert api_object is not None
    held = next(iter(home.topology.ledger.allocations.values())).holdings[0].devices["gpu"]
    assert sorted(result["device"] for result in api_object.status["allocation"]["devices"]["results"]) == sorted(held)
    assert len({request.op_id for request in home.topology.requests}) == 1


async def test_controller_never_gives_device_twice_when_three_replicas_compete(home: Home, nats_server: NatsServer) -> None:
    """Three replicas serve twelve claims for eight GPUs: eight are allocated, each device once."""
    async with controller(nats_server.url), controller(nats_server.url), controller(nats_server.url):
        for index in range(12):
            await home.apply(claim(f"c{index:02d}"))
        await home.objects.until(lambda items: len(_allocated_devices(items)) == 8, timeout_s=60)
        for index in range(12):
            await home.until(f"c{index:02d}", lambda value: bool(_condition(value)))

    devices = _allocated_devices(home.objects.items)
    assert len(set(devices.values())) == 8
    assert len(home.topology.ledger.allocations) == 8


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_controller_keeps_claims_and_ledger_equal_when_replicas_die_at_any_moment(
    home: Home, nats_server: NatsServer, seed: int
) -> None:
    """Replicas are cut off after some writes, again and again, while claims come and go; in the end every holding has its claim and the reverse."""
    random = Random(seed)
    names = [f"c{index}" for index in range(10)]
    deaths = 0
    for _ in range(12):
        name, step, is_done = random.choice(names), random.randrange(1, 6), random.random() < 0.5
        if random.random() < 0.4:
            await home.delete(name)
        else:
            await home.apply_new(claim(name, count=random.choice([1, 2, 3])))
        mortals: list[FatedBus] = []

        def mortal(bus: Bus, mortals: list[FatedBus] = mortals, step: int = step, is_done: bool = is_done) -> FatedBus:
            mortals.append(mortal_bus(bus, step, is_done=is_done))
            return mortals[0]

        async with controller(nats_server.url, mortal=mortal):
            deaths += await died_or(home.objects.until(_is_settled, timeout_s=60), mortals[0].fates.died)
    assert deaths >= 3

    async with controller(nats_server.url):
        await home.until_settled()
        # A claim that was told why it waits may be under way again: something was let go after that.
        async with asyncio.timeout(60):
            while _given(home.objects.items) != _held(home.topology):  # noqa: ASYNC110 - two watches tell of it, in any order
                await asyncio.sleep(0.05)


def _is_settled(items: list[Change[ApiObject]]) -> bool:
    """Say whether every claim is allocated, or told why not, and none is being deleted or attempted."""
    newest = {change.parts["name"]: change.value for change in items if change.parts.get("kind") == "resourceclaim"}
    return all(
        not stored.metadata.get("deletionTimestamp")
        and "topobus.dev/attempt" not in (stored.metadata.get("annotations") or {})
        and _condition(stored)
        for stored in newest.values()
        if stored is not None
    )


def _given(items: list[Change[ApiObject]]) -> dict[str, list[str]]:
    """List what stored claims say that they have, by uid."""
    newest = {change.parts["name"]: change.value for change in items if change.parts.get("kind") == "resourceclaim"}
    return {
        api_object.metadata["uid"]: sorted(result["device"] for result in api_object.status["allocation"]["devices"]["results"])
        for api_object in newest.values()
        if api_object is not None and api_object.status.get("allocation")
    }


def _held(topology: WatchedTopology) -> dict[str, list[str]]:
    """List what the ledger says that claims have, by uid."""
    return {allocation.owner.uid: sorted(allocation.holdings[0].devices["gpu"]) for allocation in topology.ledger.allocations.values()}


def _allocated_devices(items: list[Change[ApiObject]]) -> dict[str, str]:
    newest = {change.parts["name"]: change.value for change in items if change.kind is ChangeKind.PUT}
    return {
        name: api_object.status["allocation"]["devices"]["results"][0]["device"]
        for name, api_object in newest.items()
        if api_object is not None and api_object.status.get("allocation")
    }


TEMPLATED = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec:
  metadata: {labels: {team: a}}
  spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.topobus.dev}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: job}
spec:
  containers: [{name: main}]
  resourceClaims: [{name: card, resourceClaimTemplateName: one-gpu}]
"""


async def test_controller_makes_and_ends_claims_when_a_pod_names_a_template(served: Home) -> None:
    """A pod's template becomes one claim with the pod as owner; it is allocated, and released when the pod is gone."""
    for api_object in parse_manifest(TEMPLATED, where="pod.yaml"):
        await served.apply(admit(api_object, uid=f"uid-{api_object.metadata['name']}", now="2026-01-01T00:00:00Z"))
    items = await served.objects.until(lambda changes: any(_claim_names(change.value) for change in changes))
    (name,) = next(names for change in items if (names := _claim_names(change.value)))
    await served.allocated(name)
    claim_object = await served.until(name, lambda value: value is not None)

    await served.bus.delete(catalogue.OBJECT, kind="pod", namespace="default", name="job")
    await served.until(name, lambda value: value is None)

    assert claim_object is not None
    assert claim_object.metadata["labels"] == {"team": "a"}
    assert claim_object.metadata["ownerReferences"][0]["uid"] == "uid-job"
    assert served.topology.ledger.allocations == {}


PAIR_POD = """
apiVersion: v1
kind: Pod
metadata: {name: both}
spec:
  containers: [{name: main}]
  resourceClaims:
  - {name: a, resourceClaimName: six}
  - {name: b, resourceClaimName: two}
"""


async def test_controller_puts_all_claims_of_a_pod_on_one_node(
    served: Home, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """Two claims of a pod are served where both fit, not each where it fits first."""
    (pod,) = parse_manifest(PAIR_POD, where="pod.yaml")
    await served.apply(claim("early", count=1, annotations={"topobus.dev/node": NODE}))
    await served.allocated("early")
    other = msgspec.structs.replace(recorded[0], node="other-node")
    inventories = [msgspec.structs.replace(inventory, node="other-node") for inventory in recorded[1]]
    await topologies.enter_async_context(real_topology(served.bus, other, []))
    await served.apply(admit(pod, uid="uid-both", now="2026-01-01T00:00:00Z"))
    # Both at once, before the other node's inventory: whichever comes first must wait for its mate.
    await served.apply(claim("six", count=6))
    await served.apply(claim("two", count=2))
    for inventory in inventories:
        await served.bus.put(catalogue.INVENTORY, inventory, node="other-node", device_class=inventory.device_class)

    pools = {result["pool"] for name in ("six", "two") for result in await served.allocated(name)}

    assert len(pools) == 1


def _claim_names(api_object: ApiObject | None) -> list[str]:
    statuses = api_object.status.get("resourceClaimStatuses") if api_object is not None and api_object.kind == "Pod" else None
    return [status["resourceClaimName"] for status in statuses or []]


def _pod(count: int, name: str = "trainer") -> PodRequest:
    return PodRequest(
        owner=Owner(kind=OwnerKind.POD, name=name, uid=f"uid-{name}"),
        containers=(ContainerRequest(name="main", devices=(DeviceRequest(device_class="gpu", count=count),)),),
        policy=Policy.SINGLE_NUMA_NODE,
    )


async def _plan_ready(home: Home) -> None:
    """Wait until a controller answers plans: it does so before it decides on its first claim."""
    await home.apply(claim("probe", count=9))
    await home.told("probe", "DoesNotFit")


async def test_plan_commits_at_the_node_and_lists_silent_ones_when_asked(served: Home, recorded: tuple[Machine, list[Inventory]]) -> None:
    """A pod is placed on a node that answers; a node that is silent is listed as unknown, not as refusing."""
    silent = Machine(node="silent-node", numa_nodes=recorded[0].numa_nodes, cpus=recorded[0].cpus)
    await served.bus.put(catalogue.MACHINE, silent, node="silent-node")
    await _plan_ready(served)

    request = PlanRequest(op_id="op-1", pod=_pod(2))
    reply = await served.bus.ask(catalogue.PLAN, request, node=catalogue.CLUSTER)
    again = await served.bus.ask(catalogue.PLAN, request, node=catalogue.CLUSTER)

    assert reply.chosen is not None
    assert reply.chosen.node == NODE
    assert reply.silent_nodes == ("silent-node",)
    assert again.chosen is not None
    assert again.chosen.result == reply.chosen.result
    assert len(served.topology.ledger.allocations) == 1


async def test_plan_chooses_the_same_node_every_time_when_several_fit(
    served: Home, topologies: AsyncExitStack, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """Of equally good nodes the first by name gets the pod; when it is full, the next one; a dry run holds nothing."""
    other = msgspec.structs.replace(recorded[0], node="another-node")
    inventories = [msgspec.structs.replace(inventory, node="another-node") for inventory in recorded[1]]
    topology = await topologies.enter_async_context(real_topology(served.bus, other, inventories))
    await _plan_ready(served)

    async def plan(name: str, *, is_dry_run: bool = False) -> str:
        request = PlanRequest(op_id=f"op-{name}-{is_dry_run}", pod=_pod(4, name), is_dry_run=is_dry_run)
        reply = await served.bus.ask(catalogue.PLAN, request, node=catalogue.CLUSTER)
        assert [node_answer.node for node_answer in reply.answers] == ["another-node", NODE]
        return reply.chosen.node if reply.chosen is not None else ""

    dry = await plan("a", is_dry_run=True)
    chosen = [await plan(name) for name in ("a", "b", "c")]

    assert dry == "another-node"
    assert chosen == ["another-node", "another-node", NODE]
    assert len(topology.ledger.allocations) == 2


async def test_plan_tells_each_nodes_reasons_when_none_fits(served: Home) -> None:
    """A pod that fits nowhere gets what each node said."""
    await _plan_ready(served)

    reply = await served.bus.ask(catalogue.PLAN, PlanRequest(op_id="op-2", pod=_pod(5)), node=catalogue.CLUSTER)
    nowhere = await served.bus.ask(catalogue.PLAN, PlanRequest(op_id="op-3", pod=_pod(1), node="elsewhere"), node=catalogue.CLUSTER)

    assert reply.chosen is None
    assert [(node_answer.node, type(node_answer.result)) for node_answer in reply.answers] == [(NODE, Refusal)]
    assert isinstance(nowhere.answers[0].result, Refusal)
    assert nowhere.answers[0].result.reasons[0].code == "unknown-node"


async def test_claim_is_held_and_let_go_by_the_real_topology(
    bus: Bus, nats_server: NatsServer, recorded: tuple[Machine, list[Inventory]]
) -> None:
    """With the real service at the node: allocated, held in its ledger, refused to others, released."""
    machine, inventories = recorded
    await bus.put(catalogue.MACHINE, machine, node=NODE)
    for inventory in inventories:
        await bus.put(catalogue.INVENTORY, inventory, node=NODE, device_class=inventory.device_class)
    async with (
        Bus.session(NatsSettings(url=nats_server.url), name="topology") as node_bus,
        Reader(bus.watch(catalogue.OBJECT)) as objects,
        Reader(bus.watch(catalogue.LEDGER)) as ledgers,
        controller(nats_server.url),
    ):
        runtime = Runtime(
            name="topology", node=NODE, bus=node_bus, clock=SystemClock(), readiness=Readiness(), registry=CollectorRegistry()
        )
        topology = asyncio.create_task(serve_topology(TopologySettings(node=NODE), runtime))
        home = Home(bus, objects, WatchedTopology(bus, NODE), inventories)
        await home.apply(claim("real", count=8))
        await home.allocated("real")
        await home.apply(claim("late"))
        assert "8 devices: held by claim default/real" in await home.told("late", "DoesNotFit")

        await home.delete("real")
        await home.allocated("late")

        held = [sorted(change.value.allocations) for change in ledgers.items if change.value is not None]
        topology.cancel()
        await asyncio.wait({topology})
    assert ["claim/default/real/uid-real"] in held
    assert held[-1] == ["claim/default/late/uid-late"]


@pytest.mark.real_server
async def test_controller_process_says_ready_and_stops_when_told(nats_server: NatsServer, tmp_path: Path) -> None:
    """The console entry starts, connects, and ends with status 0 on SIGTERM."""
    environment = {**os.environ, "TOPOBUS_ALL__NATS__URL": nats_server.url, "TOPOBUS_ALL__LOG__FORMAT": "json"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "topobus.controller.main", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        async for line in process.stdout:
            if b"controller.ready" in line:
                break
    process.send_signal(signal.SIGTERM)

    async with asyncio.timeout(5):
        assert await process.wait() == 0


async def test_claim_with_as_much_configuration_as_upstream_takes_is_allocated(served: Home) -> None:
    """32 opaque configurations of 10 kB are what an API server accepts: the claim is allocated, with each of them once in its status."""
    api_object = claim("large")
    config = [{"opaque": {"driver": "gpu.topobus.dev", "parameters": {"n": number, "text": "x" * 10_000}}} for number in range(32)]
    await served.apply(msgspec.structs.replace(api_object, spec={"devices": {**api_object.spec["devices"], "config": config}}))

    await served.allocated("large")

    done = await served.until("large", lambda value: value is not None and bool(value.status.get("allocation")))
    assert done is not None
    assert [each["opaque"]["parameters"]["n"] for each in done.status["allocation"]["devices"]["config"]] == list(range(32))
