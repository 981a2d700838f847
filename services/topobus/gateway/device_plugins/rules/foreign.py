"""Turns the devices of another vendor's device plugin into devices of an inventory: names, classes,
health.

A plugin's ids are arbitrary text. The names made from them are DNS labels, and the same id always
gives the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import Struct

from topobus.values.device import Device
from topobus.values.dra_names import foreign_device
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.idset import NodeSet
from topobus.values.names import is_dns_label, to_dns_label

__all__ = ["ForeignDevice", "class_of_resource", "foreign_devices", "foreign_names", "observations_of"]

# A class is part of socket names (108 bytes at most) and of a DRA driver's name (63 characters with
# our domain).
_CLASS_LIMIT = 40
_HASH = 6


class ForeignDevice(Struct, frozen=True, kw_only=True):
    """One entry of a plugin's list."""

    id: str
    is_healthy: bool = True
    nodes: tuple[int, ...] = ()


def class_of_resource(resource: str) -> str:
    """Return the class of a resource: its own name and its vendor, so that nvidia.com/gpu is not
    our gpu.

    >>> class_of_resource("nvidia.com/gpu"), class_of_resource("amd.com/GPU_v2")
    ('gpu-nvidia', 'gpu-v2-amd')
    """
    domain, _, name = resource.partition("/")
    label = to_dns_label(f"{name}-{domain.partition('.')[0]}")
    return (
        label if len(label) <= _CLASS_LIMIT else f"{label[: _CLASS_LIMIT - _HASH - 1].rstrip('-')}-{_digest(resource)}"
    )


def foreign_names(device_class: str, ids: Iterable[str]) -> dict[str, str]:
    """Give each id a name: the class, and the id where that is a short DNS label, else a label made
    from it with a hash.

    Returns name to id.

    >>> sorted(foreign_names("gpu-acme", ["dev-0", "GPU-1a"]))
    ['gpu-acme--dev-0', 'gpu-acme--gpu-1a-c5a5fa']
    """
    return {foreign_device(device_class, _label(id_, 61 - len(device_class))): id_ for id_ in sorted(set(ids))}


def foreign_devices(device_class: str, resource: str, listed: Iterable[ForeignDevice]) -> tuple[Device, ...]:
    """Convert a plugin's list to devices of a class. A plugin without topology has no opinion."""
    devices = {foreign_device.id: foreign_device for foreign_device in listed}
    return tuple(
        Device(
            name=name,
            device_class=device_class,
            driver=device_class,
            numa_nodes=NodeSet.of(devices[foreign_name].nodes) if devices[foreign_name].nodes else None,
            attributes={"resource": resource, "id": foreign_name},
        )
        for name, foreign_name in sorted(foreign_names(device_class, devices).items())
    )


def observations_of(device_class: str, listed: Iterable[ForeignDevice]) -> dict[str, tuple[Observation, ...]]:
    """Return what is wrong with each device. The plugin reports only that something is."""
    sick = Observation(
        dimension=Dimension.DRIVER,
        state=HealthState.UNHEALTHY,
        reason="plugin-unhealthy",
        message="its device plugin calls it unhealthy",
    )
    states = {foreign_device.id: foreign_device.is_healthy for foreign_device in listed}
    return {
        name: () if states[foreign_name] else (sick,)
        for name, foreign_name in foreign_names(device_class, states).items()
    }


def _label(id_: str, limit: int) -> str:
    if is_dns_label(id_) and len(id_) <= limit:
        return id_
    try:
        label = to_dns_label(id_)
    except ValueError:
        label = "device"
    return f"{label[: limit - _HASH - 1].rstrip('-')}-{_digest(id_)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]
