"""`topobus allocate --dry-run` without a running system: slices from a file, or a cluster by its
kubeconfig.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.claim_manifests import claim
from topobus.testing.apiserver import ApiServerSimulator

pytestmark = pytest.mark.integration

_TOPOBUS = (sys.executable, "-m", "topobus.cli.main")
_LIMIT_S = 60.0


def test_dry_run_reads_slices_from_a_file_without_any_server(tmp_path: Path) -> None:
    """With --slices neither NATS nor a controller is needed.

    A Node gives its labels to node selectors.
    """
    slices = """
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata: {name: n1, labels: {zone: a}}
- apiVersion: resource.k8s.io/v1
  kind: DeviceClass
  metadata: {name: gpu}
  spec: {selectors: [{cel: {expression: 'device.driver == "gpu.example.com" && device.attributes["gpu.example.com"].model == "big"'}}]}
- apiVersion: resource.k8s.io/v1
  kind: ResourceSlice
  metadata: {name: net}
  spec:
    driver: gpu.example.com
    pool: {name: net, generation: 1, resourceSliceCount: 1}
    nodeSelector: {nodeSelectorTerms: [{matchExpressions: [{key: zone, operator: In, values: [a]}]}]}
    devices: [{name: d0, attributes: {model: {string: big}}}, {name: d1, attributes: {model: {string: small}}}]
"""  # noqa: E501
    (tmp_path / "slices.yaml").write_text(slices)
    (tmp_path / "claim.yaml").write_text(claim("one", 1, "gpu") + "---\n" + claim("two", 1, "gpu"))
    command = [
        *_TOPOBUS,
        "allocate",
        "--dry-run",
        "-f",
        tmp_path / "claim.yaml",
        "--slices",
        tmp_path / "slices.yaml",
        "-o",
        "json",
    ]
    environment = {**os.environ, "TOPOBUS_ALL__NATS__URL": "nats://127.0.0.1:1"}

    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)

    first, second = json.loads(done.stdout)["answers"]
    assert done.returncode == 1
    assert first["allocations"]["default/one"]["devices"]["results"][0]["device"] == "d0"
    assert [reason["code"] for reason in second["reasons"]][:2] == ["too-few-devices", "nearest-miss"]


def test_dry_run_takes_a_folder_as_vendors_write_it(tmp_path: Path) -> None:
    """Objects of v1beta1, the pods of a Deployment with their template's claims, and a Service
    beside them, in files of one folder.
    """
    (tmp_path / "claims.yaml").write_text(
        """
apiVersion: resource.k8s.io/v1beta1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {devices: {requests: [{name: r, deviceClassName: gpu}]}}}
---
{apiVersion: v1, kind: Service, metadata: {name: web}}
"""
    )
    (tmp_path / "web.yaml").write_text(
        """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  template:
    spec:
      containers: [{name: main, image: x, resources: {claims: [{name: gpu}]}}]
      resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
"""
    )
    slices = tmp_path / "slices"
    slices.mkdir()
    (slices / "slices.yaml").write_text(
        """
apiVersion: resource.k8s.io/v1beta1
kind: DeviceClass
metadata: {name: gpu}
spec: {selectors: [{cel: {expression: 'device.driver == "gpu.example.com"'}}]}
---
apiVersion: resource.k8s.io/v1beta1
kind: ResourceSlice
metadata: {name: n1}
spec:
  driver: gpu.example.com
  nodeName: n1
  pool: {name: n1, generation: 1, resourceSliceCount: 1}
  devices: [{name: d0, basic: {}}, {name: d1, basic: {}}]
"""
    )
    command = [*_TOPOBUS, "allocate", "-f", tmp_path, "--slices", slices, "-o", "json"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    answers = json.loads(done.stdout)["answers"]
    assert [(answer["name"], answer["condition"]) for answer in answers] == [
        ("Pod default/web-0", "Allocated"),
        ("Pod default/web-1", "Allocated"),
        ("Pod default/web-2", "DoesNotFit"),
    ]
    assert done.returncode == 1
    assert "left out, because Topobus does not use it: 1 Service" in done.stderr


def test_dry_run_says_what_it_takes_and_what_it_does_not_look_at(tmp_path: Path) -> None:
    """The text has the capacity of a share.

    A claim that has its devices already and a pod of a group are told of.
    """
    (tmp_path / "all.yaml").write_text(
        """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: gpu}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: n1}
spec:
  driver: gpu.example.com
  nodeName: n1
  pool: {name: n1, generation: 1, resourceSliceCount: 1}
  devices: [{name: d0, allowMultipleAllocations: true, capacity: {memory: {value: 10Gi}}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: share}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu, capacity: {requests: {memory: 3Gi}}}}]}}
