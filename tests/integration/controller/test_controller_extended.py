"""Extended resources on a real server: a pod that asks for `example.com/gpu` gets devices by a
claim that nobody wrote.
"""

from __future__ import annotations

import pytest

from support.controller_home import Home, conditions
from topobus.formats.kubernetes import admit, parse_manifest

pytestmark = [pytest.mark.integration, pytest.mark.memory_bus, pytest.mark.virtual_time]

MANIFEST = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: example-gpu}
spec:
  extendedResourceName: example.com/gpu
  selectors:
  - cel: {expression: 'device.driver == "topobus.dev" && device.attributes["topobus.dev"].class == "gpu"'}
---
apiVersion: v1
kind: Pod
metadata: {name: trainer}
spec:
  containers:
  - name: main
    resources: {limits: {example.com/gpu: 2}}
"""


async def test_pod_with_an_extended_resource_is_scheduled_with_a_claim(served: Home) -> None:
    """The claim is made, allocated, reserved for the pod, and goes with it."""
    for api_object in parse_manifest(MANIFEST, where="pod.yaml"):
        await served.put(admit(api_object, uid=f"uid-{api_object.metadata['name']}", now="2026-01-01T00:00:00Z"))

    pod = await served.until(
        "pod", "trainer", lambda api_object: conditions(api_object, "PodScheduled").get("status") == "True"
    )

    assert pod is not None
    status = pod.status["extendedResourceClaimStatus"]
    assert [request_mapping["requestName"] for request_mapping in status["requestMappings"]] == [
        "container-0-request-0"
    ]
    results = await served.results(status["resourceClaimName"])
    assert [(result["request"], result["driver"]) for result in results] == [
        ("container-0-request-0", "topobus.dev")
    ] * 2
