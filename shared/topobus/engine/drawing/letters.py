"""Assigns a letter and a colour number to each owner in a ledger, so that a drawing shows holders
with and without colour.

Pure: the same ledger gives the same letters.
"""

from __future__ import annotations

import string
from collections.abc import Mapping

from msgspec import Struct

from topobus.values.device_sharing import HeldShare
from topobus.values.ledger import Allocation, Holders

__all__ = ["COLOUR_COUNT", "DrawnHolder", "DrawnHolders", "holders_of"]

COLOUR_COUNT = 6
"""Owners have colours 0 to 5: people can distinguish so many on dark and on light backgrounds.
Where colours repeat, the letters differ."""
_LETTERS = string.ascii_uppercase + "0123456789"
# More owners than letters: the rest share one sign, and the legend still lists each.
_MANY = "#"


class DrawnHolder(Struct, frozen=True, kw_only=True):
    """One owner as drawn."""

    letter: str
    colour: int
    """0 to COLOUR_COUNT - 1."""
    name: str
    allocation: Allocation

    @property
    def held_text(self) -> str:
        """What the owner holds, in words."""
        devices, cpus = self.allocation.devices, self.allocation.cpus
        held = [f"{len(names)} {device_class}" for device_class, names in devices.items() if device_class != "cpu"]
        return ", ".join([*held, *([f"{len(cpus)} cpus {cpus}"] if cpus else [])]) or "nothing"


class DrawnHolders(Struct, frozen=True, kw_only=True):
    """All owners of one node, also by CPU and by device."""

    all: tuple[DrawnHolder, ...]
    by_cpu: dict[int, DrawnHolder]
    by_device: dict[tuple[str, str], DrawnHolder]
    """Of several with shares of one device the last by key."""
    sharers: dict[tuple[str, str], tuple[tuple[DrawnHolder, HeldShare], ...]]
    """The owners of shares of a device, each with its share, by class and name; owners by key."""


def holders_of(ledger: Holders | None, letters: Mapping[str, str] | None = None) -> DrawnHolders:
    """Give each owner the letter that it had (`letters`, by key), else one of its name, else a free
    one.

    Order: of their keys. So a letter identifies its owner, and does not change when others come and
            go, except for owners with the same first letter.
    """
    given = _letters(
        {key: allocation.shown.name for key, allocation in (ledger.allocations if ledger else {}).items()},
        letters or {},
    )
    holders: list[DrawnHolder] = []
    by_cpu: dict[int, DrawnHolder] = {}
    by_device: dict[tuple[str, str], DrawnHolder] = {}
    sharers: dict[tuple[str, str], list[tuple[DrawnHolder, HeldShare]]] = {}
    for place, (key, allocation) in enumerate(sorted((ledger.allocations if ledger else {}).items())):
        holder = DrawnHolder(
            letter=given[key],
            colour=(_LETTERS.index(given[key]) if given[key] in _LETTERS else place) % COLOUR_COUNT,
            name=str(allocation.shown),
            allocation=allocation,
        )
        holders.append(holder)
        by_cpu.update(dict.fromkeys(allocation.cpus, holder))
        for device_class, names in allocation.devices.items():
            by_device.update({(device_class, name): holder for name in names})
        for holding in allocation.holdings:
            for device_class, shares in holding.shares.items():
                for name, share in shares.items():
                    sharers.setdefault((device_class, name), []).append((holder, share))
    return DrawnHolders(
        all=tuple(holders),
        by_cpu=by_cpu,
        by_device=by_device,
        sharers={place: tuple(parts) for place, parts in sharers.items()},
    )


def _letters(names: Mapping[str, str], had: Mapping[str, str]) -> dict[str, str]:
    """Choose a letter for each key. Letters of owners that are gone are free again."""
    given = {key: had[key] for key in sorted(names) if had.get(key, _MANY) in _LETTERS}
    taken = set(given.values())
    for key in sorted(names.keys() - given.keys()):
        own = [letter for letter in names[key].upper() if letter in _LETTERS]
        given[key] = next((letter for letter in (*own, *_LETTERS) if letter not in taken), _MANY)
        taken.add(given[key])
    return given
