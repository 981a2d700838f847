"""The DeviceClasses that stand-alone claims can name before any class is stored: one for each
device class, with all of its devices.

Pure. A stored class of the same name replaces the built-in one. A cluster has none of them.
"""

from __future__ import annotations

from topobus.formats.kubernetes.resource import CelSelector, DeviceClassSpec, Selector
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import DRIVER, group_of_class

__all__ = ["BUILT_IN", "built_in_class", "built_in_class_object", "class_selector"]

BUILT_IN = "BuiltIn"
"""Reason of the condition that marks a class as built in and not stored."""


def built_in_class(device_class: str) -> DeviceClassSpec:
    """Make the built-in DeviceClass of a device class: all of its devices."""
    return DeviceClassSpec(selectors=(Selector(cel=CelSelector(expression=class_selector(device_class))),))


def built_in_class_object(device_class: str) -> ApiObject:
    """Write it as an object for people. Its condition states that it is not stored.

    >>> built_in_class_object("gpu").metadata
    {'name': 'gpu.topobus.dev'}
    """
    message = (
        f"built in for claims stored here, and itself not stored: all devices of class {device_class}; a DeviceClass "
        "of this name that is applied takes its place"
    )
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceClass",
        metadata={"name": group_of_class(device_class)},
        spec={"selectors": [{"cel": {"expression": class_selector(device_class)}}]},
        status={"conditions": [{"type": "Valid", "status": "True", "reason": BUILT_IN, "message": message}]},
    )


def class_selector(device_class: str) -> str:
    """Write the CEL expression that selects the devices of a class.

    >>> class_selector("gpu")
    'device.driver == "topobus.dev" && device.attributes["topobus.dev"].class == "gpu"'
    """
    return f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].class == "{device_class}"'
