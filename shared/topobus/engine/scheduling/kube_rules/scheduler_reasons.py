"""Reads what kube-scheduler says about a pod that it does not place.

Pure. Source: kube-scheduler's handling of a pod without a node (schedule_one.go,
handleSchedulingFailure) and pkg/scheduler/framework/preemption, 1.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.formats.messages.messages import ApiObject

__all__ = ["is_preempting", "is_unschedulable", "scheduled_message"]


def is_unschedulable(pod: ApiObject) -> bool:
    """Say whether kube-scheduler could not place a pod when it last tried."""
    scheduled = _scheduled(pod)
    return scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"


def is_preempting(pod: ApiObject) -> bool:
    """Say whether kube-scheduler evicts other pods for a pod: it has nominated a node for it."""
    return bool(pod.status.get("nominatedNodeName"))


def scheduled_message(pod: ApiObject) -> str:
    """Return kube-scheduler's message about a pod. Empty when there is none."""
    return str(_scheduled(pod).get("message") or "")


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
