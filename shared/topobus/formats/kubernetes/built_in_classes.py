"""The DeviceClasses that stand-alone claims can name before any class is stored: one for each
device class, with all of its devices, and one for each level of shapes.

Pure. A stored class of the same name replaces the built-in one. A cluster has none of them.
"""

from __future__ import annotations

from topobus.formats.kubernetes.resource import CelSelector, DeviceClassSpec, Selector
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import DRIVER, group_of_class
from topobus.values.resource_names import RESOURCE_PREFIX

__all__ = ["BUILT_IN", "built_in_class", "built_in_class_object", "class_selector", "shape_selector"]

BUILT_IN = "BuiltIn"
"""Reason of the condition that marks a class as built in and not stored."""


def built_in_class(device_class: str, *, is_level: bool = False) -> DeviceClassSpec:
    """Make the built-in DeviceClass of a device class: all of its devices.

    Shapes: is_level — it is a level of shapes, for which pods may ask as a resource too.
    """
    expression = shape_selector(device_class) if is_level else class_selector(device_class)
    return DeviceClassSpec(
        selectors=(Selector(cel=CelSelector(expression=expression)),),
        extended_resource_name=f"{RESOURCE_PREFIX}{device_class}" if is_level else None,
    )


def built_in_class_object(device_class: str, *, is_level: bool = False) -> ApiObject:
    """Write it as an object for people. Its condition states that it is not stored.

    >>> built_in_class_object("gpu").metadata
    {'name': 'gpu.topobus.dev'}
    """
    what = f"shapes of level {device_class}" if is_level else f"devices of class {device_class}"
    message = (
        f"built in for claims stored here, and itself not stored: all {what}; a DeviceClass of this name that is "
        "applied takes its place"
    )
    return ApiObject(
        api_version="resource.k8s.io/v1",
        kind="DeviceClass",
        metadata={"name": group_of_class(device_class)},
        spec={
            **({"extendedResourceName": f"{RESOURCE_PREFIX}{device_class}"} if is_level else {}),
            "selectors": [
                {"cel": {"expression": shape_selector(device_class) if is_level else class_selector(device_class)}}
            ],
        },
        status={"conditions": [{"type": "Valid", "status": "True", "reason": BUILT_IN, "message": message}]},
    )


def class_selector(device_class: str) -> str:
    """Write the CEL expression that selects the devices of a class.

    >>> class_selector("gpu")
    'device.driver == "topobus.dev" && device.attributes["topobus.dev"].class == "gpu"'
    """
    return f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].class == "{device_class}"'


def shape_selector(level: str) -> str:
    """Write the CEL expression that selects the shapes of a level.

    >>> shape_selector("gpu-nic")
    'device.driver == "topobus.dev" && device.attributes["topobus.dev"].class == "shape" && device.attributes["topobus.dev"].gpuNic'
    """  # noqa: E501
    first, *others = level.split("-")
    name = first + "".join(word.capitalize() for word in others)
    return f'{class_selector("shape")} && device.attributes["{DRIVER}"].{name}'
