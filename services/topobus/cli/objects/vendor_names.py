"""Translates a vendor's resource names in pods (`nvidia.com/gpu`) into ours, where a gateway takes
the place of that vendor's device plugin.

The result names a class or a pool, which the nodes count. Each gateway reports which vendors it
replaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from topobus.bus.bus import Bus
from topobus.cli.exits import UsageError
from topobus.cli.objects.manifests import Note
from topobus.formats.kubernetes.objects import name_of
from topobus.formats.messages.catalogue import INVENTORY, PODS
from topobus.formats.messages.messages import ApiObject, PodsRequest
from topobus.values.errors import PeerUnavailable
from topobus.values.request import PodRequest
from topobus.values.resource_names import RESOURCE_PREFIX
from topobus.values.vendor_profiles import VendorProfile, asked_in_profiles, is_named_by, pools_of_profiles, renamed

__all__ = ["Profiles", "by_our_names", "stored_by_our_names"]

Profiles = Annotated[
    tuple[VendorProfile, ...],
    Parameter(
        help="Take names of a vendor's device plugin, nvidia.com/gpu, for its devices. Default: as the gateways "
        "have it."
    ),
]

# A gateway answers within milliseconds. It asks kubelet meanwhile.
_PROFILES_S = 2.0


async def by_our_names(
    bus: Bus, pods: Sequence[PodRequest], profiles: tuple[VendorProfile, ...], node: str | None, note: Note
) -> list[PodRequest]:
    """Replace a vendor's resource names in requests by ours, where a gateway replaces that vendor's
    device plugin, or where `profiles` names the vendor.

    Errors: raises UsageError for a name that covers only some devices of a class or pool, as nodes
    are asked for a number of all of them.
    """
    asked = frozenset[str]().union(*(asked_in_profiles(pod, get_args(VendorProfile)) for pod in pods))
    names = await _our_names(bus, asked, profiles, node, note)
    return [renamed(pod, names) for pod in pods]


async def stored_by_our_names(
    bus: Bus, objects: Sequence[ApiObject], profiles: tuple[VendorProfile, ...], note: Note
) -> list[ApiObject]:
    """Replace a vendor's resource names in pods that are about to be stored by ours, as
    `by_our_names` does in requests: the controller and the classes know those.

    Errors: raises UsageError as `by_our_names`, and for a container that requests one resource by
    both names.
    """
    asked = {
        resource
        for api_object in objects
        for container in _containers(api_object)
        for amounts in _amounts(container)
        for resource in amounts
        if is_named_by(resource, get_args(VendorProfile))
    }
    names = await _our_names(bus, frozenset(asked), profiles, None, note)
    return [_with_names(api_object, names) if names else api_object for api_object in objects]


def _containers(api_object: ApiObject) -> list[dict[str, Any]]:
    if api_object.kind != "Pod":
        return []
    lists = (api_object.spec.get(part) for part in ("initContainers", "containers"))
    return [
        container
        for containers in lists
        if isinstance(containers, list)
        for container in containers
        if isinstance(container, dict)
    ]


def _amounts(container: dict[str, Any]) -> list[dict[str, Any]]:
    resources = container.get("resources")
    parts = (resources.get(part) for part in ("limits", "requests")) if isinstance(resources, dict) else ()
    return [amounts for amounts in parts if isinstance(amounts, dict)]


def _with_names(api_object: ApiObject, names: Mapping[str, str]) -> ApiObject:
    copy = deepcopy(api_object)
    for container in _containers(copy):
        for amounts in _amounts(container):
            for resource, name in names.items():
                if resource not in amounts:
                    continue
                ours = f"{RESOURCE_PREFIX}{name}"
                if ours in amounts:
                    raise UsageError(
                        f"{name_of(api_object)}: container {container.get('name')} asks for {resource} and "
                        f"{ours}, which are the same devices here",
                        next_step="request them by one of the two names",
                    )
                amounts[ours] = amounts.pop(resource)
    return copy


async def _our_names(
    bus: Bus, asked: frozenset[str], profiles: tuple[VendorProfile, ...], node: str | None, note: Note
) -> dict[str, str]:
    """Find the class or pool behind each resource with a vendor's name, and print a note on it.

    Resources whose device plugin no gateway replaces are left out.
    """
    if not asked:
        return {}
    inventories = [entry.value for entry in await bus.list(INVENTORY) if node in (None, entry.parts["node"])]
    # Resources that another plugin offers through the gateway are known to the nodes by that name.
    asked -= {inventory.resource for inventory in inventories}
    if not asked:
        return {}
    nodes = sorted({inventory.node for inventory in inventories})
    profiles_by_node = dict.fromkeys(nodes, profiles) if profiles else await _profiles_of(bus, nodes)
    names: dict[str, str] = {}
    for inventory in inventories:
        _, by_resource = pools_of_profiles(inventory.devices, profiles_by_node[inventory.node])
        whole = {device.pool for device in inventory.devices} | {inventory.device_class}
        for resource in sorted(asked & by_resource.keys()):
            if by_resource[resource] not in whole:
                raise UsageError(
                    f"{resource} is some of the devices of class {inventory.device_class} on node "
                    f"{inventory.node}: a pod asks here for a number of a class or a pool",
                    next_step="give those devices a pool (docs/reference/pools.md) and ask for that, or have kubelet "
                    "place the pod",
                )
            names[resource] = by_resource[resource]
    if names:
        note(
            "; ".join(f"{resource} is asked for as {RESOURCE_PREFIX}{name}" for resource, name in sorted(names.items()))
        )
    return names


async def _profiles_of(bus: Bus, nodes: Collection[str]) -> dict[str, tuple[VendorProfile, ...]]:
    """Ask the gateways which vendors they replace. One that does not answer counts as replacing
    none.
    """

    async def ask(node: str) -> tuple[VendorProfile, ...]:
        try:
            return (await bus.ask(PODS, PodsRequest(), timeout_s=_PROFILES_S, node=node)).profiles
        except PeerUnavailable:
            return ()

    return dict(zip(nodes, await asyncio.gather(*(ask(node) for node in nodes)), strict=True))
