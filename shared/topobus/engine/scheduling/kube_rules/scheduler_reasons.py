"""Reads why kube-scheduler does not place a pod, and finds the reasons whose rules are not checked
here before devices are bound.

Pure. A reason that is unknown here, such as that of a plugin added to the scheduler, counts as not
checked.
Source: kube-scheduler's FitError and the reasons of its plugins, 1.36, and some of earlier
releases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from topobus.formats.messages.messages import ApiObject

__all__ = ["is_unschedulable", "scheduled_message", "uncovered_reasons"]

_HEAD = re.compile(r"0/\d+ nodes(?: are available)?: *")
# After the reasons come the messages of PostFilter plugins: whether preemption would help.
_TAIL = re.compile(r"\.(?: |$)")
# One reason and how many nodes gave it; a reason may have commas of its own.
_BETWEEN = re.compile(r", (?=\d+ )")
_COUNT = re.compile(r"\d+ +")

# The beginnings, in lower case, of reasons whose rule is checked here before devices are bound, or
# that are about claims that were allocated here.
_COVERED = (
    "insufficient ",
    "too many pods",
    "node(s) were unschedulable",
    "node(s) had untolerated taint",
    "node(s) had taints that the pod didn't tolerate",
    "node(s) didn't match the requested node name",
    "node(s) didn't match pod's node affinity",
    # Nodes that were not looked at one by one: the pod names others.
    "node(s) didn't satisfy plugin(s) [nodeaffinity]",
    "node(s) didn't satisfy plugin nodeaffinity",
    "node(s) didn't have free ports",
    "node(s) didn't match pod affinity rules",
    "node(s) didn't match pod anti-affinity rules",
    "node(s) didn't satisfy existing pods anti-affinity rules",
    "node(s) didn't match pod topology spread constraints",
    "node(s) had volume node affinity conflict",
    "node(s) didn't match persistentvolume's node affinity",
    "node(s) didn't find available persistent volumes to bind",
    "node(s) had no available volume zone",
    "node(s) exceed max volume count",
    "node(s) unavailable due to one or more pvc(s)",
    "node(s) unavailable due to persistentvolumeclaim with readwriteoncepod",
    "pod has unbound immediate persistentvolumeclaims",
    "waiting for ephemeral volume controller",
    "persistentvolumeclaim ",
    "persistentvolume ",
    "cannot allocate all claims",
    "resourceclaim ",
    "resource claim ",
)


def is_unschedulable(pod: ApiObject) -> bool:
    """Say whether kube-scheduler could not place a pod when it last tried."""
    scheduled = _scheduled(pod)
    return scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"


def scheduled_message(pod: ApiObject) -> str:
    """Return kube-scheduler's message about a pod. Empty when there is none."""
    return str(_scheduled(pod).get("message") or "")


def uncovered_reasons(message: str) -> tuple[str, ...]:
    """List the reasons whose rule is not checked here, each once, in their order.

    >>> uncovered_reasons("0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had no available disk. preemption: 0/3 nodes are available: 3 x.")
    ('node(s) had no available disk',)
    """  # noqa: E501
    reasons = _TAIL.split(_HEAD.sub("", message.strip(), count=1), maxsplit=1)[0]
    parts = (_COUNT.sub("", part, count=1).strip() for part in _BETWEEN.split(reasons))
    return tuple(dict.fromkeys(part for part in parts if part and not part.lower().startswith(_COVERED)))


def _scheduled(pod: ApiObject) -> Mapping[str, Any]:
    conditions = pod.status.get("conditions")
    listed = conditions if isinstance(conditions, list) else []
    return next(
        (
            condition
            for condition in listed
            if isinstance(condition, Mapping) and condition.get("type") == "PodScheduled"
        ),
        {},
    )
