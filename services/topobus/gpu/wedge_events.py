"""Receives from the kernel which GPUs their drivers gave up (wedged). The only sign is one uevent
at the moment when it happens, and sysfs shows nothing.

It reads uevents of subsystem drm with `WEDGED=…` (Linux 6.15 on, sent by xe and i915) at each look,
without waiting. The observation stays until the GPU's driver is bound again. The service's own
uevent socket needs no right and no network of the host's, so no other service has to pass the event
on. An event is lost when no service listens, or when it does not fit into the socket's MiB. The
observation is sticky, because no later event repeats it.

`WEDGED=none` is no fault: the driver reset the device, which works again.
Source: Documentation/gpu/drm-uapi.rst (Device Wedging), Documentation/gpu/xe/xe_device.rst.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.sysfs.uevent import Uevent, UeventsUnavailable, open_uevents
from topobus.values.health import Observation, RecoveryAction
from topobus.values.health_reasons import sign
from topobus.values.pci import PciAddress

__all__ = ["PendingEvents", "WedgeEvents"]

# The folder of a card below its PCI function:
# /devices/pci0000:00/0000:00:01.0/0000:03:00.0/drm/card1
_CARD = re.compile(r"/([0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7])/drm/card\d+$")
_HELPED_ITSELF = "none"
# What a driver that is bound again, or a reset of the function, restores. The other methods
# (firmware, a cold reset, unknown ones) need a person.
_BY_RESET = frozenset({"rebind", "bus-reset"})


class PendingEvents(Protocol):
    """A source of uevents that can be asked without waiting."""

    def pending(self) -> Sequence[Uevent]:
        """Take what arrived since the last call."""
        ...


class WedgeEvents:
    """Which GPUs were given up. Each driver has one instance, used in that driver's thread
    alone.
    """

    def __init__(self, open_source: Callable[[Tree], PendingEvents | UeventsUnavailable] = open_uevents) -> None:
        self._open_source = open_source
        self._source: PendingEvents | UeventsUnavailable | None = None
        self._given_up: dict[PciAddress, tuple[str, str]] = {}
        """By function: the methods that the kernel reported, and the identity of the folder of its
        cards at that time. A driver that is bound again creates another folder."""
        self.blind = ""
        """Why no event arrives although the kernel could send them; empty otherwise."""

    def take(self, tree: Tree) -> None:
        """Take what the kernel sent since the last call. The first call begins to listen."""
        if self._source is None:
            self._source = self._open_source(tree)
            if isinstance(self._source, UeventsUnavailable) and not tree.is_recorded:
                self.blind = self._source.reason
        if isinstance(self._source, UeventsUnavailable):
            return
        try:
            events = self._source.pending()
        except OSError as err:
            self.blind = f"the uevent socket broke: {err.strerror}"
            self._source = UeventsUnavailable(reason=self.blind)
            return
        for event in events:
            card = _CARD.search(event.path) if event.subsystem == "drm" else None
            if card is not None and event.wedged not in ("", _HELPED_ITSELF):
                address = PciAddress.parse(card.group(1))
                self._given_up[address] = (event.wedged[:60], tree.identity(_cards(address)))

    def sign(self, tree: Tree, address: PciAddress) -> Observation | None:
        """Report a GPU that was given up and still has the same driver."""
        methods, identity = self._given_up.get(address, ("", ""))
        if not methods:
            return None
        if tree.identity(_cards(address)) != identity:
            del self._given_up[address]
            return None
        is_reset_enough = bool(_BY_RESET & set(methods.split(",")))
        return sign(
            "wedged",
            f"the kernel driver gave the GPU up; what may bring it back: {methods}",
            _cards(address),
            f"WEDGED={methods}",
            action=RecoveryAction.RESET_DEVICE if is_reset_enough else RecoveryAction.REBOOT_NODE,
        )


def _cards(address: PciAddress) -> str:
    return f"{pci_folder(address)}/drm"
