"""Devices that were handed out and are not in the ledger yet: an allocated device must not leave
kubelet's list in between.

Each device is remembered with the number of the ledger that will contain it, until that ledger
arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Holders
from topobus.values.request import Owner

__all__ = ["HandOuts"]


class HandOuts:
    """Devices and shares by class, each with its owner and the number of the ledger that has it."""

    def __init__(self) -> None:
        self._whole: dict[str, dict[str, tuple[Owner, int]]] = {}
        self._shares: dict[str, dict[tuple[str, str], tuple[Owner, HeldShare, int]]] = {}
        """By device and owner's key."""
        self._times: dict[str, int] = {}

    def add(
        self,
        device_class: str,
        names: Iterable[str],
        owner: Owner,
        ledger_sequence: int,
        shares: Mapping[str, HeldShare],
    ) -> None:
        """Remember what was just adopted.

        Shapes: shares — of which of the names the owner has a share, and how much.
        """
        entries = self._whole.setdefault(device_class, {})
        entries.update(dict.fromkeys((name for name in names if name not in shares), (owner, ledger_sequence)))
        parts = self._shares.setdefault(device_class, {})
        parts.update({(name, owner.key): (owner, share, ledger_sequence) for name, share in shares.items()})
        self._times[owner.key] = self._times.get(owner.key, 0) + 1

    def times(self, owner: Owner) -> int:
        """Count how often an owner was given its devices."""
        return self._times.get(owner.key, 0)

    def whole(self, device_class: str) -> dict[str, Owner]:
        """Return the owners of whole devices, by name."""
        return {name: owner for name, (owner, _) in self._whole.get(device_class, {}).items()}

    def shares(self, device_class: str) -> list[tuple[str, Owner, HeldShare]]:
        """List the shares: device, owner and amount."""
        return [(name, owner, share) for (name, _), (owner, share, _) in self._shares.get(device_class, {}).items()]

    def owner_keys(self) -> set[str]:
        """Return the keys of the owners whose devices are not in the ledger yet."""
        whole = {owner.key for entries in self._whole.values() for owner, _ in entries.values()}
        return whole | {key for parts in self._shares.values() for _, key in parts}

    def clear(self) -> set[str]:
        """Forget all devices, because no later ledger will confirm them. Returns their classes."""
        classes = {*self._whole, *self._shares}
        self._whole.clear()
        self._shares.clear()
        return classes

    def drop_confirmed(self, ledger: Holders) -> set[str]:
        """Forget what the ledger now contains. Returns the classes concerned."""
        classes: set[str] = set()
        for device_class, entries in self._whole.items():
            self._whole[device_class] = {name: entry for name, entry in entries.items() if entry[1] > ledger.sequence}
            classes |= {device_class} if len(self._whole[device_class]) < len(entries) else set()
        for device_class, parts in self._shares.items():
            self._shares[device_class] = {place: part for place, part in parts.items() if part[2] > ledger.sequence}
            classes |= {device_class} if len(self._shares[device_class]) < len(parts) else set()
        # Otherwise every past claim would be remembered.
        waiting = self.owner_keys()
        self._times = {key: count for key, count in self._times.items() if key in ledger.allocations or key in waiting}
        return classes
