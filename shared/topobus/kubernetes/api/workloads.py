"""Kinds of Kubernetes that stand in manifests beside ours: workloads, of which a plan takes the pods, and others, which are left out.

Flows in: an object as written. Flows out: its pod template as a pod with how many of it run at once; or whether it is nobody's business here. Pure.
Source: k8s.io/api/apps/v1 and batch/v1 types.go, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["MOST_PODS", "WORKLOAD_KINDS", "Workload", "is_of_others", "workload_of"]

MOST_PODS = 1000
"""Pods of one workload that a plan takes; it is about one machine, or a few."""

_WORKLOADS = {
    "apps/v1": ("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet"),
    "batch/v1": ("Job", "CronJob"),
    "v1": ("ReplicationController",),
}
WORKLOAD_KINDS = frozenset(kind for kinds in _WORKLOADS.values() for kind in kinds)
"""Kinds that have a pod template."""
# Kinds of the core group that have nothing to do with devices. Others of it may be typing errors. Source: k8s.io/api/core/v1/register.go, 1.36.
_CORE_KINDS = frozenset(
    [
        "ConfigMap",
        "Endpoints",
        "Event",
        "LimitRange",
        "PersistentVolume",
        "PersistentVolumeClaim",
        "PodTemplate",
        "ReplicationController",
        "ResourceQuota",
        "Secret",
        "Service",
        "ServiceAccount",
    ]
)
_GROUP = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)*/v[0-9a-z]+")


class Workload(NamedTuple):
    """A pod template, and how many pods run of it at once."""

    kind: str
    name: str
    pod: dict[str, Any]
    """The template as a v1 Pod."""
    prefix: str
    """Where the template's fields stand in the object: `spec.template.`."""
    pods: int
    problem: str = ""
    """What is wrong with the number, with its field; then it is 0."""


def workload_of(value: Mapping[str, Any]) -> Workload | None:
    """Read a workload; None for other kinds. Whether the template is a good pod is for the reader of pods to say.

    >>> workload_of({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {"replicas": 2, "template": {}}}).pods
    2
    """
    kind = value.get("kind")
    if kind not in _WORKLOADS.get(str(value.get("apiVersion")), ()):
        return None
    spec, prefix = _mapping(value.get("spec")), "spec."
    if kind == "CronJob":
        spec, prefix = _mapping(_mapping(spec.get("jobTemplate")).get("spec")), "spec.jobTemplate.spec."
    metadata = _mapping(value.get("metadata"))
    name = str(metadata.get("name") or str(metadata.get("generateName") or kind).rstrip("-").lower())
    template = _mapping(spec.get("template"))
    in_pod = {key: text for key, text in metadata.items() if key == "namespace"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_mapping(template.get("metadata")), **in_pod, "name": name},
        "spec": template.get("spec") or {},
    }
    return Workload(str(kind), name, pod, f"{prefix}template.", *_count(str(kind), spec, prefix))


def is_of_others(value: Mapping[str, Any]) -> bool:
    """Say whether an object is of a kind that is none of ours and no misspelling of one: another group's, or a known one of the core group.

    >>> is_of_others({"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"}), is_of_others({"apiVersion": "v1", "kind": "Pods"})
    (True, False)
    """
    version, kind = value.get("apiVersion"), value.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return False
    group = version.partition("/")[0]
    if _GROUP.fullmatch(version):
        return group != "resource.k8s.io" and not f".{group}".endswith(".topobus.dev")
    return version == "v1" and kind in _CORE_KINDS


def _count(kind: str, spec: Mapping[str, Any], prefix: str) -> tuple[int, str]:
    """Count the pods that run at once; what a Job leaves open is one."""
    if kind == "DaemonSet":
        return 1, ""
    numbers: list[int] = []
    for key in ("parallelism", "completions") if kind in ("Job", "CronJob") else ("replicas",):
        number = spec.get(key)
        if number is None:
            # Without completions as many as `parallelism` says; without both one.
            if key != "completions":
                numbers.append(1)
        elif isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST_PODS:
            return 0, f"{prefix}{key}: got {number!r}, wanted a number from 0 to {MOST_PODS} for a plan"
        else:
            numbers.append(number)
    return min(numbers), ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
