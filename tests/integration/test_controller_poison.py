"""Poison in the store, and nodes that answer nonsense: each is told, counted and set aside, and the good claim and pod beside it go on."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from support.alignment_nodes import dgx_facts
from support.asking import ask_patiently
from support.small_topology import SmallTopology
from topobus.contracts import catalogue
from topobus.contracts.codec import encode
from topobus.contracts.messages import ApiObject, HintsReply, HintsRequest, PlaceReply, PlaceRequest, PlanRequest
from topobus.controller.config import ControllerSettings
from topobus.controller.service import serve
from topobus.domain.errors import ContractError, HardwareError
from topobus.domain.outcome import Placement
from topobus.domain.request import ContainerRequest, Owner, OwnerKind, PodRequest
from topobus.kubernetes.api import admit, object_parts, parse_manifest
from topobus.kubernetes.api.objects import is_of_cluster
from topobus.runtime.bus import Bus, Change
from topobus.runtime.clock import SystemClock
from topobus.runtime.config import NatsSettings
from topobus.runtime.readiness import Readiness
from topobus.runtime.service import Runtime
from topobus.simulation.nats_server import NatsServer
from topobus.testing.reading import Reader
from topobus.topology.core.limits import complaint_of_operation, complaint_of_pod

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

NOW = "2026-01-01T00:00:00Z"
GOOD = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: good-claim}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev, count: 1}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: good-pod}
spec:
  containers: [{name: main, resources: {limits: {topobus.dev/gpu: 1}, requests: {topobus.dev/gpu: 1}}}]
"""
# One object of each stored kind, each as somebody honest would write it.
KINDS = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: bad-claim, annotations: {a: b}, labels: {a: b}, finalizers: [x/y], ownerReferences: [{kind: Pod, name: p, uid: u, controller: true}]}
spec:
  devices:
    requests: [{name: r, exactly: {deviceClassName: nic.topobus.dev, count: 1, selectors: [{cel: {expression: "true"}}]}}]
    constraints: [{matchAttribute: resource.kubernetes.io/pcieRoot}]
    config: [{opaque: {driver: gpu.topobus.dev, parameters: {a: b}}}]