status: {allocation: {devices: {results: [{request: r, driver: gpu.example.com, pool: n1, device: d0}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: member}
spec: {schedulingGroup: {podGroupName: gang}, containers: [{name: c}]}
"""
    )
    command = [*_TOPOBUS, "allocate", "-f", tmp_path / "all.yaml", "--slices", tmp_path / "all.yaml"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    said = " ".join(done.stderr.split())
    assert done.returncode == 0, done.stderr
    assert "r: d0  (gpu.example.com, pool n1, takes memory 3Gi)" in done.stdout
    assert "ResourceClaim default/share is allocated already" in said
    assert "Pod default/member: the group in its spec (schedulingGroup" in said


async def test_dry_run_reads_a_cluster_by_kubeconfig(tmp_path: Path) -> None:
    """Slices, classes, allocated claims and nodes come from an API server.

    Nothing is written there.
    """
    taken = {"request": "r", "driver": "gpu.example.com", "pool": "n1", "device": "d0"}
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": "gpu"},
            "spec": {"selectors": [{"cel": {"expression": 'device.driver == "gpu.example.com"'}}]},
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "n1-gpu"},
            "spec": {
                "driver": "gpu.example.com",
                "pool": pool,
                "nodeName": "n1",
                "devices": [{"name": "d0"}, {"name": "d1"}],
            },
        },
        {**yaml.safe_load(claim("taker", 1, "gpu")), "status": {"allocation": {"devices": {"results": [taken]}}}},
    ]
    (tmp_path / "claims.yaml").write_text(claim("one", 1, "gpu") + "---\n" + claim("two", 2, "gpu"))
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}

    async with ApiServerSimulator() as server:
        for first in objects:
            server.put(first)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        arguments = ["allocate", "--dry-run", "-f", str(tmp_path / "claims.yaml"), "--cluster", "-o", "json"]
        process = await asyncio.create_subprocess_exec(
            *_TOPOBUS,
            *arguments,
            env=environment | {"KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, complaint = await asyncio.wait_for(process.communicate(), _LIMIT_S)
        asked = {request.method for request in server.requests}

    assert process.returncode == 1, complaint
    first, second = json.loads(output)["answers"]
    assert [result["device"] for result in first["allocations"]["default/one"]["devices"]["results"]] == ["d1"]
    assert "claim default/taker" in json.dumps(second["reasons"])
    assert asked == {"GET"}


async def test_dry_run_counts_rules_and_namespaces_of_a_cluster(tmp_path: Path) -> None:
    """DeviceTaintRules are listed and count.

    For a claim with admin access so are namespaces, and only with the label it is allocated.
    """
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    rule = {
        "deviceSelector": {"driver": "gpu.example.com", "device": "d0"},
        "taint": {"key": "k", "effect": "NoSchedule"},
    }
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}},
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "ops", "labels": {"resource.kubernetes.io/admin-access": "true"}},
        },
        {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "gpu"}, "spec": {}},
        {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule", "metadata": {"name": "broken"}, "spec": rule},
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": "n1-gpu"},
            "spec": {
                "driver": "gpu.example.com",
                "pool": pool,
                "nodeName": "n1",
                "devices": [{"name": "d0"}, {"name": "d1"}],
            },
        },
    ]
    admin = claim("admin", 1, "gpu").replace("count: 1", "count: 1, adminAccess: true")
    (tmp_path / "claims.yaml").write_text(
        "---\n".join(
            (
                claim("both", 2, "gpu"),
                admin,
                admin.replace("name: admin", "name: admin, namespace: ops"),
                claim("one", 1, "gpu"),
            )
        )
    )

    async with ApiServerSimulator() as server:
        for api_object in objects:
            server.put(api_object)
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        process = await asyncio.create_subprocess_exec(
            *_TOPOBUS,
            *("allocate", "--dry-run", "-f", str(tmp_path / "claims.yaml"), "--cluster", "-o", "json"),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, complaint = await asyncio.wait_for(process.communicate(), _LIMIT_S)

    assert process.returncode == 1, complaint
    both, refused, allowed, single = json.loads(output)["answers"]
    assert "tainted k=:NoSchedule" in json.dumps(both["reasons"])
    assert [reason["code"] for reason in refused["reasons"]] == ["admin-access-forbidden"]
    assert allowed["condition"] == "Allocated"
    assert [result["device"] for result in single["allocations"]["default/one"]["devices"]["results"]] == ["d1"]


def test_dry_run_says_what_is_missing_when_there_is_no_kubeconfig(tmp_path: Path) -> None:
    """A kubeconfig that is not there is named, with how to name another."""
    (tmp_path / "claim.yaml").write_text(claim("one", 1, "gpu"))
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "absent")}
    command = [*_TOPOBUS, "allocate", "--dry-run", "-f", str(tmp_path / "claim.yaml"), "--cluster"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    assert done.returncode == 66
    assert "there is no kubeconfig" in done.stderr
