"""PCI addresses as the kernel writes them, extended domains included.

Source: the kernel's `%04x:%02x:%02x.%x`. A domain above 16 bits (VMD, Hyper-V) has more digits.
"""

from __future__ import annotations

import re
from functools import total_ordering

__all__ = ["PciAddress"]

_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([01][0-9a-fA-F])\.([0-7])")


_set = object.__setattr__


@total_ordering
class PciAddress:
    """A PCI function's address: domain, bus, device, function. Immutable and ordered by its
    numbers.

    >>> PciAddress.parse("3B:00.0")
    PciAddress('0000:3b:00.0')
    >>> PciAddress.parse("10000:00:02.0").domain
    65536
    """

    __slots__ = ("bus", "device", "domain", "function")

    domain: int
    bus: int
    device: int
    function: int

    def __init__(self, domain: int, bus: int, device: int, function: int) -> None:
        for name, value, limit in (
            ("domain", domain, 1 << 32),
            ("bus", bus, 256),
            ("device", device, 32),
            ("function", function, 8),
        ):
            if not 0 <= value < limit:
                raise ValueError(f"PCI {name} {value} is out of range: wanted 0 to {limit - 1}")
            _set(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("PciAddress is immutable")

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """Read `[domain:]bus:device.function`.

        Errors: raises ValueError that names the text.
        """
        match = _ADDRESS.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a PCI address: {text!r}, wanted domain:bus:device.function such as 0000:3b:00.0")
        domain, bus, device, function = match.groups()
        # What matches is in range.
        address = cls.__new__(cls)
        _set(address, "domain", int(domain, 16) if domain else 0)
        _set(address, "bus", int(bus, 16))
        _set(address, "device", int(device, 16))
        _set(address, "function", int(function, 16))
        return address

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The four numbers, for sorting."""
        return (self.domain, self.bus, self.device, self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PciAddress) and self.key == other.key

    def __lt__(self, other: PciAddress) -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function:x}"

    def __repr__(self) -> str:
        return f"PciAddress('{self}')"