status:
  reservedFor: [{resource: pods, name: p, uid: u}]
  conditions: [{type: Allocated, status: "False", reason: r, message: m, lastTransitionTime: "2026-01-01T00:00:00Z"}]
  allocation: {devices: {results: [{request: r, driver: gpu.topobus.dev, pool: n9, device: gpu-9}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: bad-pod, annotations: {a: b}, finalizers: [x/y]}
spec:
  nodeSelector: {a: b}
  schedulingGates: []
  resourceClaims: [{name: c, resourceClaimName: bad-claim}, {name: d, resourceClaimTemplateName: bad-template}]
  containers: [{name: main, resources: {limits: {cpu: "1", memory: 1Gi}, requests: {cpu: "1", memory: 1Gi}, claims: [{name: c}]}}]
status: {phase: Pending, conditions: [{type: PodScheduled, status: "False", reason: r, message: m}], resourceClaimStatuses: [{name: d, resourceClaimName: x}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: bad-template}
spec: {metadata: {labels: {a: b}}, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: nic.topobus.dev}}]}}}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: bad-class}
spec: {selectors: [{cel: {expression: "true"}}], config: [{opaque: {driver: d.example.com, parameters: {a: b}}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: bad-slice}
spec:
  driver: d.example.com
  nodeName: n9
  pool: {name: n9, generation: 1, resourceSliceCount: 1}
  devices: [{name: x, attributes: {a: {string: b}}, capacity: {m: {value: 1Gi}}}]
---
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {name: bad-rule}
spec: {deviceSelector: {driver: d.example.com}, taint: {key: k, value: v, effect: NoExecute}}
---
apiVersion: v1
kind: Node
metadata: {name: n9, labels: {a: b}}
---
apiVersion: v1
kind: Namespace
metadata: {name: bad-space, labels: {a: b}}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClass
metadata: {name: bad-resource-class}
driverName: gpu.topobus.dev
---
apiVersion: resource.k8s.io/v1alpha2
kind: PodSchedulingContext
metadata: {name: bad-pod, ownerReferences: [{kind: Pod, name: bad-pod, uid: u, controller: true}]}
spec: {selectedNode: n1, potentialNodes: [n1]}
status: {resourceClaims: [{name: c, unsuitableNodes: [n1]}]}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {name: bad-classic}
spec: {resourceClassName: bad-resource-class, allocationMode: Immediate}
status: {driverName: gpu.topobus.dev, reservedFor: [{resource: pods, name: p, uid: u}]}
"""
WRONG: tuple[Any, ...] = (7, "text", [7], {"x": 7}, None, [{"name": ">"}])
NODE = "demo-node"
HUGE = "9007199254740993"


class StrictTopology(SmallTopology):
    """A topology that looks at requests as the real one does."""

    async def _place(self, request: PlaceRequest) -> PlaceReply:
        complaint = complaint_of_operation(request.op_id, request.pod.owner) or complaint_of_pod(request.pod)
        if complaint:
            raise ContractError(complaint)
        return await super()._place(request)


class Poisoned:
    """One node, a user, and whatever somebody writes straight into the bucket."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], topology: SmallTopology) -> None:
        self.bus = bus
        self.objects = objects
        self.topology = topology

    async def apply(self, manifest: str) -> None:
        """Store the objects of a manifest as the CLI does."""
        for api_object in parse_manifest(manifest, where="test.yaml"):
            stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}", now=NOW)
            await self.bus.put(catalogue.OBJECT, stored, **object_parts(api_object))

    async def write(self, value: dict[str, Any], kind: str, name: str, namespace: str = "default") -> None:
        """Write any JSON object into the bucket, past all of the CLI's checks."""
        raw = msgspec.convert(value, ApiObject)
        await self.bus.put(catalogue.OBJECT, raw, kind=kind, namespace=namespace, name=name)

    async def newest(self, kind: str, name: str, wanted: str) -> ApiObject:
        """Wait until an object's status, as text, contains what is wanted."""

        def found(items: list[Change[ApiObject]]) -> ApiObject | None:
            api_objects = [item.value for item in items if (item.parts.get("kind"), item.parts.get("name")) == (kind, name)]
            return api_objects[-1] if api_objects else None

        def is_there(items: list[Change[ApiObject]]) -> bool:
            value = found(items)
            return value is not None and wanted in json.dumps([value.status, value.spec])

        await self.objects.until(is_there)
        value = found(self.objects.items)
        assert value is not None
        return value

    async def is_well(self) -> None:
        """Wait until a good claim and a good pod beside the poison have what they ask."""
        await self.apply(GOOD)
        await self.newest("resourceclaim", "good-claim", '"allocation"')
        await self.newest("pod", "good-pod", '"nodeName"')


class Running:
    """The controller under test: it must not have ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.registry = CollectorRegistry()

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        bus = await self._stack.enter_async_context(Bus.session(NatsSettings(url=self._url), name="controller"))
        runtime = Runtime(name="controller", node="central", bus=bus, clock=SystemClock(), readiness=Readiness(), registry=self.registry)
        self._task = asyncio.create_task(serve(ControllerSettings(ask_timeout_s=30.0, retry_s=0.2), runtime))
        return self

    async def __aexit__(self, *_: object) -> None:
        has_ended = self._task.done()
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._stack.aclose()
        if has_ended:
            self._task.result()

    def set_aside(self, loop: str) -> float:
        """Count what one loop has set aside."""
        return self.registry.get_sample_value("topobus_controller_objects_set_aside_total", {"loop": loop}) or 0.0


@pytest_asyncio.fixture
async def home(bus: Bus) -> AsyncIterator[Poisoned]:
    """The demo machine with its GPUs, no controller yet."""
    machine, inventories = dgx_facts()
    await bus.put(catalogue.MACHINE, machine, node=machine.node)
    await bus.put(catalogue.INVENTORY, inventories["gpu"], node=machine.node, device_class="gpu")
    topology = StrictTopology(bus, machine, [inventories["gpu"]])
    await topology.start()

    async def hints(_: HintsRequest) -> HintsReply:
        return HintsReply(hints=None)

    # Otherwise the controller would take the gpu service for silent during a long test.
    await bus.answer(catalogue.HINTS, hints, node=machine.node, device_class="gpu")
    async with Reader(bus.watch(catalogue.OBJECT)) as objects:
        yield Poisoned(bus, objects, topology)


def pod(name: str, container: dict[str, Any]) -> dict[str, Any]:
    """Make a pod of one container as it is stored."""
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "creationTimestamp": NOW}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


@pytest.mark.parametrize(
    ("container", "wanted"),
    [
        ({"name": "main", "resources": {"limits": {"cpu": HUGE, "memory": "1Gi"}, "requests": {"cpu": HUGE, "memory": "1Gi"}}}, HUGE),
        ({"name": "m" * 64, "resources": {"limits": {"topobus.dev/gpu": 1}}}, "64 characters"),
        ({"name": "a\nb", "resources": {"limits": {"topobus.dev/gpu": 1}}}, "printable"),
    ],
    ids=["huge-cpu", "long-name", "line-break"],
)
async def test_pod_is_told_when_every_node_refuses_to_read_it(
    home: Poisoned, nats_server: NatsServer, container: dict[str, Any], wanted: str
) -> None:
    """A pod that no topology accepts waits with the node's words; others are scheduled and plans answered."""
    await home.write(pod("poison", container), "pod", "poison")
    async with Running(nats_server.url):
        await home.is_well()
        api_object = await home.newest("pod", "poison", wanted)
        owner = Owner(kind=OwnerKind.POD, name="planned", uid="u")
        plan = PlanRequest(op_id="op-1", pod=PodRequest(owner=owner, containers=(ContainerRequest(name="main"),)))
        reply = await ask_patiently(home.bus, catalogue.PLAN, plan, node=catalogue.CLUSTER)

    assert "nodeName" not in api_object.spec
    assert api_object.status["conditions"][0]["status"] == "False"
    assert reply.chosen is not None
    assert isinstance(reply.chosen.result, Placement)


@pytest.mark.real_server
@pytest.mark.parametrize(
    "answer",
    [ContractError("a newer release"), HardwareError("no machine"), b"garbage", b'{"result": 7}'],
    ids=["contract", "hardware", "garbage", "other-shape"],
)
async def test_pods_and_plans_go_to_other_nodes_when_one_answers_nonsense(
    home: Poisoned, nats_server: NatsServer, answer: Exception | bytes
) -> None:
    """A node that refuses every question, or answers what nobody can read, is left out; nothing ends."""
    machine, inventories = dgx_facts()
    await home.bus.put(catalogue.MACHINE, msgspec.structs.replace(machine, node="bad-node"), node="bad-node")
    gpus = msgspec.structs.replace(inventories["gpu"], node="bad-node")
    await home.bus.put(catalogue.INVENTORY, gpus, node="bad-node", device_class="gpu")
    client = await nats.connect(nats_server.url)

    async def respond(message: Msg) -> None:
        headers = None
        if isinstance(answer, Exception):
            headers = {
                "Topobus-Error": "contract" if isinstance(answer, ContractError) else "hardware",
                "Topobus-Error-Message": str(answer),
            }
        await client.publish(message.reply, answer if isinstance(answer, bytes) else b"", headers=headers)

    await client.subscribe(catalogue.PLACE.subject(node="bad-node"), cb=respond)
    await client.flush()
    async with Running(nats_server.url):
        await home.apply(GOOD)
        api_object = await home.newest("pod", "good-pod", '"nodeName"')
        owner = Owner(kind=OwnerKind.POD, name="planned", uid="u")
        plan = PlanRequest(op_id="op-1", pod=PodRequest(owner=owner, containers=(ContainerRequest(name="main"),)))
        reply = await ask_patiently(home.bus, catalogue.PLAN, plan, node=catalogue.CLUSTER)
    await client.close()

    assert api_object.spec["nodeName"] == NODE
    assert reply.chosen is not None
    assert reply.chosen.node == NODE
    assert next(node_answer.result for node_answer in reply.answers if node_answer.node == "bad-node").reasons[0].code == "node-failed"  # type: ignore[union-attr]  # a refusal


async def test_claims_go_on_when_somebody_wrote_nonsense_beside_them(home: Poisoned, nats_server: NatsServer) -> None:
    """Annotations that are a number, and a reservation by a name that no pod can have, stop only what they stand in."""
    for manifest in KINDS.split("---"):
        (api_object,) = parse_manifest(manifest, where="test.yaml")
        if api_object.metadata["name"] == "bad-claim":
            good = plain(api_object)
    good["status"] = {}
    await home.write({**good, "metadata": {**good["metadata"], "name": "numbered", "annotations": 7}}, "resourceclaim", "numbered")
    reserved = {"reservedFor": [{"resource": "pods", "name": ">", "uid": "u"}, {"name": ">"}]}
    await home.write({**good, "metadata": {**good["metadata"], "name": "reserved"}, "status": reserved}, "resourceclaim", "reserved")

    async with Running(nats_server.url):
        await home.is_well()


def plain(api_object: ApiObject) -> dict[str, Any]:
    """Give a stored object as JSON has it."""
    stored = admit(api_object, uid=f"uid-{api_object.metadata['name']}", now=NOW)
    return dict(json.loads(encode(stored)))


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """List every place in an object, outside first."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], by: Any) -> Any:
    """Give a copy with one place replaced."""
    if not path:
        return by
    if isinstance(value, dict):
        return {key: replaced(inner, path[1:], by) if key == path[0] else inner for key, inner in value.items()}
    return [replaced(inner, path[1:], by) if number == path[0] else inner for number, inner in enumerate(value)]


def poisons() -> Iterator[tuple[str, dict[str, Any]]]:
    """Make every stored kind with each of its fields replaced by each wrong type."""
    for api_object in parse_manifest(KINDS, where="kinds.yaml"):
        good = plain(api_object)
        for path in places(good):
            # A rule without a selector is for all devices: that is no poison.
            is_for_all = "deviceSelector" in path
            for wrong in () if is_for_all else WRONG:
                bad = replaced(good, path, wrong)
                if is_an_object(bad):
                    yield api_object.kind.lower(), bad


def is_an_object(value: dict[str, Any]) -> bool:
    """Say whether the wire's own shape holds: nobody reads anything else as an object."""
    are_maps = all(isinstance(value.get(part, {}), dict) for part in ("metadata", "spec", "status"))
    return are_maps and all(isinstance(value.get(part), str) for part in ("kind", "apiVersion"))


async def test_good_objects_are_served_when_every_field_of_every_kind_has_a_wrong_type(home: Poisoned, nats_server: NatsServer) -> None:
    """Whatever anybody writes into the bucket, in whatever field of whatever kind, claim and pod beside it get what they ask, and plans are answered."""
    count = 0
    async with asyncio.TaskGroup() as group:
        gate = asyncio.Semaphore(64)

        async def write(kind: str, bad: dict[str, Any], name: str) -> None:
            async with gate:
                await home.write(bad, kind, name, "_" if is_of_cluster(bad["kind"]) else "default")

        for count, (kind, bad) in enumerate(poisons()):
            name = f"{bad['metadata'].get('name') if isinstance(bad['metadata'].get('name'), str) else 'x'}".strip("><") or "x"
            is_named = bad["metadata"].get("name") == name
            unique = f"{name}-{count}"
            if is_named:
                bad["metadata"] = {**bad["metadata"], "name": unique}
            group.create_task(write(kind, bad, unique))

    async with Running(nats_server.url):
        await home.is_well()
        # A second change of everything's surroundings: what is set aside is tried again, and set aside again.
        await home.bus.put(
            catalogue.INVENTORY, msgspec.structs.replace(dgx_facts()[1]["nic"], node="other"), node="other", device_class="nic"
        )
        await home.apply(GOOD.replace("good-", "better-"))
        await home.newest("resourceclaim", "better-claim", '"allocation"')
        await home.newest("pod", "better-pod", '"nodeName"')

    assert count > 500


CURSED = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: cursed-claim}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev}}]}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: cursed-reserved}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.topobus.dev}}]}}
---
apiVersion: v1
kind: Pod
metadata: {name: cursed-pod}
spec: {containers: [{name: main, resources: {limits: {topobus.dev/gpu: 1}}}]}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: cursed-class}
spec: {}
---
apiVersion: resource.k8s.io/v1alpha2
kind: ResourceClaim
metadata: {name: cursed-classic}
spec: {resourceClassName: none, allocationMode: Immediate}
---
apiVersion: resource.k8s.io/v1alpha2
kind: PodSchedulingContext
metadata: {name: cursed-pod, ownerReferences: [{kind: Pod, name: cursed-pod, uid: uid-cursed-pod, controller: true}]}
spec: {selectedNode: n1}
"""


@pytest.mark.parametrize(
    ("work", "loop", "kind", "name"),
    [
        ("reconcilers.allocate_claims.ClaimReconciler._reconcile", "claims", "resourceclaim", "cursed-claim"),
        ("reconcilers.allocate_claims.ClaimReconciler._commit", "claims", "resourceclaim", "cursed-claim"),
        ("reconcilers.schedule_pods.PodScheduler._reconcile", "pods", "pod", "cursed-pod"),
        ("reconcilers.clean_up_pods.PodCleanup.drop_gone_users", "pods", "resourceclaim", "cursed-reserved"),
        ("reconcilers.make_claims.ClaimTemplateReconciler._reconcile", "templates", "pod", "cursed-pod"),
        ("reconcilers.make_claims.ClaimTemplateReconciler._end_orphan", "templates", "resourceclaim", "cursed-claim"),
        ("reconcilers.validate_classes.ClassReconciler._judge", "classes", "deviceclass", "cursed-class"),
        ("classic.drivers.ClassicDriverRunner._look_after", "classic", "resourceclaim", "cursed-classic"),
        ("classic.reconciler.ClassicClaimReconciler._guarded", "classic-gpu.topobus.dev", "resourceclaim", "cursed-classic"),
        ("classic.scheduler.ClassicScheduler._drop_context", "classic-pods", "podschedulingcontext", "cursed-pod"),
        ("service._Controller._on_object", "intake", "pod", "cursed-pod"),
    ],
    ids=lambda value: value,
)
async def test_one_loop_goes_on_when_it_fails_at_one_object(
    home: Poisoned, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, work: str, loop: str, kind: str, name: str
) -> None:
    """A failure that nobody thought of, in any loop, sets one object aside: it is counted once, and claim and pod beside it are served."""
    module, owner, method = (f"topobus.controller.{work}").rsplit(".", 2)
    cls = getattr(importlib.import_module(module), owner)
    real = getattr(cls, method)
    failures = 0

    def cursed(self: object, first: Any, *rest: Any) -> Any:
        nonlocal failures
        names = (first.parts.get("kind"), first.parts.get("name")) if hasattr(first, "parts") else (first.kind, first.name)
        if names == (kind, name):
            failures += 1
            raise TypeError("'int' object is not a mapping")
        return real(self, first, *rest)

    monkeypatch.setattr(cls, method, cursed)
    for manifest in CURSED.split("---"):
        if f"name: {name}" in manifest or name == "cursed-pod":
            await home.apply(manifest)
    if name == "cursed-reserved":
        entry = await home.bus.get(catalogue.OBJECT, kind=kind, namespace="default", name=name)
        assert entry is not None
        reserved = {"status": {"reservedFor": [{"resource": "pods", "name": "gone", "uid": "u"}]}}
        await home.write({**json.loads(encode(entry.value)), **reserved}, kind, name)

    async with Running(nats_server.url) as running:
        await home.is_well()
        counted = running.set_aside(loop)

    assert failures > 0
    assert counted == 1
