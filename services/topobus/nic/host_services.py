"""What the nic service gives its drivers beside what every device service gives."""

from __future__ import annotations

from topobus.devicekit.driver import HostServices
from topobus.nic.config import InterfaceSettings
from topobus.nic.interfaces.interface_hands import InterfaceHands
from topobus.values.pci import PciAddress

__all__ = ["NicServices"]


class NicServices(HostServices, frozen=True, kw_only=True):
    """Which interfaces are offered, and how they get into a pod."""

    interfaces: InterfaceSettings = InterfaceSettings()
    hands: InterfaceHands | None = None
    """None: nothing is handed over."""
    why_not: str = ""
    """Why there are no hands."""
    counted: frozenset[PciAddress] = frozenset()
    """Physical functions whose number of virtual functions the service keeps: no claim changes it."""
