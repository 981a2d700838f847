"""Serves each class, pool and vendor's resource of the node as a device plugin, from its first
device on.

Each offer has a registrar. A registrar runs as long as the gateway, unless claims begin to serve
its resource: then its list is withdrawn, and it is closed when no pod has devices through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import GatewaySettings
from topobus.gateway.device_plugins.allocation_record import AllocationRecord
from topobus.gateway.device_plugins.device_plugin import DevicePlugin, ResourceTraits
from topobus.gateway.device_plugins.foreign_plugins import ForeignPlugins
from topobus.gateway.device_plugins.pci_devices import PciDevices
from topobus.gateway.device_plugins.pod_resources import PodResourcesReader
from topobus.gateway.device_plugins.registration import PluginRegistrar
from topobus.gateway.device_plugins.sockets import FolderWatch
from topobus.gateway.device_plugins.vendor_plugins import VendorPlugins
from topobus.gateway.device_plugins.withdrawn_plugin import WithdrawnPlugin, held_by_plugin
from topobus.gateway.metrics import CallMetrics
from topobus.gateway.node_state import NodeState, Offer
from topobus.process.broadcast import Broadcast
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.vendor_profiles import profile_in

if TYPE_CHECKING:
    # It loads the evaluator of selectors, which a gateway without a cluster does not need.
    from topobus.gateway.cluster.served_by_claims import ServedByClaims

__all__ = ["DevicePlugins"]

# In seconds. kubelet itself would wait without a limit, and all admissions of the node wait with
# it.
_FOREIGN_PREFER_S = 1.0
# In seconds. kubelet updates its Node every 10 s when its devices have changed
# (nodeStatusUpdateFrequency), and the update takes a moment.
_NODE_TOLD_S = 15.0


class DevicePlugins:
    """The device plugins of the node."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        watch: FolderWatch,
        state: NodeState,
        asks: NodeAsks,
        metrics: CallMetrics,
        foreign: ForeignPlugins | None,
        clock: Clock,
        is_awaited: Callable[[], bool],
        claimed: ServedByClaims | None,
    ) -> None:
        """`foreign` has the plugins registered with us. `claimed` is None without a cluster."""
        self.classes: dict[str, str] = {}
        """Resource to class, for those through which pods can have devices."""
        self._settings = settings
        self._watch = watch
        self._state = state
        self._asks = asks
        self._metrics = metrics
        self._foreign = foreign
        self._clock = clock
        self._is_awaited = is_awaited
        self._claimed = claimed
        self._registrars: dict[str, PluginRegistrar] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._by_claims: set[str] = set()
        self.pods = PodResourcesReader(Path(settings.pod_resources_socket), state.node, self.classes, state.name_of)
        kubelet = settings.kubelet
        self._vendors = VendorPlugins((Path(kubelet.device_plugin_dir), Path(kubelet.plugins_registry_dir)), self.pods)

    async def run(self, lists: asyncio.TaskGroup, record: AllocationRecord) -> None:
        """Serve what is offered, until cancelled. The registrars run in `lists`."""
        if self._claimed is not None:
            await self._claimed.wait()
        while True:
            ticket = self._state.changed.ticket()
            for offer in self._offers():
                self.classes[offer.resource] = offer.device_class
                by_claims = self._claimed is not None and self._claimed.serves(offer)
                if offer.resource in self._tasks and by_claims == (offer.resource in self._by_claims):
                    continue
                was_offered = offer.resource in self._registrars
                await self._close(offer.resource)
                if by_claims:
                    self._by_claims.add(offer.resource)
                    self._tasks[offer.resource] = lists.create_task(self._withdraw(offer, was_offered=was_offered))
                else:
                    self._by_claims.discard(offer.resource)
                    pci_devices = self._pci_devices(offer)
                    registrar = self._registrars[offer.resource] = self._served(offer, record, pci_devices)
                    self._tasks[offer.resource] = lists.create_task(_run(registrar, pci_devices))
            await ticket.wait()

    async def _close(self, resource: str) -> None:
        """End what serves a resource now."""
        task = self._tasks.pop(resource, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._registrars.pop(resource, None)

    async def _withdraw(self, offer: Offer, *, was_offered: bool) -> None:
        """Withdraw the list that kubelet has of a resource, from any gateway process, and serve it
        until no pod has devices through it.
        """
        if (
            not was_offered
            and not held_by_plugin(self._state, offer)
            and not await self._is_known_to_kubelet(offer.resource)
        ):
            return
        registrar = self._registrars[offer.resource] = self._registrar(
            offer, lambda streams_changed: WithdrawnPlugin(offer, self._state, streams_changed)
        )
        self._watch.announce()
        await registrar.run()
        self._registrars.pop(offer.resource, None)
        get_logger().info("plugin.withdrawn", resource=offer.resource)
        self._watch.announce()

    async def _is_known_to_kubelet(self, resource: str) -> bool:
        """Return whether an earlier gateway process has offered a resource.

        Its Node may not show yet what kubelet has.
        """
        if self._claimed is None:
            return False
        if await self._claimed.is_known_to_kubelet(resource):
            return True
        await self._clock.sleep(_NODE_TOLD_S)
        return await self._claimed.is_known_to_kubelet(resource)

    def statuses(self) -> dict[str, str]:
        """Return, for each offered resource, whether it is registered, or what prevents it."""
        served = (offer.resource for offer in self._offers() if offer.resource not in self._by_claims)
        statuses = dict.fromkeys(served, "not served yet")
        return statuses | {resource: registrar.status for resource, registrar in self._registrars.items()}

    def remarks(self) -> str:
        """Name the resources that claims serve while pods still have kubelet's allocations."""
        taken_back = [name for name in sorted(self._by_claims) if name in self._registrars]
        return (
            f"claims serve {', '.join(taken_back)}; pods keep the devices that kubelet gave them" if taken_back else ""
        )

    def offers(self, device_class: str) -> bool:
        """Return whether pods can have devices of a class by a device plugin."""
        own = {offer.resource for offer in self._offers() if offer.device_class == device_class}
        return self._settings.offers_plugin(device_class) and not (own and own <= self._by_claims)

    def rivals(self) -> dict[str, str]:
        """Return which resources are not registered because a vendor's own plugin has them."""
        return {
            resource: registrar.rival for resource, registrar in sorted(self._registrars.items()) if registrar.rival
        }

    def _offers(self) -> list[Offer]:
        return [offer for offer in self._state.offers() if self._settings.offers_plugin(offer.device_class, offer.pool)]

    def _served(self, offer: Offer, record: AllocationRecord, pci_devices: PciDevices | None) -> PluginRegistrar:
        settings, device_class = self._settings, offer.device_class
        foreign = self._foreign if self._foreign is not None and self._foreign.resource_of(device_class) else None
        if foreign is not None:
            self._asks.preferences[device_class] = foreign.preference(device_class, _FOREIGN_PREFER_S)
        traits = ResourceTraits(
            is_from_end=settings.offers_dra(device_class, offer.pool),
            before_start=foreign.before_start(device_class) if foreign is not None else None,
            pci_devices=pci_devices,
        )
        return self._registrar(
            offer,
            lambda streams_changed: DevicePlugin(
                offer,
                state=self._state,
                asks=self._asks,
                record=record,
                pods=self.pods,
                metrics=self._metrics,
                deadlines=settings.deadlines,
                traits=traits,
                streams_changed=streams_changed,
            ),
        )

    def _registrar(
        self, offer: Offer, plugin: Callable[[Broadcast], DevicePlugin | WithdrawnPlugin]
    ) -> PluginRegistrar:
        return PluginRegistrar(
            offer,
            plugin,
            watch=self._watch,
            state=self._state,
            deadlines=self._settings.deadlines,
            clock=self._clock,
            is_awaited=self._is_awaited,
            vendors=self._vendors
            if profile_in(offer.resource, offer.device_class, self._settings.profiles) is not None
            else None,
        )

    def _pci_devices(self, offer: Offer) -> PciDevices | None:
        """Return the writer of Multus' information about devices by their PCI addresses.

        None where the resource does not use PCI addresses as ids.
        """
        is_named_so = self._settings.ids_of(offer.device_class, offer.resource) == "pci"
        return PciDevices(offer, self._state, Path(self._settings.device_info_dir)) if is_named_so else None


async def _run(registrar: PluginRegistrar, pci_devices: PciDevices | None) -> None:
    async with asyncio.TaskGroup() as group:
        if pci_devices is not None:
            group.create_task(pci_devices.follow())
        group.create_task(registrar.run())
