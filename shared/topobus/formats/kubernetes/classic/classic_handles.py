"""What our own classic drivers write into an allocation for the node: which devices of which node,
with what configuration.

`as_structured` shows such an allocation in the shape of structured claims, so that the gateway
(when it prepares) and the controller (when it counts held devices) read one shape. Handles of other
drivers are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.objects import API_VERSIONS, name_of
from topobus.formats.kubernetes.resource import (
    NodeRequirement,
    NodeSelector,
    NodeSelectorTerm,
    Wire,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.messages import ApiObject
from topobus.values.dra_names import DRIVER, class_of_device, class_of_group, pool_of_class
from topobus.values.errors import ContractError

__all__ = [
    "REQUEST",
    "DeviceHandle",
    "as_structured",
    "device_handles",
    "only_node",
    "shown",
    "write_handle",
]

REQUEST = "devices"
"""A classic claim has no named requests; to readers of structured ones all of its devices came of
one with this name."""
_VERSION = "topobus.dev/v1"
_KIND = "AllocatedDevices"


class DeviceHandle(Wire, frozen=True, kw_only=True):
    """The data of one handle, as JSON."""

    api_version: str = ""
    kind: str = ""
    node: str
    devices: tuple[str, ...] = ()
    config: tuple[dict[str, Any], ...] = ()
    """Opaque configuration, class before claim: what the device service is given at prepare."""


def write_handle(
    driver: str, node: str, devices: tuple[str, ...], config: tuple[dict[str, Any], ...] = ()
) -> classic.ResourceHandle:
    """Make the resource handle by which our classic driver has the node prepare devices.

    Shapes: node, devices — their names; config — opaque parameters for `prepare`, in order; result
            — `data` is JSON of at most 16 KiB, checked by `check_status`.
    """
    data = DeviceHandle(api_version=_VERSION, kind=_KIND, node=node, devices=devices, config=config)
    return classic.ResourceHandle(driver_name=driver, data=encode(data).decode())


def device_handles(status: classic.ClaimStatus, where: str) -> Iterator[tuple[str, DeviceHandle]]:
    """Read the handles of our own classic drivers: class and devices.

    Errors: raises ContractError for a handle that our drivers cannot have written.
    """
    for index, resource_handle in enumerate(
        status.allocation.resource_handles if status.allocation is not None else ()
    ):
        driver = resource_handle.driver_name or status.driver_name
        device_class = class_of_group(driver)
        if device_class is None:
            continue
        place = f"{where}: status.allocation.resourceHandles[{index}].data"
        handle = decode(resource_handle.data, DeviceHandle, where=place)
        if (handle.api_version, handle.kind) != (_VERSION, _KIND):
            raise ContractError(f"{place}: got {handle.kind!r} of {handle.api_version!r}, wanted {_KIND} of {_VERSION}")
        for device in handle.devices:
            if class_of_device(DRIVER, device) != device_class:
                raise ContractError(f"{place}: {device} is no device of class {device_class}")
        yield device_class, handle


def as_structured(claim: ApiObject) -> ApiObject:
    """Show a classic claim as a structured one. Any other claim is returned unchanged.

    Errors: raises ContractError when its status or one of our handles cannot be read.
    """
    if claim.kind != "ResourceClaim" or not classic.is_classic(claim):
        return claim
    status = read_as(claim.status, classic.ClaimStatus, where=f"{name_of(claim)}: status")
    status_fields = {key: value for key, value in claim.status.items() if key != "allocation"}
    if status.allocation is not None:
        results: list[dict[str, Any]] = []
        config: list[dict[str, Any]] = []
        for device_class, handle in device_handles(status, name_of(claim)):
            pool = pool_of_class(handle.node, device_class)
            results.extend(
                {"request": REQUEST, "driver": DRIVER, "pool": pool, "device": device} for device in handle.devices
            )
            config.extend(
                {"source": "FromClaim", "requests": [], "opaque": {"driver": DRIVER, "parameters": parameters}}
                for parameters in handle.config
            )
        status_fields["allocation"] = {"devices": {"results": results, "config": config}}
        if status.allocation.available_on_nodes is not None:
            status_fields["allocation"]["nodeSelector"] = claim.status["allocation"]["availableOnNodes"]
    return msgspec.structs.replace(claim, api_version=API_VERSIONS["ResourceClaim"], spec={}, status=status_fields)


def shown(claim: ApiObject) -> ApiObject:
    """Return a classic claim in the shape of a structured one, for output.

    A claim that cannot be read is returned unchanged.

    Errors: raises nothing.
    """
    try:
        return as_structured(claim)
    except ContractError:
        return claim


def only_node(name: str) -> NodeSelector:
    """Make a node selector that matches one node by name.

    It uses matchFields `metadata.name`, which kubelets and schedulers of every version understand.
    A label may be missing or belong to another program.
    """
    requirement = NodeRequirement(key="metadata.name", operator="In", values=(name,))
    return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(requirement,)),))
