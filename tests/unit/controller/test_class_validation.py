"""What a device class is told of its expressions."""

from __future__ import annotations

from typing import Any

import pytest

from topobus.controller.standalone.validate_classes import validate
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.messages.messages import ApiObject


def selector(expression: str) -> dict[str, Any]:
    """One selector."""
    return {"cel": {"expression": expression}}


@pytest.mark.parametrize(
    ("spec", "reason", "said"),
    [
        ({}, "Valid", "0 selectors"),
        ({"selectors": [selector('device.driver == "topobus.dev"')]}, "Valid", "1 selectors"),
        (
            {"selectors": [selector("true"), selector("device.driver ====")]},
            "Invalid",
            "spec.selectors[1].cel.expression",
        ),
        ({"selectors": 5}, "Malformed", "selectors"),
        ({"selectors": [selector("true")] * 100}, "Malformed", "selectors"),
    ],
    ids=["none", "good", "second-does-not-compile", "no-list", "too-many"],
)
def test_class_is_told_what_is_wrong_when_it_is_judged(spec: dict[str, Any], reason: str, said: str) -> None:
    """The place of each mistake is named."""
    verdict, message = validate(
        ApiObject(api_version="resource.k8s.io/v1", kind="DeviceClass", metadata={"name": "a"}, spec=spec),
        CelCompiler(),
    )

    assert verdict == reason
    assert said in message
