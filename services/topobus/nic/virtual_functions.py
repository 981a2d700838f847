"""Keeps the number of virtual functions of each physical one at the operator's setting, whenever
they are not in use.

The number is not changed while a function is held, or used by an unknown process, until that ends.
While the ledger cannot be read, everything counts as held. Each change of the outcome is logged
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from topobus.devicekit.host.device_holders import DeviceHolders
from topobus.devicekit.pci import pci_device_name
from topobus.nic.config import VirtualFunctions
from topobus.nic.netlink.vf_count import set_vf_count
from topobus.process.logging import get_logger
from topobus.values.errors import ConfigError
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress

__all__ = ["check_virtual_functions", "devices_of_function", "keep_virtual_functions"]

# A card that becomes idle waits half a minute at most. A look costs a few files and one read of the
# ledger.
_LOOK_S = 30.0


def check_virtual_functions(wishes: Iterable[VirtualFunctions]) -> None:
    """Refuse invalid addresses, and addresses that are listed twice.

    Errors: raises ConfigError that names the key.
    """
    addresses: list[PciAddress] = []
    for index, wish in enumerate(wishes):
        key = f"virtual_functions[{index}].address"
        try:
            address = PciAddress.parse(wish.address)
        except ValueError as err:
            raise ConfigError(f"{key} is {wish.address!r}, wanted a PCI address such as 0000:3b:00.0", key=key) from err
        if address in addresses:
            raise ConfigError(f"{key} is {wish.address!r}, wanted each physical function once", key=key)
        addresses.append(address)


def devices_of_function(sys: str, address: PciAddress) -> tuple[str, ...]:
    """Name the devices that a change of the number would remove: the physical function and its
    virtual ones.
    """
    folder = Path(sys, "bus", "pci", "devices", str(address))
    virtual = sorted(PciAddress.parse(link.resolve().name) for link in folder.glob("virtfn*"))
    return tuple(pci_device_name("nic", function) for function in (address, *virtual))


async def keep_virtual_functions(wishes: Iterable[VirtualFunctions], holders: DeviceHolders, sys: str) -> None:
    """Bring each number to what is wanted, and check it every 30 s, until cancelled."""
    last: dict[str, str] = {}
    while True:
        for wish in wishes:
            # Read again for each: making functions takes seconds, and an earlier reading does not
            # show who came since.
            held = holders.held if await holders.read() else None
            try:
                refusal = await asyncio.to_thread(_count, wish, held, sys)
                outcome = refusal.reasons[0].message if refusal is not None else ""
            except (OSError, ValueError) as err:
                # A card that disappears while it is read. The next look finds it gone, or whole.
                refusal, outcome = None, f"{err}"
                get_logger().warning("functions.unread", address=wish.address, why=outcome)
            if last.get(wish.address) != outcome and (refusal is not None or not outcome):
                _tell(wish, refusal)
            last[wish.address] = outcome
        await asyncio.sleep(_LOOK_S)


def _count(wish: VirtualFunctions, held: frozenset[str] | None, sys: str) -> Refusal | None:
    address = PciAddress.parse(wish.address)
    devices = devices_of_function(sys, address)
    users = devices if held is None else tuple(device for device in devices if device in held)
    return set_vf_count(sys, str(address), wish.count, held=users)


def _tell(wish: VirtualFunctions, refusal: Refusal | None) -> None:
    if refusal is None:
        get_logger().info("functions.counted", address=wish.address, wanted=wish.count)
    elif refusal.reasons[0].code in ("vf-count-held", "vf-count-in-use"):
        get_logger().warning("functions.kept", address=wish.address, wanted=wish.count, why=refusal.reasons[0].message)
    else:
        get_logger().error("functions.refused", address=wish.address, wanted=wish.count, why=refusal.reasons[0].message)
