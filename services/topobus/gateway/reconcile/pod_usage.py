"""Reads from kubelet which container has which device and compares it with the ledger, for the
reconciliation and for the `pods` request.

The answer to `pods` also contains the checkpoint's claims and the gateway's own state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from topobus.engine.shapes.shapes import is_shape
from topobus.formats.messages.messages import (
    ContainerDevices,
    HeldDevice,
    KubeletRegistrations,
    PodsReply,
    PodsRequest,
    RuntimeConnection,
)
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.rules.claim_allocation import names_by_class, shares_by_class
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.rules.exclusive import CPU_RESOURCE, ExclusiveUse, compare_exclusive
from topobus.gateway.device_plugins.pod_resources import Listing, PodResourcesReader
from topobus.gateway.device_plugins.rules.lists import sharers_of
from topobus.gateway.device_plugins.rules.replicas import replica_holders
from topobus.gateway.node_state import NodeState
from topobus.gateway.reconcile.rules.pods import Comparison, PodUse, PreparedHere, compare
from topobus.values.device import Inventory
from topobus.values.dra_names import DRIVER
from topobus.values.request import Owner
from topobus.values.shares import replica_id
from topobus.values.vendor_profiles import VendorProfile

__all__ = ["PodLook"]


class PodLook:
    """Reads kubelet's pods and compares them with the ledger."""

    def __init__(
        self,
        reader: PodResourcesReader,
        state: NodeState,
        checkpoint: Checkpoint,
        runtime: Callable[[], RuntimeConnection | None] = lambda: None,
        rivals: Callable[[], dict[str, str]] = dict,
        registrations: Callable[[], KubeletRegistrations] = KubeletRegistrations,
        plugin_failures: Callable[[], dict[str, str]] = dict,
        profiles: tuple[VendorProfile, ...] = (),
    ) -> None:
        self.dropped_slice_fields: Callable[[], tuple[str, ...]] = tuple
        """The fields of ResourceSlices that the API server does not keep. Empty without a
        cluster."""
        self._runtime = runtime
        self._rivals = rivals
        self._registrations = registrations
        self._plugin_failures = plugin_failures
        self._profiles = profiles
        self._reader = reader
        self._state = state
        self._checkpoint = checkpoint
        reader.parts_of = self._parts_of

    @property
    def socket(self) -> Path:
        """The socket of kubelet's PodResources."""
        return self._reader.socket

    async def listing(self) -> Listing | str:
        """Read only kubelet's pods. A text is the reason why kubelet does not answer."""
        return await self._reader.read()

    async def compare_with_ledger(self) -> tuple[Listing, Comparison] | str:
        """Compare kubelet's pods with the ledger. A text is why kubelet does not answer."""
        listing = await self._reader.read()
        if isinstance(listing, str):
            return listing
        holders = {name: self._holders(name) for name in {use.device_class for use in listing.uses}}
        comparison = compare(listing.uses, holders, self._prepared(), sharers_of(self._state.ledger))
        lacking, disagreements = compare_exclusive(listing.exclusive, self._state.ledger)
        return listing, structs.replace(
            comparison, exclusive=lacking, disagreements=(*comparison.disagreements, *disagreements)
        )

    def _parts_of(self, namespace: str, claim: str, device: str) -> tuple[str, ...]:
        """Return what a claim's device stands for: of a shape the devices that were prepared for it,
        else those that it has now.
        """
        if not is_shape(DRIVER, device):
            return (device,)
        prepared = tuple(
            part.device
            for entry in self._checkpoint.entries()
            if (entry.namespace, entry.name) == (namespace, claim)
            for part in entry.devices
            if part.shape == device
        )
        return prepared or self._state.shapes().parts.get(device, (device,))

    def _holders(self, device_class: str) -> dict[str, Owner]:
        """Return the holder of each device and replica.

        The holder of a whole device counts as the holder of all its replicas.
        """
        holders, sharers = self._state.holders(device_class), self._state.sharers(device_class)
        inventory = self._state.inventories().get(device_class)
        for device in inventory.devices if inventory is not None else ():
            if device.sharing is not None and device.name in holders and device.name not in sharers:
                holders |= {
                    replica_id(device.name, number): holders[device.name] for number in range(device.sharing.replicas)
                }
        for name, shares in sharers.items():
            holders |= replica_holders(name, shares)
        return holders

    async def answer(self, request: PodsRequest) -> PodsReply:
        """Answer `pods`."""
        seen = await self.compare_with_ledger()
        if isinstance(seen, str):
            return self._with_state(PodsReply(why=seen))
        listing, comparison = seen
        inventories = self._state.inventories()
        uses: list[tuple[PodUse | ExclusiveUse, ContainerDevices]] = [
            (use, _container(use, inventories.get(use.device_class))) for use in listing.uses
        ]
        uses += [
            (exclusive_use, _of_its_own(exclusive_use, inventories.get(CPU_RESOURCE)))
            for exclusive_use in listing.exclusive
        ]
        wanted = [shown for use, shown in uses if request.namespace in ("", use.namespace)]
        # A container's CPUs come after its devices.
        wanted.sort(
            key=lambda container_devices: (
                container_devices.namespace,
                container_devices.pod,
                container_devices.container,
                container_devices.resource == CPU_RESOURCE,
            )
        )
        return self._with_state(PodsReply(containers=tuple(wanted), disagreements=comparison.disagreements))

    def _with_state(self, reply: PodsReply) -> PodsReply:
        """Add the gateway's own state."""
        return structs.replace(
            reply,
            runtime=self._runtime(),
            dropped_slice_fields=self.dropped_slice_fields(),
            resource_rivals=self._rivals(),
            registrations=self._registrations(),
            plugin_failures=self._plugin_failures(),
            profiles=self._profiles,
        )

    def _prepared(self) -> dict[tuple[str, str], PreparedHere]:
        """Return what the claims hold. One whose preparation has begun may hold its devices already,
        while its containers do not run yet.
        """
        entries: dict[tuple[str, str], list[ClaimEntry]] = {}
        for entry in self._checkpoint.entries():
            entries.setdefault((entry.namespace, entry.name), []).append(entry)
        return {name: _prepared_here(of_claim) for name, of_claim in entries.items()}


