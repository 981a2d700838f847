"""What conditions of the Node say of its devices, for the device services."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.condition_verdicts import condition_verdicts
from topobus.values.verdict import Verdict, VerdictState

SINCE = "2026-01-02T03:04:05Z"
CONDITION = {
    "type": "KernelDeadlock",
    "status": "True",
    "reason": "DockerHung",
    "message": "task docker:7\nblocked",
    "lastTransitionTime": SINCE,
}


def _verdicts(mapping: dict[str, tuple[str, ...]], **changes: str | None) -> tuple[tuple[str, Verdict], ...]:
    conditions: list[dict[str, Any]] = [{"type": "Ready", "status": "True", "lastTransitionTime": SINCE}]
    conditions.append({key: value for key, value in {**CONDITION, **changes}.items() if value is not None})
    node = ApiObject(api_version="v1", kind="Node", metadata={"name": "n1"}, status={"conditions": conditions})
    return condition_verdicts(node, mapping)


def test_condition_is_a_verdict_on_each_of_its_classes_and_devices() -> None:
    """True is unhealthy; reason and message are the source's own, and its time decides the order."""
    said = Verdict(
        source="node-condition/KernelDeadlock",
        state=VerdictState.UNHEALTHY,
        code="DockerHung",
        message="task docker:7 blocked",
        observed_at=SINCE,
    )

    assert _verdicts({"KernelDeadlock": ("gpu", "nic-0000-3b-00-0")}) == (
        ("gpu", said),
        ("nic", replace(said, device="nic-0000-3b-00-0")),
    )


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"status": "False"}, VerdictState.HEALTHY),
        ({"status": "Unknown"}, None),
        ({"lastTransitionTime": None}, None),
        ({"type": "ReadonlyFilesystem"}, None),
    ],
)
def test_only_a_condition_that_knows_says_something(changes: dict[str, str | None], state: VerdictState | None) -> None:
    """False takes back what True said; Unknown, one without a time, and one that is not named or not
    there say nothing, so an earlier verdict stays.
    """
    verdicts = _verdicts({"KernelDeadlock": ("gpu",)}, **changes)

    assert [said.state for _, said in verdicts] == ([state] if state is not None else [])


def test_node_without_conditions_says_nothing() -> None:
    """As it is just after it registered."""
    node = ApiObject(api_version="v1", kind="Node", metadata={"name": "n1"})

    assert condition_verdicts(node, {"KernelDeadlock": ("gpu",)}) == ()
