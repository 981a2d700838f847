"""Collects the newest views of one class's drivers for the publisher. It adds observations of
devices that are being cleaned, changed or given on.
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.devicekit.host.driver_poller import DriverPoller
from topobus.devicekit.verbs.device_hands import DeviceHands
from topobus.devicekit.verbs.leftovers import with_leftovers
from topobus.engine.health.inventory_merge import DriverView

__all__ = ["DriverViews"]


class DriverViews:
    """The views of one class's drivers."""

    def __init__(self, pollers: Mapping[str, DriverPoller], hands: DeviceHands) -> None:
        self._pollers = pollers
        self._hands = hands
        self.moving = frozenset(
            name for name, isolated in hands.drivers.items() if isolated.driver.capabilities.attaches
        )
        """Drivers whose devices move into a sandbox, and cannot be shared."""

    def newest(self) -> dict[str, DriverView]:
        """Return the newest view of each driver, with the observations of devices that work is
        being done on.
        """
        return with_leftovers(
            {name: poller.shown() for name, poller in self._pollers.items()}, self._hands.observations()
        )

    def note_published(self, views: Mapping[str, DriverView]) -> None:
        """Inform each driver's poller that its view has been published."""
        for name, view in views.items():
            self._pollers[name].note_published(view)

    def interrupt(self) -> None:
        """End the drivers' own watches, so that the next poll is followed by a step."""
        for poller in self._pollers.values():
            poller.interrupt()