def _prepared_here(entries: Sequence[ClaimEntry]) -> PreparedHere:
    """Join the entries of a claim's classes."""
    devices = [device for entry in entries for device in entry.devices]
    held = [device for device in devices if not device.is_shared]
    return PreparedHere(
        owner=entries[0].claim.owner,
        held=names_by_class(held),
        looked_at=frozenset((device.device_class, device.device) for device in devices if device.is_shared),
        by_share=names_by_class(device for device in held if device.is_share),
        shares=shares_by_class(held),
        group_cpus={group: cpus for entry in entries for group, cpus in entry.cpus.items()},
    )


def _container(use: PodUse, inventory: Inventory | None) -> ContainerDevices:
    return ContainerDevices(
        namespace=use.namespace,
        pod=use.pod,
        container=use.container,
        device_class=use.device_class,
        resource=use.resource,
        claim=f"{use.claim_namespace}/{use.claim}" if use.claim else "",
        devices=tuple(_device(name, inventory) for name in use.devices),
    )


def _of_its_own(use: ExclusiveUse, inventory: Inventory | None) -> ContainerDevices:
    return ContainerDevices(
        namespace=use.namespace,
        pod=use.pod,
        container=use.container,
        device_class=CPU_RESOURCE,
        resource=CPU_RESOURCE,
        devices=tuple(_device(f"cpu-{cpu}", inventory) for cpu in use.cpus),
        memory=use.memory,
    )


def _device(name: str, inventory: Inventory | None) -> HeldDevice:
    device = inventory.device(name) if inventory is not None else None
    if device is None:
        return HeldDevice(name=name, reason="not in the inventory")
    worst = device.health.worst
    return HeldDevice(
        name=name, numa_nodes=device.numa_nodes, health=device.health.state, reason=worst.reason if worst else ""
    )
