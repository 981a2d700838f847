"""Decides whether claims serve the pods that ask for a resource by its name, so that no device
plugin offers it as well.

The result is the obstacle, empty where kube-scheduler makes claims for such requests. An API server
that does not support `extendedResourceName` drops the field, so a class that has it proves that the
server supports it.
Source: KEP-5004; k8s.io/dynamic-resource-allocation deviceclass/extendedresourcecache, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from topobus.engine.cel.seam import DeviceFacts, SelectorCompiler, SelectorError, facts_of
from topobus.formats.kubernetes.slices import slice_device
from topobus.formats.messages.messages import ApiObject
from topobus.values.device import Device
from topobus.values.dra_names import DRIVER

__all__ = ["class_of_resource", "is_too_old", "obstacle"]

_VERSION = re.compile(r"v?(\d+)\.(\d+)")
# The first kubelet that prepares such claims without a feature gate (DRAExtendedResource, beta). An
# older one starts the container without its devices.
_FIRST_KUBELET = (1, 36)


def class_of_resource(resource: str, classes: Iterable[ApiObject]) -> ApiObject | None:
    """Return the class that kube-scheduler takes for a resource: of several the newest, then the
    first by name.

    None when no class names it.
    """
    named = [api_object for api_object in classes if api_object.spec.get("extendedResourceName") == resource]
    by_name = sorted(named, key=lambda api_object: str(api_object.metadata.get("name", "")))
    return max(by_name, key=lambda api_object: str(api_object.metadata.get("creationTimestamp", "")), default=None)


def is_too_old(kubelet_version: str) -> bool:
    """Return whether a kubelet cannot prepare such claims.

    One that reports no version is assumed to be new enough.

    >>> [is_too_old(version) for version in ("v1.35.4", "v1.36.2", "v2.0.0", "")]
    [True, False, False, False]
    """
    version = _VERSION.match(kubelet_version)
    return version is not None and (int(version[1]), int(version[2])) < _FIRST_KUBELET


def obstacle(
    resource: str,
    offered: Mapping[str, Device | None],
    others: Collection[Device],
    classes: Iterable[ApiObject],
    compiler: SelectorCompiler,
) -> str:
    """Return why claims cannot serve a resource. Empty where they do.

    What a pod gets by a name must not depend on how it is served, so the class has to select the
    resource's devices and no others.
    Shapes: offered — name to the device as claims see it, None for one that they may not have;
    others — the class's further devices, as claims see them.
    """
    api_object = class_of_resource(resource, classes)
    if api_object is None:
        return f"no DeviceClass of the API server has extendedResourceName {resource}"
    name = api_object.metadata.get("name", "")
    for device_name, device in sorted(offered.items()):
        if device is None:
            return f"{device_name} is not offered to claims"
        if device.sharing is not None:
            return f"{device_name} is shared: its replicas are counted by kubelet"
        if not _selects(api_object, device, compiler):
            return f"DeviceClass {name} does not select {device_name}"
    more = sorted(device.name for device in others if _selects(api_object, device, compiler))
    return f"DeviceClass {name} also selects {more[0]}, which {resource} does not have" if more else ""


def _selects(api_object: ApiObject, device: Device, compiler: SelectorCompiler) -> bool:
    selectors = api_object.spec.get("selectors") or ()
    facts = facts_of(DRIVER, slice_device(device))
    return isinstance(selectors, list | tuple) and all(_holds(selector, facts, compiler) for selector in selectors)


def _holds(selector: object, facts: DeviceFacts, compiler: SelectorCompiler) -> bool:
    cel = selector.get("cel") if isinstance(selector, Mapping) else None
    expression = cel.get("expression") if isinstance(cel, Mapping) else None
    compiled = compiler.compile(expression) if isinstance(expression, str) else None
    return compiled is not None and not isinstance(compiled, SelectorError) and compiled.matches(facts) is True
