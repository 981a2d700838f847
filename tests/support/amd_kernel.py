"""amdgpu and KFD of a machine written by `KfdMachine`: they obey what is written into
`current_compute_partition`, as the real ones do.

Flows in: writes, by the thread of `KernelWrites`, so the card is on its way for a moment after a
write. Flows out: KFD nodes, one for each part, under numbers that were never used before; the first
part has the function's own render node, the others those of the platform devices, which stay.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from support.kernel_writes import KernelWrites
from support.kfd_machines import NODES, KfdMachine, card_address, folder
from topobus.values.pci import PciAddress

__all__ = ["COUNTS", "AmdKernel"]

COUNTS = {"SPX": 1, "DPX": 2, "QPX": 4, "CPX": 8}
"""The modes of an MI300X in NPS1."""


class AmdKernel:
    """The driver of all cards of one machine."""

    def __init__(self, root: Path, *, cards: int = 1, mode: str = "SPX") -> None:
        """Write a machine with so many MI300X."""
        self.machine = KfdMachine(root, "mi300x-cpx", mode="CPX", memory_mode="NPS1", most_cards=cards)
        self.modes = dict.fromkeys(self.machine.addresses, "CPX")
        self.switches: list[tuple[PciAddress, str, str]] = []
        """Each switch of a card, with the mode before and after."""
        self.is_stuck = False
        """KFD stays as it is: a switch never ends."""
        # Writes are obeyed by a thread, and a test may change a card beside it.
        self._lock = threading.Lock()
        self._facts: dict[PciAddress, dict[str, int]] = {}
        self._numbers: dict[PciAddress, list[str]] = {}
        for number, node in self.machine.nodes.items():
            if node["properties"]["simd_count"]:
                address = card_address(node["properties"])
                self._facts.setdefault(address, node["properties"])
                self._numbers.setdefault(address, []).append(number)
        self._next = max(map(int, self.machine.nodes)) + 1
        for address in self.machine.addresses:
            self.machine.write({f"{folder(address)}/available_compute_partition": "SPX, DPX, QPX, CPX"})
            self.set_mode(address, mode)
        self.switches.clear()

    def follow(self, writes: KernelWrites) -> None:
        """Obey writes from now on."""
        for address in self.machine.addresses:
            writes.obey(
                f"{folder(address)}/current_compute_partition",
                lambda text, address=address: self._obey(address, text.strip()),
            )

    def set_mode(self, address: PciAddress, mode: str) -> None:
        """Bring a card into a mode at once, as somebody else would, or a reboot."""
        with self._lock:
            self.machine.set_mode(address, mode)
            self._change(address, mode)

    def mode(self, address: PciAddress) -> str:
        """Return the content of the file."""
        return (self.machine.root / folder(address) / "current_compute_partition").read_text().strip()

    def _obey(self, address: PciAddress, mode: str) -> None:
        with self._lock:
            self._change(address, mode)

    def _change(self, address: PciAddress, mode: str) -> None:
        if mode not in COUNTS or mode == self.modes[address] or self.is_stuck:
            return
        self.switches.append((address, self.modes[address], mode))
        self.modes[address] = mode
        for number in self._numbers[address]:
            shutil.rmtree(self.machine.root / NODES / number)
        self._numbers[address] = []
        count, first = COUNTS[mode], self._facts[address]
        for index in range(count):
            number = str(self._next)
            self._next += 1
            self._numbers[address].append(number)
            facts = {
                **first,
                "simd_count": first["simd_count"] * 8 // count,
                "num_xcc": 8 // count,
                "location_id": (first["location_id"] & ~7) + index,
                "drm_render_minor": first["drm_render_minor"] + index,
            }
            self.machine.write_node(number, facts, {"memory": [], "links": {}})
