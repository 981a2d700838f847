"""A device that expressions cannot be shown: every selector fails on it, with the attribute's name,
and only selectors do.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab.conformance.allocator_checks import answer_case
from topobus.engine.cel.selector import CelCompiler

LISTS = "DRAListTypeAttributes"


def case(attributes: dict[str, Any], *, features: list[str], selectors: list[str]) -> dict[str, Any]:
    """Describe one claim for a device with these attributes."""
    return {
        "features": features,
        "node": {"metadata": {"name": "n1"}},
        "classes": [
            {
                "metadata": {"name": "gpu"},
                "spec": {"selectors": [{"cel": {"expression": selector}} for selector in selectors]},
            }
        ],
        "slices": [
            {
                "metadata": {"name": "s1"},
                "spec": {
                    "driver": "gpu.example.com",
                    "nodeName": "n1",
                    "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": "d0", "attributes": attributes}],
                },
            }
        ],
        "claims": [
            {
                "metadata": {"name": "c"},
                "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu", "count": 1}}]}},
            }
        ],
    }


@pytest.mark.parametrize(
    ("attributes", "features", "message"),
    [
        ({"odd": {}}, [LISTS], "attribute odd: unsupported attribute value"),
        ({"odd": {"decimals": ["1.5"]}}, [LISTS], "attribute odd: unsupported attribute value"),
        ({"roots": {"strings": ["a"]}}, [], "attribute roots: unsupported attribute value"),
        ({"fw": {"version": "1.2"}}, [LISTS], "attribute fw: not a semantic version: '1.2'"),
        ({"fw": {"versions": ["1.2.0", "x"]}}, [LISTS], "attribute fw: not a semantic version: 'x'"),
    ],
)
def test_selector_fails_on_a_device_that_it_cannot_be_shown(
    attributes: dict[str, Any], features: list[str], message: str
) -> None:
    """Whatever the selector reads."""
    found_answer_case = answer_case(case(attributes, features=features, selectors=["true"]), CelCompiler())
    assert found_answer_case["outcome"] == "error"
    assert message in found_answer_case["reasons"][0]
    assert "gpu.example.com/p/d0" in found_answer_case["reasons"][0]


@pytest.mark.parametrize("attributes", [{"odd": {}}, {"roots": {"strings": ["a"]}}, {"fw": {"version": "1.2"}}])
def test_device_without_selectors_over_it_is_taken(attributes: dict[str, Any]) -> None:
    """Attributes do not matter to a request that asks for none."""
    assert answer_case(case(attributes, features=[], selectors=[]), CelCompiler())["outcome"] == "allocated"


def test_lists_are_shown_while_their_gate_is_on() -> None:
    """An empty list is one too."""
    attributes = {"roots": {"strings": ["a", "b"]}, "none": {"ints": []}}
    selectors = ['device.attributes["gpu.example.com"].roots.includes("b")']
    assert answer_case(case(attributes, features=[LISTS], selectors=selectors), CelCompiler())["outcome"] == "allocated"


def test_verdict_of_a_good_device_does_not_hide_the_fault_of_another() -> None:
    """Both devices agree on all that the selector reads."""
    broken = case({"fw": {"version": "1.2.0"}}, features=[], selectors=['device.driver == "gpu.example.com"'])
    broken["slices"][0]["spec"]["devices"].append({"name": "d1", "attributes": {"fw": {"version": "one"}}})
    broken["claims"][0]["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2
    found_answer_case = answer_case(broken, CelCompiler())
    assert found_answer_case["outcome"] == "error"
    assert "d1" in found_answer_case["reasons"][0]
