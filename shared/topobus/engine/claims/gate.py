"""The scheduling gate with which a pod asks for allocation by this controller, and the state of
gated pods.

A pod's next version has a condition about its claims, or no gate any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from topobus.engine.claims.lifecycle import with_condition
from topobus.formats.messages.messages import ApiObject

__all__ = [
    "ALLOCATED_CONDITION",
    "GATE",
    "REFUSED_BY_SCHEDULER",
    "RESERVED_TAINT",
    "allocated_reason",
    "gates_of",
    "has_allocated_condition",
    "has_gate",
    "is_over",
    "version_number",
    "version_of",
    "with_allocated_condition",
    "without_gate",
]

GATE = "topobus.dev/allocation"
"""The scheduling gate with which a pod asks for its claims to be allocated here."""
ALLOCATED_CONDITION = "topobus.dev/Allocated"
"""The condition in the status of a pod that waits behind our gate."""
REFUSED_BY_SCHEDULER = "RefusedByScheduler"
"""Reason of that condition while kube-scheduler does not place a pod on the node of its devices."""
RESERVED_TAINT = GATE
"""A device taint that keeps kube-scheduler away from devices: only claims of gated pods, which we
allocate, get them."""

# A condition's message; a cluster may have thousands of pods that wait, each with one.
_MAX_MESSAGE = 1024
# Digits of the largest version that etcd counts to (2^63 - 1); Python refuses to
# read numbers of more than 4300.
_LONGEST_VERSION = 19


def version_of(api_object: ApiObject) -> int:
    """Read an object's resource version as a number, for comparison with others of its kind.

    0 when it has none.
    """
    return version_number(api_object.metadata)


def version_number(metadata: Mapping[str, Any]) -> int:
    """Read the resource version out of the metadata of an object as served, as `version_of`
    does.
    """
    text = str(metadata.get("resourceVersion") or "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _LONGEST_VERSION else 0


def gates_of(pod: ApiObject) -> tuple[str, ...]:
    """List a pod's scheduling gates."""
    gates = pod.spec.get("schedulingGates")
    return tuple(
        str(gate.get("name", "")) for gate in (gates if isinstance(gates, list) else ()) if isinstance(gate, Mapping)
    )


def has_gate(pod: ApiObject) -> bool:
    """Say whether a pod waits behind the scheduling gate of this controller."""
    return GATE in gates_of(pod)


def is_over(pod: ApiObject) -> bool:
    """Say whether a pod has ended, or its deletion was requested before it had a node: it no longer
    uses its claims.
    """
    is_ending = bool(pod.metadata.get("deletionTimestamp")) and not pod.spec.get("nodeName")
    return pod.status.get("phase") in ("Succeeded", "Failed") or is_ending


def without_gate(pod: ApiObject) -> ApiObject:
    """Remove our gate. Others' gates stay."""
    gates = pod.spec.get("schedulingGates")
    kept = [
        gate
        for gate in (gates if isinstance(gates, list) else ())
        if not (isinstance(gate, Mapping) and gate.get("name") == GATE)
    ]
    spec = {key: value for key, value in pod.spec.items() if key != "schedulingGates"}
    return msgspec.structs.replace(pod, spec={**spec, "schedulingGates": kept} if kept else spec)


def has_allocated_condition(pod: ApiObject) -> bool:
    """Say whether a pod has a condition about its claims."""
    conditions = pod.status.get("conditions")
    return isinstance(conditions, list) and any(
        isinstance(condition, Mapping) and condition.get("type") == ALLOCATED_CONDITION for condition in conditions
    )


def allocated_reason(pod: ApiObject) -> str:
    """Return the reason of the condition about its claims. Empty when it has none."""
    conditions = pod.status.get("conditions")
    reasons = (
        condition.get("reason")
        for condition in (conditions if isinstance(conditions, list) else ())
        if isinstance(condition, Mapping) and condition.get("type") == ALLOCATED_CONDITION
    )
    return str(next(reasons, "") or "")


def with_allocated_condition(pod: ApiObject, *, is_true: bool, reason: str, message: str, now: str) -> ApiObject:
    """Write the state of its claims into the pod's status. Return the same object when it is there
    already.

    The time changes only when the status does.
    """
    shown = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"
    # Servers before 1.34 have no generation in a pod's condition.
    return with_condition(
        pod, is_true=is_true, reason=reason, message=shown, now=now, kind=ALLOCATED_CONDITION, is_generation_told=False
    )
