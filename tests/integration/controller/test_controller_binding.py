"""Binding conditions on a real server: a pod waits for its devices, and
gets others when they fail.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.controller_home import NODE, Home, conditions, pod
from topobus.bus.bus import Conflict
from topobus.formats.kubernetes import admit, object_parts, parse_manifest
from topobus.formats.messages import catalogue
from topobus.formats.messages.messages import ApiObject

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

MANIFEST = f"""
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {{name: fabric}}
spec:
  driver: fabric.example.com
  pool: {{name: fabric, resourceSliceCount: 1}}
  nodeSelector:
    nodeSelectorTerms:
    - matchFields: [{{key: metadata.name, operator: In, values: [{NODE}]}}]
  devices:
  - {{name: card-0, bindsToNode: true, bindingConditions: [attached], bindingFailureConditions: [broken]}}
  - {{name: card-1, bindsToNode: true, bindingConditions: [attached], bindingFailureConditions: [broken]}}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: fabric}}
spec:
  selectors: [{{cel: {{expression: 'device.driver == "fabric.example.com"'}}}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: card}}
spec:
  devices: {{requests: [{{name: r, exactly: {{deviceClassName: fabric}}}}]}}
"""


async def say(home: Home, device: str, condition: str) -> None:
    """Report a condition of a device, as its driver does."""
    parts = {"kind": "resourceclaim", "namespace": "default", "name": "card"}
    while True:
        entry = await home.bus.get(catalogue.OBJECT, **parts)
        assert entry is not None
        said = {
            "driver": "fabric.example.com",
            "pool": "fabric",
            "device": device,
            "conditions": [{"type": condition, "status": "True", "message": "said so"}],
        }
        api_object = msgspec.structs.replace(entry.value, status={**entry.value.status, "devices": [said]})
        if not isinstance(
            await home.bus.compare_and_set(catalogue.OBJECT, api_object, entry.revision, **object_parts(api_object)),
            Conflict,
        ):
            return


def _device(api_object: ApiObject | None) -> str:
    allocation: dict[str, Any] = (api_object.status.get("allocation") if api_object is not None else None) or {}
    results = allocation.get("devices", {}).get("results", [])
    return str(results[0]["device"]) if results else ""


async def test_pod_waits_for_binding_and_gets_another_device_when_it_fails(served: Home) -> None:
    """The pod is told what it waits for; a failure gives the device back and another is tried.

    Its condition lets the pod go on.
    """
    for api_object in parse_manifest(MANIFEST, where="fabric.yaml"):
        await served.put(admit(api_object, uid=f"uid-{api_object.metadata['name']}", now="2026-01-01T00:00:00Z"))
    await served.put(pod("user", "card"))

    waits = await served.until(
        "pod", "user", lambda pod: conditions(pod, "PodScheduled").get("reason") == "WaitsForBinding"
    )
    await say(served, "card-0", "broken")
    moved = await served.until_claim("card", lambda api_object: _device(api_object) == "card-1")
    await say(served, "card-1", "attached")
    bound = await served.until("pod", "user", lambda pod: conditions(pod, "PodScheduled").get("status") == "True")

    assert "card-0: attached" in conditions(waits, "PodScheduled")["message"]
    assert moved is not None
    granted = moved.status["allocation"]["devices"]["results"][0]
    assert (granted["bindingConditions"], granted["bindingFailureConditions"]) == (["attached"], ["broken"])
    assert bound is not None
    assert bound.spec["nodeName"] == NODE
