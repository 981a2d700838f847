"""A file of cases in which one is of an unknown shape: that one fails, the others count."""

from __future__ import annotations

from typing import Any

import pytest

from lab.conformance.allocator_checks import check_allocation, read_case
from topobus.engine.allocation.values import Gate


def _case(**fields: Any) -> dict[str, Any]:
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 1}
    wanted = {"name": "r", "exactly": {"deviceClassName": "c", "allocationMode": "ExactCount", "count": 1}}
    return {
        "features": [],
        "node": {"metadata": {"name": "n"}},
        "classes": [{"metadata": {"name": "c"}, "spec": {}}],
        "slices": [
            {
                "metadata": {"name": "s"},
                "spec": {"driver": "d", "pool": pool, "nodeName": "n", "devices": [{"name": "a"}]},
            }
        ],
        "claims": [{"metadata": {"name": "one"}, "spec": {"devices": {"requests": [wanted]}}}],
        "expect": {"outcome": "no-fit"},
        **fields,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"claims": [{"spec": {}}]},
        {"claims": ["text"]},
        {"node": ["text"]},
        {"slices": [{"metadata": {"name": "s"}, "spec": {"driver": "d", "pool": {}}}]},
        {"allocated": {"consumedCapacity": {"d/p/a": {"memory": "much"}}}},
    ],
)
def test_check_fails_one_case_when_it_cannot_be_read(fields: dict[str, Any]) -> None:
    """The answer says what is wrong with the case; nothing is raised that would end the file."""
    _, got = check_allocation(_case(**fields))

    assert got["outcome"].startswith("cannot be read: ")


def test_check_answers_when_parts_are_null_or_unknown() -> None:
    """Go writes empty parts as null; keys and features that nobody knows are no matter."""
    _, got = check_allocation(
        _case(allocated={"devices": None, "consumedCapacity": {"d/p/b": None}}, features=["Newer"], more={"x": 1})
    )

    assert got["outcome"] == "allocated"


def test_read_case_takes_the_gates_of_binding_conditions_one_by_one() -> None:
    """Two gates together switch binding conditions on; a file may name them apart."""
    both = read_case(_case(features=["DRAResourceClaimDeviceStatus", "DRADeviceBindingConditions"])).gates
    gates = read_case(_case(features=["DRADeviceBindingConditions"])).gates

    assert both == {Gate.BINDING_CONDITIONS}
    assert not gates
