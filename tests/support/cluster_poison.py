"""Cluster objects with every part that the controller reads, and every way to spoil one place of
them.
"""

from __future__ import annotations

import json
from typing import Any

from support.cluster_home import CLASS, GATE, Object
from support.malformed import spoilt
from topobus.controller.store.api import CLASSES, NODES, SLICES, TAINT_RULES, TEMPLATES
from topobus.kubernetes.answers import Plain
from topobus.kubernetes.reading import CLAIMS, PODS, Kind

__all__ = ["WHOLE", "poison"]


def _metadata(name: str, **more: Any) -> Object:
    return {
        "name": name,
        "namespace": "default",
        "uid": "uid-1",
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"a": "b"},
        "annotations": {"c": "d"},
        "finalizers": ["e"],
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": True}],
        **more,
    }


def _whole_claim() -> Object:
    """A claim with every part that the controller reads, allocated by a gate's intent for a pod."""
    result = {
        "request": "r",
        "driver": CLASS,
        "pool": "n9",
        "device": "gpu-9",
        "shareID": "s",
        "consumedCapacity": {"m": "1Gi"},
    }
    allocation = {
        "devices": {
            "results": [result],
            "config": [{"source": "FromClaim", "opaque": {"driver": CLASS, "parameters": {"a": 1}}}],
        }
    }
    note = {"number": 1, "node": "n9", "allocation": allocation, "pod": "poison-pod", "refused": ["n8"]}
    exactly = {
        "deviceClassName": CLASS,
        "allocationMode": "ExactCount",
        "count": 1,
        "adminAccess": False,
        "selectors": [{"cel": {"expression": "true"}}],
        "tolerations": [{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
        "capacity": {"requests": {"m": "1Gi"}},
    }
    devices = {
        "requests": [{"name": "r", "exactly": exactly}],
        "constraints": [{"requests": ["r"], "matchAttribute": f"{CLASS}/model"}],
        "config": [{"requests": ["r"], "opaque": {"driver": CLASS, "parameters": {"a": 1}}}],
    }
    status = {
        "allocation": {**allocation, "allocationTimestamp": "2026-01-01T00:00:00Z"},
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
        "devices": [
            {"driver": CLASS, "pool": "n9", "device": "gpu-9", "conditions": [{"type": "Ready", "status": "True"}]}
        ],
    }
    annotations = {"topobus.dev/attempt": json.dumps(note), "topobus.dev/attempts": "1"}
    return {"metadata": _metadata("c", annotations=annotations), "spec": {"devices": devices}, "status": status}


def _whole_pod() -> Object:
    resources = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}, "claims": [{"name": "a"}]}
    terms = [{"matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}], "matchFields": []}]
    spec = {
        "containers": [{"name": "main", "resources": resources}],
        "initContainers": [{"name": "init", "resources": resources, "restartPolicy": "Always"}],
        "schedulingGates": [{"name": GATE}],
        "resourceClaims": [
            {"name": "a", "resourceClaimName": "shared"},
            {"name": "b", "resourceClaimTemplateName": "t"},
        ],
        "nodeSelector": {"k": "v"},
        "tolerations": [{"key": "k", "operator": "Equal", "value": "v", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        "priority": 5,
        "overhead": {"cpu": "1"},
    }
    statuses = [{"name": "b", "resourceClaimName": "made"}]
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}]
    return {
        "metadata": _metadata("p"),
        "spec": spec,
        "status": {"phase": "Pending", "resourceClaimStatuses": statuses, "conditions": conditions},
    }


def _whole_slice() -> Object:
    device = {
        "name": "gpu-0",
        "attributes": {
            "model": {"string": "x"},
            "count": {"int": 1},
            "fast": {"bool": True},
            "firmware": {"version": "1.0.0"},
        },
        "capacity": {
            "memory": {
                "value": "1Gi",
                "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi", "max": "2Gi", "step": "1Gi"}},
            }
        },
        "consumesCounters": [{"counterSet": "s", "counters": {"m": {"value": "1"}}}],
        "taints": [{"key": "k", "value": "v", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}],
        "allowMultipleAllocations": True,
    }
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": _metadata("s"),
        "spec": {"driver": "other.example.com", "nodeName": "n1", "pool": pool, "devices": [device]},
    }


WHOLE: dict[str, tuple[Kind, Object]] = {
    "claims": (CLAIMS, _whole_claim()),
    "pods": (PODS, _whole_pod()),
    "slices": (SLICES, _whole_slice()),
    "classes": (
        CLASSES,
        {
            "metadata": _metadata("k"),
            "spec": {
                "selectors": [{"cel": {"expression": "true"}}],
                "config": [{"opaque": {"driver": CLASS, "parameters": {"a": 1}}}],
                "extendedResourceName": "example.com/gpu",
            },
        },
    ),
    "templates": (
        TEMPLATES,
        {"metadata": _metadata("t"), "spec": {"metadata": {"labels": {"a": "b"}}, "spec": _whole_claim()["spec"]}},
    ),
    "taint rules": (
        TAINT_RULES,
        {
            "metadata": _metadata("r"),
            "spec": {
                "deviceSelector": {"driver": "other.example.com", "pool": "n1", "device": "gpu-0"},
                "taint": {"key": "k", "value": "v", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"},
            },
        },
    ),
    "nodes": (
        NODES,
        {
            "metadata": _metadata("n7"),
            "spec": {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}], "unschedulable": False},
            "status": {"allocatable": {"cpu": "8", "memory": "1Gi"}},
        },
    ),
}
"""By what the fuzz is of: its kind, and an object with every part that the controller reads."""


def poison(whole: Object) -> list[Plain]:
    """Every way to spoil one place of an object, each as an object with a name of its own unless
    the name is what was spoilt.
    """
    spoilt_objects: list[Plain] = []
    for index, (_, text) in enumerate(spoilt(whole)):
        plain = json.loads(text)
        if not isinstance(plain, dict):
            continue
        metadata = plain.get("metadata")
        if isinstance(metadata, dict) and metadata.get("name") == whole["metadata"]["name"]:
            metadata["name"] = f"poison-{index}"
            if metadata.get("uid") == "uid-1":
                metadata["uid"] = f"uid-{index}"
        spoilt_objects.append(plain)
    return spoilt_objects
