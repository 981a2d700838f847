"""A pod's claims and the pod itself, aligned together: the claims' devices count as wanted by name
by the containers that use them.

The plan is the same as if the pod had asked for exactly these devices and they were free. The pod's
own share is then taken from the placement. So there is one engine and one set of rules for devices
of claims and of pods, and without claims nothing here runs.
"""

from __future__ import annotations

from msgspec import structs

from topobus.engine.alignment.planning.node_view import cpu_name, without_owners
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.outcome import ContainerPlacement, Placement
from topobus.values.request import ClaimUse, ContainerRequest, DeviceRequest, PodRequest, Scope
from topobus.values.view import NodeView

__all__ = ["join_claims", "leave_claims", "with_claim_held"]


def join_claims(view: NodeView, request: PodRequest) -> tuple[NodeView, PodRequest]:
    """Give the claims' devices to the containers that use them: the view without these claims, and
    the request with their devices by name.

    A claim that several containers use is aligned with the first of them. One that none uses counts
    for the pod as a whole when that is aligned (scope pod).
    """
    is_pod = (request.scope or view.options.scope) is Scope.POD
    owners: dict[str, list[str]] = {}
    for use in request.claims:
        container = _container_of(use, request, is_pod=is_pod)
        if container is not None:
            owners.setdefault(container, []).append(use.owner_key)
    joined = tuple(
        _with_devices(container_request, view, owners.get(container_request.name, []))
        for container_request in request.containers
    )
    keys = frozenset(key for owner_keys in owners.values() for key in owner_keys)
    return without_owners(view, keys), structs.replace(request, containers=joined, claims=())


def leave_claims(view: NodeView, request: PodRequest, placement: Placement) -> Placement:
    """Remove the claims' devices from a placement, because the claims hold them already.

    The placement's NUMA nodes and reasons still count it.
    """
    keys = {use.owner_key for use in request.claims}
    cpus = CpuSet()
    for key in keys:
        cpus |= view.held_cpus.get(key, CpuSet())
    devices = {
        (name, device) for name, held in view.held_devices.items() for device, owner in held.items() if owner in keys
    }
    return structs.replace(
        placement, containers=tuple(_without_devices(container, cpus, devices) for container in placement.containers)
    )


def with_claim_held(view: NodeView, owner_key: str, devices: dict[str, tuple[str, ...]], cpus: CpuSet) -> NodeView:
    """Return the view as it will be once a claim holds these devices as well.

    Shapes: owner_key — as in `Owner.key`; devices — class to names without CPUs, which come as
            `cpus`.
    """
    held = {name: dict(owners) for name, owners in view.held_devices.items()}
    for name, names in devices.items():
        held.setdefault(name, {}).update(dict.fromkeys(names, owner_key))
    held_cpus = view.held_cpus | ({owner_key: view.held_cpus.get(owner_key, CpuSet()) | cpus} if cpus else {})
    return structs.replace(view, held_devices=held, held_cpus=held_cpus)


def _container_of(use: ClaimUse, request: PodRequest, *, is_pod: bool) -> str | None:
    names = [container.name for container in request.containers]
    users = [container for container in names if container in use.containers]
    return users[0] if users else names[0] if is_pod and names else None


def _with_devices(container_request: ContainerRequest, view: NodeView, owners: list[str]) -> ContainerRequest:
    wanted: list[DeviceRequest] = []
    for device_class, held in sorted(view.held_devices.items()):
        names = tuple(sorted(device for device, owner in held.items() if owner in owners))
        if names:
            wanted.append(DeviceRequest(device_class=device_class, count=len(names), names=names))
    cpus = tuple(cpu_name(cpu) for owner in owners for cpu in view.held_cpus.get(owner, CpuSet()))
    if cpus:
        wanted.append(DeviceRequest(device_class=CPU_CLASS, count=len(cpus), names=cpus))
    return (
        structs.replace(container_request, devices=(*container_request.devices, *wanted))
        if wanted
        else container_request
    )


def _without_devices(container: ContainerPlacement, cpus: CpuSet, devices: set[tuple[str, str]]) -> ContainerPlacement:
    left = {
        name: tuple(device for device in names if (name, device) not in devices)
        for name, names in container.devices.items()
    }
    return structs.replace(
        container, cpus=container.cpus - cpus, devices={name: names for name, names in left.items() if names}
    )
