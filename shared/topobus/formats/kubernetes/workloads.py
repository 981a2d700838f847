"""Kinds of Kubernetes that manifests contain beside ours: workloads, whose pods a plan takes, and
others, which are left out.

Pure. Source: k8s.io/api/apps/v1 and batch/v1 types.go, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from topobus.formats.kubernetes.shape import Problem, did_you_mean

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
# Kinds of the core group that have nothing to do with devices. Others of it may be typing errors.
# Source: k8s.io/api/core/v1/register.go, 1.36.
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
# The fields beside the template in a workload's spec. A name that is similar to one that is read,
# and is none of these, is misspelt.
_BESIDE = {
    "CronJob": "concurrencyPolicy failedJobsHistoryLimit schedule startingDeadlineSeconds successfulJobsHistoryLimit "
    "suspend timeZone",
    "DaemonSet": "minReadySeconds revisionHistoryLimit selector updateStrategy",
    "Deployment": "minReadySeconds paused progressDeadlineSeconds replicas revisionHistoryLimit selector strategy",
    "Job": "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy "
    "manualSelector maxFailedIndexes parallelism "
    "podFailurePolicy podReplacementPolicy selector successPolicy suspend ttlSecondsAfterFinished",
    "ReplicaSet": "minReadySeconds replicas selector",
    "ReplicationController": "minReadySeconds replicas selector",
    "StatefulSet": "minReadySeconds ordinals persistentVolumeClaimRetentionPolicy podManagementPolicy replicas "
    "revisionHistoryLimit selector serviceName "
    "updateStrategy volumeClaimTemplates",
}
_TOP = ("apiVersion", "kind", "metadata", "status")
_GROUP = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)*/v[0-9a-z]+")


class Workload(NamedTuple):
    """A pod template, and how many of its pods run at once."""

    kind: str
    name: str
    pod: dict[str, Any]
    """The template as a v1 Pod."""
    prefix: str
    """Where the template's fields are in the object: `spec.template.`."""
    pods: int
    """0 where something is wrong."""
    problems: tuple[Problem, ...] = ()
    """What is wrong around the template; then there may be none."""

    @property
    def place(self) -> str:
        """Name the workload in messages: an error in its template is in no Pod that a user
        wrote.
        """
        return f"{self.kind} {self.pod['metadata'].get('namespace') or 'default'}/{self.name}"


def workload_of(value: Mapping[str, Any]) -> Workload | None:
    """Read a workload. Return None for other kinds.

    The template is not checked: the reader of pods does that. A kind that is misspelt, or that is
    in a version that does not have it, is a workload with that problem.

    >>> workload_of({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {"replicas": 2, "template": {}}}).pods
    2
    """  # noqa: E501
    kind, version = str(value.get("kind")), str(value.get("apiVersion"))
    problems = _kind_problems(kind, version)
    if kind not in _WORKLOADS.get(version, ()) and not problems:
        return None
    spec: Mapping[str, Any] = value
    prefix = ""
    template: Mapping[str, Any] = {}
    if not problems:
        spec, prefix = _inside(spec, prefix, "spec", _TOP, problems)
        if kind == "CronJob":
            spec, prefix = _inside(spec, prefix, "jobTemplate", _BESIDE[kind].split(), problems)
            spec, prefix = _inside(spec, prefix, "spec", _TOP, problems)
        template, _ = _inside(spec, prefix, "template", _BESIDE["Job" if kind == "CronJob" else kind].split(), problems)
    metadata = _mapping(value.get("metadata"))
    name = str(metadata.get("name") or str(metadata.get("generateName") or kind).rstrip("-").lower())
    in_pod = {key: text for key, text in metadata.items() if key == "namespace"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_mapping(template.get("metadata")), **in_pod, "name": name},
        "spec": template.get("spec") or {},
    }
    pods = 0 if problems else _count(kind, spec, prefix, problems)
    return Workload(kind, name, pod, f"{prefix}template.", pods, tuple(problems))


def is_of_others(value: Mapping[str, Any]) -> bool:
    """Say whether an object's kind is neither ours nor a misspelling of one: another group's, or a
    known one of the core group.

    >>> is_of_others({"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"}), is_of_others({"apiVersion": "v1", "kind": "Pods"})
    (True, False)
    """  # noqa: E501
    version, kind = value.get("apiVersion"), value.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return False
    group = version.partition("/")[0]
    if _GROUP.fullmatch(version):
        return group != "resource.k8s.io" and not f".{group}".endswith(".topobus.dev")
    return version == "v1" and kind in _CORE_KINDS


def _kind_problems(kind: str, version: str) -> list[Problem]:
    """List what is wrong with a kind that looks like a workload's, in a group of Kubernetes itself.

    Another group's kinds are not checked.
    """
    group = version.rpartition("/")[0]
    if kind in _WORKLOADS.get(version, ()) or group not in ("", "apps", "batch", "extensions"):
        return []
    wanted = [api_version for api_version, kinds in _WORKLOADS.items() if kind in kinds]
    if wanted:
        got = repr(version) if version != "None" else "nothing"
        return [Problem("apiVersion", f"got {got}, wanted {wanted[0]} for a {kind}")]
    meant = did_you_mean(kind, _WORKLOADS.get(version, ())) if group else ""
    return [Problem("kind", f"got {kind!r}{meant}")] if meant else []


def _inside(
    here: Mapping[str, Any], prefix: str, name: str, beside: Sequence[str], problems: list[Problem]
) -> tuple[Mapping[str, Any], str]:
    """Go to a field.

    A field that is misspelt or missing is a problem, unless one further out is.
    """
    if not problems:
        legal = (name, *beside)
        misspelt = {key: meant for key in here if key not in legal and (meant := did_you_mean(str(key), legal))}
        problems += [Problem(f"{prefix}{key}", f"unknown field{meant}") for key, meant in misspelt.items()]
        if name not in here and not problems:
            problems.append(Problem(f"{prefix}{name}", "it is missing: the pods are described in it"))
    return _mapping(here.get(name)), f"{prefix}{name}."


def _count(kind: str, spec: Mapping[str, Any], prefix: str, problems: list[Problem]) -> int:
    """Count the pods that run at once. A number that a Job leaves open counts as one."""
    if kind == "DaemonSet":
        return 1
    numbers: list[int] = []
    for key in ("parallelism", "completions") if kind in ("Job", "CronJob") else ("replicas",):
        number = spec.get(key)
        if number is None:
            # Without completions as many as `parallelism` asks for; without both one.
            if key != "completions":
                numbers.append(1)
        elif isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST_PODS:
            problems.append(
                Problem(f"{prefix}{key}", f"got {number!r}, wanted a number from 0 to {MOST_PODS} for a plan")
            )
            return 0
        else:
            numbers.append(number)
    return min(numbers)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
