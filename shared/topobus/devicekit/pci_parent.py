"""Looks at the physical functions of virtual ones, because a fault of a card's physical function
affects all its virtual functions.

The result is, by virtual function, what is wrong with its physical one, under the reasons of a PCI
function with the prefix `parent-`. One look at a physical function serves all its virtual ones,
because its error counters show a rise once.
Source: `physfn` in Documentation/ABI/testing/sysfs-bus-pci. The kernel removes virtual functions
together with the physical one's driver, unless they are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from topobus.devicekit.edits_text import unreadable
from topobus.devicekit.pci import PciHealth, observe_kernel_driver
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.pci import PciAddress

__all__ = ["ParentHealth", "physical_function"]

_GONE = "fell-off-bus"


class ParentHealth:
    """Checks the health of physical functions.

    One instance per driver, kept over looks, beside the PciHealth of the functions that it offers.
    """

    def __init__(self, *, is_speed_steady: bool = False) -> None:
        """Make the checks. `is_speed_steady` as for PciHealth."""
        self._pci_health = PciHealth(is_speed_steady=is_speed_steady)

    def observe(self, tree: Tree, addresses: Iterable[PciAddress]) -> Mapping[PciAddress, list[Observation]]:
        """Return what is wrong with the physical function of each virtual one.

        Nothing for the other functions.

        Cost: one link per function, and for each physical function what `PciHealth` costs.
        """
        by_parent: dict[PciAddress, list[Observation]] = {}
        seen: dict[PciAddress, list[Observation]] = {}
        for address in addresses:
            try:
                parent = physical_function(tree, address)
            except HardwareError as err:
                seen[address] = [unreadable(err)]
                continue
            if parent is not None:
                if parent not in by_parent:
                    by_parent[parent] = self._observe_parent(tree, parent)
                seen[address] = by_parent[parent]
        return seen

    def _observe_parent(self, tree: Tree, parent: PciAddress) -> list[Observation]:
        try:
            signs = [*self._pci_health.observe(tree, parent), *observe_kernel_driver(tree, parent)]
        except HardwareError as err:
            return [unreadable(err)]
        return [
            structs.replace(
                sign,
                reason="parent-gone" if sign.reason == _GONE else f"parent-{sign.reason}",
                message=f"its physical function {parent}: {sign.message}",
            )
            for sign in signs
        ]


def physical_function(tree: Tree, address: PciAddress) -> PciAddress | None:
    """Read which physical function a virtual one belongs to.

    None for a function that is no virtual one.

    Errors: raises HardwareError for a link that leads to something else.
    """
    path = f"{pci_folder(address)}/physfn"
    link = tree.link_name(path)
    if not link:
        return None
    try:
        return PciAddress.parse(link)
    except ValueError as err:
        raise HardwareError(f"{path} leads to {link[:60]!r}, wanted a PCI function", path=path, raw=link[:200]) from err
