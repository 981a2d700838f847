"""One node whose bucket has writes of any client, and the controller that must continue."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from support.reading import Reader
from support.real_topology import WatchedTopology
from topobus.bus.bus import Bus, Change
from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject
from topobus.process.service import Runtime

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


class Poisoned:
    """One node, a user, and whatever somebody writes straight into the bucket."""

    def __init__(self, bus: Bus, objects: Reader[Change[ApiObject]], topology: WatchedTopology) -> None:
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

        def matching(items: list[Change[ApiObject]]) -> ApiObject | None:
            api_objects = [
                item.value for item in items if (item.parts.get("kind"), item.parts.get("name")) == (kind, name)
            ]
            return api_objects[-1] if api_objects else None

        def is_there(items: list[Change[ApiObject]]) -> bool:
            value = matching(items)
            return value is not None and wanted in json.dumps([value.status, value.spec])

        await self.objects.until(is_there)
        value = matching(self.objects.items)
        assert value is not None
        return value

    async def is_well(self) -> None:
        """Wait until a good claim and a good pod beside the poison have what they ask."""
        await self.apply(GOOD)
        await self.newest("resourceclaim", "good-claim", '"allocation"')
        await self.newest("pod", "good-pod", '"nodeName"')


def set_aside(runtime: Runtime, loop: str) -> float:
    """Count what one loop of a controller has set aside."""
    return runtime.registry.get_sample_value("topobus_controller_objects_set_aside_total", {"loop": loop}) or 0.0
