"""Pods by resource on a real cluster whose API server keeps `extendedResourceName`: a class that
appears takes kubelet's list back, and claims serve from then on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightkube.generic_resource import create_global_resource
from lightkube.resources.resource_v1 import ResourceClaim

from support.cluster import Cluster, listed_by_kubelet, until
from topobus.formats.kubernetes.built_in_classes import class_selector

CLASS = os.environ.get("TOPOBUS_CLUSTER_CLASS", "gpu")
RESOURCE = f"topobus.dev/{CLASS}"
KUBELET = Path(os.environ.get("TOPOBUS_KUBELET_DIR", "/var/lib/kubelet"))
_SPECIAL = "resource.kubernetes.io/extended-resource-claim"
_DeviceClass = create_global_resource("resource.k8s.io", "v1", "DeviceClass", "deviceclasses")


async def claims_of(cluster: Cluster, pod: str) -> list[dict[str, Any]]:
    """What kube-scheduler claimed for a pod's resources."""
    claims = [claim.to_dict() async for claim in cluster.client.list(ResourceClaim, namespace="default")]
    return [
        claim
        for claim in claims
        if claim["metadata"].get("annotations", {}).get(_SPECIAL) == "true"
        and any(owner["name"] == pod for owner in claim["metadata"].get("ownerReferences", ()))
    ]


async def listed() -> int:
    """How many devices kubelet itself can give."""
    return await listed_by_kubelet(KUBELET, RESOURCE)


async def test_claims_serve_a_resource_as_long_as_a_class_names_it(cluster: Cluster) -> None:
    """A pod by kubelet's allocation runs on; the next one gets a claim on another device.

    A restart of its container is nobody's trouble; the list comes back with the class gone.
    """
    devices = await until("slices", lambda: cluster.devices(CLASS), lambda seen: len(seen) > 1)
    await until(f"{len(devices)} devices at kubelet", listed, lambda count: count == len(devices))
    await until(f"allocatable {RESOURCE}", lambda: cluster.allocatable(RESOURCE), bool)
    before = await cluster.make_pod(resource=RESOURCE)
    await cluster.until_running(before)
    selector = {"cel": {"expression": class_selector(CLASS)}}
    spec = {"selectors": [selector], "extendedResourceName": RESOURCE}
    stored = (await cluster.client.create(_DeviceClass({"metadata": {"name": cluster.run}, "spec": spec}))).to_dict()
    try:
        if "extendedResourceName" not in stored["spec"]:
            pytest.skip("NOT CHECKED ON A CLUSTER: this API server does not keep extendedResourceName")
        await until("no device at kubelet", listed, lambda count: count == 0)
        await until(f"no allocatable {RESOURCE}", lambda: cluster.allocatable(RESOURCE), lambda count: count == 0)
        # kube-scheduler sees the Node later than we do, and would bind a pod by the former number.
        probe = await cluster.make_pod(resource=RESOURCE, count=len(devices) + 1)
        await until(
            "kube-scheduler looks for a claim's devices",
            lambda: cluster.why_waiting(probe),
            lambda why: "cannot allocate all claims" in why,
        )
        await cluster.remove(probe)
        after = [await cluster.make_pod(resource=RESOURCE, count=count) for count in (1, 2)]
        for pod in after:
            await cluster.until_running(pod)
        given = [await claims_of(cluster, pod) for pod in after]
        first = await cluster.pod(before)
        for pod in (*after, before):
            await cluster.remove(pod)
    finally:
        await cluster.client.delete(_DeviceClass, cluster.run)
    await until(f"{len(devices)} devices at kubelet again", listed, lambda count: count == len(devices))
    await until(f"allocatable {RESOURCE}", lambda: cluster.allocatable(RESOURCE), lambda count: count == len(devices))
    last = await cluster.make_pod(resource=RESOURCE)
    await cluster.until_running(last)

    granted = [
        [result["device"] for result in claim["status"]["allocation"]["devices"]["results"]] for (claim,) in given
    ]
    assert [len(names) for names in granted] == [1, 2]
    assert len({name for names in granted for name in names}) == 3
    assert first["status"]["phase"] == "Running"
    assert await claims_of(cluster, last) == []
