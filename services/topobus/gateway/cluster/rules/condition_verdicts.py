"""Decides what the conditions of a Node, as node-problem-detector and others set them, say of its
devices. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.verdict import Verdict, VerdictState

__all__ = ["SOURCE", "condition_verdicts"]

SOURCE = "node-condition"
"""The source of all of them, as `health.sources` of a device service names it."""

_STATES = {"True": VerdictState.UNHEALTHY, "False": VerdictState.HEALTHY}


def condition_verdicts(node: ApiObject, mapping: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, Verdict], ...]:
    """Return the verdicts of a Node's conditions, each with its device class.

    True means that there is a problem, as with node-problem-detector. Unknown, a condition that is
    not there and one without a time say nothing.

    Shapes: mapping — `cluster.condition_verdicts`.
    """
    present: list[Any] = node.status.get("conditions") or []
    return tuple(
        (device_class, verdict)
        for condition in present
        if condition.get("status") in _STATES and condition.get("lastTransitionTime")
        for target in mapping.get(str(condition.get("type")), ())
        for device_class, verdict in [_verdict(condition, target)]
    )


def _verdict(condition: Mapping[str, Any], target: str) -> tuple[str, Verdict]:
    device_class = class_of_device(DRIVER, target) or target
    text = " ".join(str(condition.get("message") or "").split())
    return device_class, Verdict(
        source=f"{SOURCE}/{condition['type']}",
        state=_STATES[condition["status"]],
        device="" if target == device_class else target,
        code=str(condition.get("reason") or "")[:64],
        message=text[:256],
        observed_at=str(condition["lastTransitionTime"]),
    )
