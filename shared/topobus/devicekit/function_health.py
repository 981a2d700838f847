"""Looks at the PCI functions of a driver, and at the physical functions of virtual ones, because a
fault of a card's physical function affects all its virtual functions.

What is wrong with a physical function has the reasons of a PCI function with the prefix `parent-`. Each
function is looked at once, because its error counters show a rise once.
Source: `physfn` in Documentation/ABI/testing/sysfs-bus-pci. The kernel removes virtual functions
together with the physical one's driver, unless they are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import structs

from topobus.devicekit.edits_text import unreadable
from topobus.devicekit.pci import PciHealth, observe_kernel_driver
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.pci import PciAddress

__all__ = ["FunctionHealth", "is_gone", "physical_function"]

_GONE = "fell-off-bus"


class FunctionHealth:
    """Checks the health of a driver's functions. One instance per driver, kept over looks."""

    def __init__(self, *, is_speed_steady: bool = False) -> None:
        """Make the checks. `is_speed_steady` as for PciHealth."""
        self._own = PciHealth(is_speed_steady=is_speed_steady)
        self._parents = PciHealth(is_speed_steady=is_speed_steady)
        """Apart: a physical function that is offered itself shows its rises there as well."""

    def observe(
        self,
        tree: Tree,
        addresses: Iterable[PciAddress],
        look: Callable[[PciAddress], Iterable[Observation | None]],
    ) -> dict[PciAddress, list[Observation]]:
        """Return what is wrong with each function, and with the physical one of each virtual one.

        Shapes: look — what the driver sees of a function that is on the bus.
        Errors: raises nothing. A file that cannot be read is an observation of its function alone.
        Cost:   one link per function, and for each function and physical one what `PciHealth` costs.
        """
        by_parent: dict[PciAddress, list[Observation]] = {}
        seen: dict[PciAddress, list[Observation]] = {}
        for address in sorted(set(addresses)):
            seen[address] = self._observe_own(tree, address, look)
            try:
                parent = physical_function(tree, address)
            except HardwareError as err:
                seen[address].append(unreadable(err))
                continue
            if parent is not None:
                if parent not in by_parent:
                    by_parent[parent] = self._observe_parent(tree, parent)
                seen[address] += by_parent[parent]
        return seen

    def _observe_own(
        self, tree: Tree, address: PciAddress, look: Callable[[PciAddress], Iterable[Observation | None]]
    ) -> list[Observation]:
        try:
            seen = self._own.observe(tree, address)
            if not is_gone(seen):
                seen += [observation for observation in look(address) if observation is not None]
        except HardwareError as err:
            return [unreadable(err)]
        return seen

    def _observe_parent(self, tree: Tree, parent: PciAddress) -> list[Observation]:
        try:
            signs = [*self._parents.observe(tree, parent), *observe_kernel_driver(tree, parent)]
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


def is_gone(seen: Iterable[Observation]) -> bool:
    """Say whether a function is no longer on the bus, by what was seen of it."""
    return any(observation.reason == _GONE for observation in seen)


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
