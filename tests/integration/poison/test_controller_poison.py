"""Poison in the store: every field of every kind with a wrong type, and nonsense beside good
objects.

The good claim and pod beside it are served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from support.alignment_nodes import dgx_facts
from support.controllers import NOW, controller
from support.poisoned_home import GOOD, Poisoned
from topobus.formats.kubernetes import admit, parse_manifest
from topobus.formats.kubernetes.objects import is_of_cluster
from topobus.formats.messages import catalogue
from topobus.formats.messages.codec import encode
from topobus.formats.messages.messages import ApiObject
from topobus.simulation.nats_server import NatsServer

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

# One object of each stored kind, each as somebody honest would write it.
KINDS = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: bad-claim, annotations: {a: b}, labels: {a: b}, finalizers: [x/y], ownerReferences: [{kind: Pod, name: p, uid: u, controller: true}]}
spec:
  devices:
    requests: [{name: r, exactly: {deviceClassName: nic.topobus.dev, count: 1, selectors: [{cel: {expression: "true"}}]}}]
    constraints: [{matchAttribute: resource.kubernetes.io/pcieRoot}]
    config: [{opaque: {driver: topobus.dev, parameters: {a: b}}}]
status:
  reservedFor: [{resource: pods, name: p, uid: u}]
  conditions: [{type: Allocated, status: "False", reason: r, message: m, lastTransitionTime: "2026-01-01T00:00:00Z"}]
  allocation: {devices: {results: [{request: r, driver: topobus.dev, pool: n9, device: gpu-9}]}}
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
"""  # noqa: E501

WRONG: tuple[Any, ...] = (7, "text", [7], {"x": 7}, None, [{"name": ">"}])


async def test_claims_go_on_when_somebody_wrote_nonsense_beside_them(home: Poisoned, nats_server: NatsServer) -> None:
    """Annotations that are a number, and a reservation by a name that no pod can have, stop only
    what they stand in.
    """
    for manifest in KINDS.split("---"):
        (api_object,) = parse_manifest(manifest, where="test.yaml")
        if api_object.metadata["name"] == "bad-claim":
            good = plain(api_object)
    good["status"] = {}
    await home.write(
        {**good, "metadata": {**good["metadata"], "name": "numbered", "annotations": 7}}, "resourceclaim", "numbered"
    )
    reserved = {"reservedFor": [{"resource": "pods", "name": ">", "uid": "u"}, {"name": ">"}]}
    await home.write(
        {**good, "metadata": {**good["metadata"], "name": "reserved"}, "status": reserved}, "resourceclaim", "reserved"
    )

    async with controller(nats_server.url):
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


async def test_good_objects_are_served_when_every_field_of_every_kind_has_a_wrong_type(
    home: Poisoned, nats_server: NatsServer
) -> None:
    """Whatever anybody writes into the bucket, in whatever field of whatever kind, claim and pod
    beside it get what they ask, and plans are answered.
    """
    count = 0
    async with asyncio.TaskGroup() as group:
        gate = asyncio.Semaphore(64)

        async def write(kind: str, bad: dict[str, Any], name: str) -> None:
            async with gate:
                await home.write(bad, kind, name, "_" if is_of_cluster(bad["kind"]) else "default")

        for count, (kind, bad) in enumerate(poisons()):
            name = (
                f"{bad['metadata'].get('name') if isinstance(bad['metadata'].get('name'), str) else 'x'}".strip("><")
                or "x"
            )
            is_named = bad["metadata"].get("name") == name
            unique = f"{name}-{count}"
            if is_named:
                bad["metadata"] = {**bad["metadata"], "name": unique}
            group.create_task(write(kind, bad, unique))

    async with controller(nats_server.url):
        await home.is_well()
        # A second change of everything's surroundings: what is set aside is
        # tried again, and set aside again.
        await home.bus.put(
            catalogue.INVENTORY,
            msgspec.structs.replace(dgx_facts()[1]["nic"], node="other"),
            node="other",
            device_class="nic",
        )
        await home.apply(GOOD.replace("good-", "better-"))
        await home.newest("resourceclaim", "better-claim", '"allocation"')
        await home.newest("pod", "better-pod", '"nodeName"')

    assert count > 500
