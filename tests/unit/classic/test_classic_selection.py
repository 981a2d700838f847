"""Classic selectors: what each condition wants, in words of one device."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from topobus.engine.cel.seam import DeviceFacts, SelectorError, Version
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.classic.classic_cel import selector_expression
from topobus.formats.kubernetes.classic.classic_parameters import DeviceSelector
from topobus.values.quantity import Quantity

A100 = DeviceFacts(
    "gpu.topobus.dev",
    {
        "gpu.topobus.dev": {
            "model": "NVIDIA A100-SXM4-40GB",
            "uuid": "GPU-1",
            "driverVersion": "535.104.05",
            "cudaDriverVersion": Version("12.2.0"),
        },
        "resource.kubernetes.io": {"numaNode": 1},
    },
    {"gpu.topobus.dev": {"memory": Quantity.parse("40Gi")}},
)


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ({}, True),
        ({"productName": "*a100*"}, True),
        ({"productName": "a100"}, False),
        ({"uuid": "gpu-1"}, True),
        ({"memory": {"value": "40Gi", "operator": "GreaterThanOrEqualTo"}}, True),
        ({"memory": {"value": "40Gi", "operator": "LessThan"}}, False),
        ({"memory": {"value": "42949672960"}}, True),
        ({"driverVersion": {"value": "535.104.5"}}, True),
        ({"driverVersion": {"value": "535.86", "operator": "GreaterThan"}}, True),
        ({"cudaRuntimeVersion": {"value": "12.2", "operator": "LessThan"}}, False),
        ({"index": 0}, False),
        ({"migEnabled": False}, False),
        ({"attribute": {"name": "resource.kubernetes.io/numaNode", "value": 0, "operator": "GreaterThan"}}, True),
        ({"attribute": {"name": "speed", "value": 0, "operator": "NotEquals"}}, False),
        ({"capacity": {"name": "memory", "value": "1Gi", "operator": "NotEquals"}}, True),
        ({"productName": "*a100*", "uuid": "GPU-2"}, False),
        (
            {
                "orExpression": [
                    {"productName": "*h100*"},
                    {"andExpression": [{"uuid": "GPU-1"}, {"memory": {"value": "40Gi"}}]},
                ]
            },
            True,
        ),
        ({"andExpression": [{"productName": "*a100*"}, {"orExpression": [{"uuid": "x"}, {"uuid": "y"}]}]}, False),
    ],
)
def test_selector_wants_a_device_when_all_that_it_says_holds(selector: dict[str, Any], wanted: bool) -> None:
    """What a device does not publish, it does not have: no operator makes it wanted."""
    expression = selector_expression(msgspec.convert(selector, DeviceSelector), A100.driver)
    compiled = CelCompiler().compile(expression or "true")

    assert not isinstance(compiled, SelectorError)
    assert compiled.matches(A100) is wanted
