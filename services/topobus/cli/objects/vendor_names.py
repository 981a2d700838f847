"""Turns a vendor's resource names in pods (`nvidia.com/gpu`) into ours, where a gateway stands in for that vendor's device plugin.

Flows in: what pods ask, inventories, what gateways say of themselves. Flows out: the same by class or pool, which the nodes count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import get_args

from topobus.cli.exits import UsageError
from topobus.cli.objects.manifests import Note
from topobus.contracts.catalogue import INVENTORY, PODS
from topobus.contracts.messages import PodsRequest
from topobus.domain.errors import PeerUnavailable
from topobus.domain.request import PodRequest
from topobus.domain.resource_names import RESOURCE_PREFIX
from topobus.domain.vendor_profiles import VendorProfile, asked_in_profiles, pools_of_profiles, renamed
from topobus.runtime.bus import Bus

__all__ = ["by_our_names"]

# A gateway answers within milliseconds; it asks kubelet meanwhile.
_PROFILES_S = 2.0


async def by_our_names(
    bus: Bus, pods: Sequence[PodRequest], profiles: tuple[VendorProfile, ...], node: str | None, note: Note
) -> list[PodRequest]:
    """Give what pods ask with a vendor's names by ours, where a gateway stands in for that vendor's device plugin, or as it is said.

    Errors: raises UsageError for a name that only some devices of a class or pool have: nodes are asked for a number of all of them.
    """
    asked = frozenset[str]().union(*(asked_in_profiles(pod, get_args(VendorProfile)) for pod in pods))
    inventories = [entry.value for entry in await bus.list(INVENTORY) if node in (None, entry.parts["node"])] if asked else []
    # What somebody else's plugin offers through the gateway the nodes know by its name.
    asked -= {inventory.resource for inventory in inventories}
    if not asked:
        return list(pods)
    nodes = sorted({inventory.node for inventory in inventories})
    profiles_by_node = dict.fromkeys(nodes, profiles) if profiles else await _profiles_of(bus, nodes)
    names: dict[str, str] = {}
    for inventory in inventories:
        _, by_resource = pools_of_profiles(inventory.devices, profiles_by_node[inventory.node])
        whole = {device.pool for device in inventory.devices} | {inventory.device_class}
        for resource in sorted(asked & by_resource.keys()):
            if by_resource[resource] not in whole:
                raise UsageError(
                    f"{resource} is some of the devices of class {inventory.device_class} on node {inventory.node}: `place` asks for a number of a class or a pool",
                    next_step="give those devices a pool (docs/reference/pools.md) and ask for that, or have kubelet place the pod",
                )
            names[resource] = by_resource[resource]
    if names:
        note("; ".join(f"{resource} is asked for as {RESOURCE_PREFIX}{name}" for resource, name in sorted(names.items())))
    return [renamed(pod, names) for pod in pods]


async def _profiles_of(bus: Bus, nodes: Collection[str]) -> dict[str, tuple[VendorProfile, ...]]:
    """Ask the gateways for whom they stand in; one that does not answer stands in for nobody."""

    async def ask(node: str) -> tuple[VendorProfile, ...]:
        try:
            return (await bus.ask(PODS, PodsRequest(), timeout_s=_PROFILES_S, node=node)).profiles
        except PeerUnavailable:
            return ()

    return dict(zip(nodes, await asyncio.gather(*(ask(node) for node in nodes)), strict=True))
