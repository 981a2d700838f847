"""Where the cards of a recorded machine are, as its own files have it: the truth that shapes are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

__all__ = ["MachinePlaces"]


class MachinePlaces:
    """The PCI tree of one machine, read from its `/sys`."""

    def __init__(self, root: Path) -> None:
        """Read the machine under a folder."""
        self._devices = root / "sys" / "bus" / "pci" / "devices"

    def above(self, device: str) -> str:
        """The switch above a device, or where there is none its root complex."""
        return str(self._path(device).parent.parent)

    def numa_node(self, device: str) -> int:
        """Its NUMA node."""
        return int((self._path(device) / "numa_node").read_text())

    def why_no_pairs(self, devices: Iterable[str], *, is_by_node: bool) -> str:
        """Why these are not GPUs with a near NIC each. Empty when they are.

        Shapes: is_by_node — no card of the machine has another one under its switch or root.
        """
        place = self.numa_node if is_by_node else self.above
        gpus = [device for device in devices if device.startswith("gpu-")]
        nics = [device for device in devices if device.startswith("nic-")]
        return "" if Counter(map(place, gpus)) == Counter(map(place, nics)) else "not each GPU has a NIC near it"

    def why_no_region(self, devices: Iterable[str], *, is_of_switch: bool) -> str:
        """Why these are not all under one switch, or on one NUMA node. Empty when they are."""
        places = {self.above(device) if is_of_switch else self.numa_node(device) for device in devices}
        return f"they are at {sorted(map(str, places))}" if len(places) > 1 else ""

    def _path(self, device: str) -> Path:
        _, domain, bus, slot, function = device.split("-")
        return (self._devices / f"{domain}:{bus}:{slot}.{function}").resolve()
