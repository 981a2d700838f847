"""The functions that a driver finds and does not offer: a sentence for the inventory's warnings,
and what the function is used for instead.
"""

from __future__ import annotations

from topobus.values.device import DeviceRole, KeptFunction
from topobus.values.pci import PciAddress

__all__ = ["LeftOut"]


class LeftOut(list[str]):
    """The sentences, in the order of discovery, with the functions that they are about."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: dict[PciAddress, KeptFunction] = {}

    @property
    def kept(self) -> tuple[KeptFunction, ...]:
        """The functions, by address."""
        return tuple(self._functions[address] for address in sorted(self._functions))

    def keep(self, address: PciAddress, role: DeviceRole, why: str, *, has_warning: bool = True) -> None:
        """Record a function that has another use. `has_warning` is False when that is expected and
        needs no warning.
        """
        self._functions[address] = KeptFunction(pci=address, role=role, why=why)
        if has_warning:
            self.append(f"{address} is not offered: {why}")
