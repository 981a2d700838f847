"""Serves each class, pool and vendor's resource of the node as a device plugin, from its first device on.

Flows in: what there is to offer. Flows out: a registrar each. None is ever closed again while the gateway runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from topobus.gateway.asks import NodeAsks
from topobus.gateway.config import GatewaySettings
from topobus.gateway.core.vendor_profiles import profile_in
from topobus.gateway.foreign.foreign_plugins import ForeignPlugins
from topobus.gateway.kubelet.allocation_record import AllocationRecord
from topobus.gateway.kubelet.registration import PluginRegistrar
from topobus.gateway.kubelet.sockets import FolderWatch
from topobus.gateway.kubelet.vendor_plugins import VendorPlugins
from topobus.gateway.metrics import CallMetrics
from topobus.gateway.node_state import NodeState, Offer
from topobus.runtime.clock import Clock

__all__ = ["DevicePlugins"]

# kubelet itself would wait for ever; all admissions of the node wait with it.
_FOREIGN_PREFER_S = 1.0


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
    ) -> None:
        """Take what they work with; `foreign` has the plugins that registered with us."""
        self.classes: dict[str, str] = {}
        """Resource to class, of those that are served."""
        self._settings = settings
        self._watch = watch
        self._state = state
        self._asks = asks
        self._metrics = metrics
        self._foreign = foreign
        self._clock = clock
        self._is_awaited = is_awaited
        self._registrars: dict[str, PluginRegistrar] = {}
        self._variables: dict[str, str] = {}
        kubelet = settings.kubelet
        self._vendors = VendorPlugins(
            (Path(kubelet.device_plugin_dir), Path(kubelet.plugins_registry_dir)), Path(settings.pod_resources_socket)
        )

    async def run(self, lists: asyncio.TaskGroup, record: AllocationRecord) -> None:
        """Serve what is offered, for ever; the registrars run in `lists`."""
        while True:
            ticket = self._state.changed.ticket()
            for offer in self._offers():
                if offer.resource not in self._registrars:
                    self._registrars[offer.resource] = self._registrar(offer, record)
                    self.classes[offer.resource] = offer.device_class
                    lists.create_task(self._registrars[offer.resource].run())
            await ticket.wait()

    def statuses(self) -> dict[str, str]:
        """Tell of each resource to offer whether it is registered, or what stands in the way."""
        statuses = dict.fromkeys((offer.resource for offer in self._offers()), "not served yet")
        return statuses | {resource: registrar.status for resource, registrar in self._registrars.items()}

    def rivals(self) -> dict[str, str]:
        """Tell which resources are not registered because a vendor's own plugin has them."""
        return {resource: registrar.rival for resource, registrar in sorted(self._registrars.items()) if registrar.rival}

    def _offers(self) -> list[Offer]:
        return [offer for offer in self._state.offers() if self._settings.offers_plugin(offer.device_class, offer.pool)]

    def _registrar(self, offer: Offer, record: AllocationRecord) -> PluginRegistrar:
        settings, device_class = self._settings, offer.device_class
        foreign = self._foreign if self._foreign is not None and self._foreign.resource_of(device_class) else None
        if foreign is not None:
            self._asks.preferences[device_class] = foreign.preference(device_class, _FOREIGN_PREFER_S)
        return PluginRegistrar(
            offer,
            watch=self._watch,
            state=self._state,
            asks=self._asks,
            record=record,
            metrics=self._metrics,
            variables=self._variables,
            deadlines=settings.deadlines,
            is_awaited=self._is_awaited,
            clock=self._clock,
            before_start=foreign.before_start(device_class) if foreign is not None else None,
            is_from_end=settings.offers_dra(device_class, offer.pool),
            device_info_dir=Path(settings.device_info_dir) if settings.ids_of(device_class, offer.resource) == "pci" else None,
            vendors=self._vendors if profile_in(offer.resource, device_class, settings.profiles) is not None else None,
        )
