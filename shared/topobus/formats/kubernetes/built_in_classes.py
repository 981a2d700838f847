"""The DeviceClasses that stand-alone claims can name before any class is stored: one for each of
our drivers, with all of its devices.

Pure. A stored class of the same name replaces the built-in one. A cluster has none of them.
"""

from __future__ import annotations

from topobus.formats.kubernetes.resource import CelSelector, DeviceClassSpec, Selector
from topobus.formats.messages.messages import ApiObject

__all__ = ["BUILT_IN", "built_in_class", "built_in_class_object"]

BUILT_IN = "BuiltIn"
"""Reason of the condition that marks a class as built in and not stored."""


def built_in_class(driver: str) -> DeviceClassSpec:
    """Make the built-in DeviceClass of a Topobus driver: all of its devices."""
    return DeviceClassSpec(selectors=(Selector(cel=CelSelector(expression=_expression(driver))),))


def built_in_class_object(driver: str) -> ApiObject:
    """Write it as an object for people. Its condition states that it is not stored.

    >>> built_in_class_object("gpu.topobus.dev").metadata
    {'name': 'gpu.topobus.dev'}
    """
    message = (
        f"built in for claims stored here, and itself not stored: all devices of driver {driver}; a class of this "
        "name that is applied takes its place"
    )
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceClass",
        metadata={"name": driver},
        spec={"selectors": [{"cel": {"expression": _expression(driver)}}]},
        status={"conditions": [{"type": "Valid", "status": "True", "reason": BUILT_IN, "message": message}]},
    )


def _expression(driver: str) -> str:
    return f'device.driver == "{driver}"'
