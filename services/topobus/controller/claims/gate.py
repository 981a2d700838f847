"""The scheduling gate by which a pod asks for its claims to be allocated here, and how far a pod of a cluster has come.

Flows in: pods and claims as stored. Flows out: whether a pod waits behind our gate, whether its claims are still its own, and which of two versions is the later one.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.contracts.messages import ApiObject

__all__ = ["GATE", "gates_of", "has_gate", "is_over", "version_of"]

GATE = "topobus.dev/allocation"
"""The scheduling gate with which a pod asks for its claims to be allocated here."""

# Digits of the largest version that etcd counts to (2^63 - 1); Python refuses to read numbers of more than 4300.
_LONGEST_VERSION = 19


def version_of(api_object: ApiObject) -> int:
    """Read an object's resource version as a number, for comparison with others of its kind; 0 when it has none."""
    text = str(api_object.metadata.get("resourceVersion") or "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _LONGEST_VERSION else 0


def gates_of(pod: ApiObject) -> tuple[str, ...]:
    """List a pod's scheduling gates."""
    gates = pod.spec.get("schedulingGates")
    return tuple(str(gate.get("name", "")) for gate in (gates if isinstance(gates, list) else ()) if isinstance(gate, Mapping))


def has_gate(pod: ApiObject) -> bool:
    """Say whether a pod waits behind our gate."""
    return GATE in gates_of(pod)


def is_over(pod: ApiObject) -> bool:
    """Say whether a pod has ended, or was asked to before it had a node: its claims are nobody's then."""
    is_ending = bool(pod.metadata.get("deletionTimestamp")) and not pod.spec.get("nodeName")
    return pod.status.get("phase") in ("Succeeded", "Failed") or is_ending
