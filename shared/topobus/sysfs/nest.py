"""Sets that must nest: packages, dies, cores and caches of a real machine contain each other or are
disjoint.

Firmware that reports otherwise contradicts itself. The set that came first is kept, the later one
is dropped and named in a warning.
"""

from __future__ import annotations

from topobus.values.idset import CpuSet

__all__ = ["Nest"]


class Nest:
    """A growing family of CPU sets of which no two overlap partially."""

    def __init__(self) -> None:
        self._by_cpu: dict[int, list[int]] = {}
        self._known: set[int] = set()

    def add(self, cpus: CpuSet) -> bool:
        """Add a set.

        False when it overlaps a present one without either containing the other.

        Cost: O(members x depth of nesting).
        """
        bits = cpus.bits
        if bits in self._known:
            return True
        if not self.fits(cpus):
            return False
        self._known.add(bits)
        for cpu in cpus:
            self._by_cpu.setdefault(cpu, []).append(bits)
        return True

    def fits(self, cpus: CpuSet) -> bool:
        """Return whether a set nests with all present ones."""
        bits = cpus.bits
        for cpu in cpus:
            for other in self._by_cpu.get(cpu, ()):
                if bits & other not in (bits, other):
                    return False
        return True

    def around(self, cpus: CpuSet) -> CpuSet | None:
        """Return the smallest set that contains all of `cpus`.

        None when there is none, or `cpus` is empty.
        """
        if not cpus:
            return None
        supersets = [other for other in self._by_cpu.get(cpus.lowest, ()) if cpus.bits & ~other == 0]
        return CpuSet.from_bits(min(supersets, key=int.bit_count)) if supersets else None
