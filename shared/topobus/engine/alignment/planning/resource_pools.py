"""Pools while a pod is being planned: each resource is planned like a class of its own, as kubelet
plans resources.

A view and a request by class are turned into the same by resource (`gpu-h100` beside `gpu`), and
the answer back. Holdings stay by class, because a device's name is unique in its class. A count
asks a resource. Names ask the class, because a claim may take any of its devices.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from topobus.values.device import Device
from topobus.values.outcome import ContainerPlacement, Placement
from topobus.values.pools import resource_split
from topobus.values.request import ContainerRequest, DeviceRequest, PodRequest
from topobus.values.resource_names import is_resource_name
from topobus.values.view import NodeView

__all__ = [
    "class_of_resource",
    "has_pools",
    "named_by_class",
    "offered_part",
    "placed_by_class",
    "request_by_resource",
    "view_by_resource",
]


def has_pools(view: NodeView) -> bool:
    """Say whether any device is in a pool. Without one a view by resource is the view by class.

    Cost: O(devices).
    """
    return any(device.pool for devices in view.devices.values() for device in devices)


def named_by_class(view: NodeView, request: PodRequest) -> PodRequest:
    """Replace resources of third-party device plugins in a request by the class that has their
    devices.

    Shapes: a resource name (`vendor.com/thing`) becomes its class in `view.resource_names`. A name
            that no service offers stays, and is refused later with the nearest one.
    """
    if not any(
        is_resource_name(device_request.device_class)
        for container in request.containers
        for device_request in container.devices
    ):
        return request

    def by_class(device_request: DeviceRequest) -> DeviceRequest:
        return structs.replace(
            device_request,
            device_class=view.resource_names.get(device_request.device_class, device_request.device_class),
        )

    containers = (
        structs.replace(container, devices=tuple(map(by_class, container.devices))) for container in request.containers
    )
    return structs.replace(request, containers=tuple(containers))


def offered_part(view: NodeView, request: PodRequest) -> PodRequest:
    """Return the same request without resources that no service of this node has.

    On a cluster's node kubelet has those from plugins that do not run here, and checks them itself.
    A class (`gpu`) always stays, so that a missing one is refused.
    """

    def is_known(device_request: DeviceRequest) -> bool:
        return not is_resource_name(device_request.device_class) or device_request.device_class in view.resource_names

    if all(is_known(device_request) for container in request.containers for device_request in container.devices):
        return request
    containers = (
        structs.replace(container, devices=tuple(filter(is_known, container.devices)))
        for container in request.containers
    )
    return structs.replace(request, containers=tuple(containers))


def class_of_resource(view: NodeView, resource: str) -> str:
    """Name the class whose devices a resource has.

    Shapes: resource — without the prefix (`gpu-h100`).
    Result: the class (`gpu`), or the same text when it is a class, or nothing on this node.
    """
    if resource in view.devices:
        return resource
    return next(
        (name for name, devices in view.devices.items() if any(device.pool == resource for device in devices)), resource
    )


def view_by_resource(view: NodeView) -> NodeView:
    """Return the same node with each pool as a class of its own.

    A class keeps its name for devices that no pool has.
    """
    devices: dict[str, tuple[Device, ...]] = {}
    held: dict[str, dict[str, str]] = {name: dict(owners) for name, owners in view.held_devices.items()}
    unheard = dict(view.unheard_classes)
    for device_class, all_of_it in view.devices.items():
        split = resource_split(all_of_it, tuple(view.devices))
        devices[device_class] = split.pop(device_class, ())
        for resource, own_devices in split.items():
            devices[resource] = own_devices
            if device_class in unheard:
                unheard[resource] = unheard[device_class]
            for device in own_devices:
                owner = held.get(device_class, {}).pop(device.name, None)
                if owner is not None:
                    held.setdefault(resource, {})[device.name] = owner
    return structs.replace(
        view,
        devices=dict(sorted(devices.items())),
        held_devices={name: owners for name, owners in sorted(held.items()) if owners},
        unheard_classes=dict(sorted(unheard.items())),
    )


def request_by_resource(view: NodeView, request: PodRequest) -> PodRequest:
    """Return the same request with names sorted by the resource that has them.

    Shapes: view — by class.
    """
    places = {
        (device_class, device.name): resource
        for device_class, devices in view.devices.items()
        for resource, own_devices in resource_split(devices, tuple(view.devices)).items()
        for device in own_devices
    }
    return structs.replace(request, containers=tuple(_container(container, places) for container in request.containers))


def placed_by_class(view: NodeView, placement: Placement) -> Placement:
    """Return the same placement with devices by class.

    Shapes: view — by class.
    """
    return structs.replace(placement, containers=tuple(_placed(container, view) for container in placement.containers))


def _container(container_request: ContainerRequest, places: Mapping[tuple[str, str], str]) -> ContainerRequest:
    return structs.replace(
        container_request,
        devices=tuple(part for device_request in container_request.devices for part in _parts(device_request, places)),
    )


def _parts(device_request: DeviceRequest, places: Mapping[tuple[str, str], str]) -> tuple[DeviceRequest, ...]:
    if not device_request.names or device_request.count != len(device_request.names):
        # A faulty request also stays as it is, so that its fault is reported in its own terms.
        return (device_request,)
    by_resource: dict[str, list[str]] = {}
    for name in device_request.names:
        by_resource.setdefault(places.get((device_request.device_class, name), device_request.device_class), []).append(
            name
        )
    return tuple(
        structs.replace(device_request, device_class=resource, count=len(names), names=tuple(names))
        for resource, names in sorted(by_resource.items())
    )


def _placed(container_placement: ContainerPlacement, view: NodeView) -> ContainerPlacement:
    devices: dict[str, set[str]] = {}
    for resource, names in container_placement.devices.items():
        devices.setdefault(class_of_resource(view, resource), set()).update(names)
    return structs.replace(
        container_placement, devices={name: tuple(sorted(names)) for name, names in sorted(devices.items())}
    )
