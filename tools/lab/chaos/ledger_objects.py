"""A node's ledger as two families of sequential objects, and the effect of each client's operation
on them.

An operation with its answer becomes an action on each object that it touches, with the state of the
object after it. An object is a device, whose state is its holder, or an owner, whose state is what
it holds and in which phase. An operation on several devices is projected on each of them and on its
owner, so what is checked is that each device and each owner had a linear history. The owner's
object holds the devices of one operation together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto

from msgspec import Struct

from topobus.engine.ledger.holdings import names_of
from topobus.values.ledger import AllocationPhase, Holders

__all__ = [
    "ANY",
    "FREE",
    "NOTHING",
    "Act",
    "DeviceAction",
    "Held",
    "OwnerAction",
    "device_step",
    "devices_of",
    "double_holdings",
    "held_by_owner",
    "is_look",
    "owner_step",
]

FREE = ""
"""The state of a free device."""


class Held(Struct, frozen=True):
    """What an owner holds."""

    phase: str = ""
    devices: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.phase} {', '.join(sorted(self.devices))}" if self.devices else "without devices"


NOTHING = Held()
ANY = frozenset({"?"})
"""Unknown devices: of a placement whose answer was lost for good."""


class Act(Enum):
    """What an operation does to one object, by what its client saw.

    Those with MAY are of operations whose answer was lost for good.
    """

    # a device
    TAKE = auto()
    LET_GO = auto()
    """The owner had it, and no longer has it."""
    DROP = auto()
    """The owner no longer has it, if it had it."""
    HOLDER = auto()
    """The holder was seen."""
    NOT_HOLDER = auto()
    """The owner did not hold it."""
    MAY_TAKE = auto()
    MAY_DROP = auto()
    # an owner
    PLACE = auto()
    ADOPT = auto()
    COMMIT = auto()
    RELEASE = auto()
    LOSE = auto()
    """Another owner's adoption displaced it."""
    HOLDS = auto()
    HOLDS_SOME = auto()
    HOLDS_NONE = auto()
    MAY_PLACE = auto()
    MAY_COMMIT = auto()
    MAY_RELEASE = auto()
    MAY_LOSE = auto()


_LOOKS = frozenset({Act.HOLDER, Act.NOT_HOLDER, Act.HOLDS, Act.HOLDS_SOME, Act.HOLDS_NONE})


class DeviceAction(Struct, frozen=True):
    """What an operation of an owner does to a device. `displaces` names the owners that it
    displaces.
    """

    act: Act
    owner: str
    displaces: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.act.name.lower().replace('_', '-')} {self.owner or 'nobody'}"


class OwnerAction(Struct, frozen=True):
    """What an operation does to an owner."""

    act: Act
    devices: frozenset[str] = frozenset()
    phase: str = AllocationPhase.COMMITTED.value

    def __str__(self) -> str:
        return f"{self.act.name.lower().replace('_', '-')} {', '.join(sorted(self.devices))} {self.phase}"


def is_look(action: DeviceAction | OwnerAction) -> bool:
    """Say whether an action changes nothing."""
    return action.act in _LOOKS


def device_step(holder: str, action: DeviceAction) -> str | None:
    """Return the holder of the device after an action. None when the action is impossible.

    Errors: raises ValueError for an action on owners.
    """
    match action.act:
        case Act.TAKE | Act.MAY_TAKE:
            return action.owner if holder in (FREE, action.owner) or holder in action.displaces else None
        case Act.LET_GO:
            return FREE if holder == action.owner else None
        case Act.DROP:
            return FREE if holder == action.owner else holder
        case Act.MAY_DROP:
            return FREE if holder == action.owner else None
        case Act.HOLDER:
            return holder if holder == action.owner else None
        case Act.NOT_HOLDER:
            return holder if holder != action.owner else None
    raise ValueError(f"{action.act} is nothing that happens to a device")


def owner_step(held: Held, action: OwnerAction) -> Held | None:
    """Return what the owner holds after an action. None when the action is impossible.

    Errors: raises ValueError for an action on devices.
    """
    match action.act:
        case Act.PLACE | Act.MAY_PLACE:
            return Held(action.phase, action.devices) if held == NOTHING else None
        case Act.ADOPT:
            return Held(action.phase, action.devices)
        case Act.COMMIT | Act.MAY_COMMIT:
            return Held(AllocationPhase.COMMITTED.value, held.devices) if held != NOTHING else None
        case Act.RELEASE:
            return NOTHING if _is_same(held.devices, action.devices) else None
        case Act.MAY_RELEASE:
            return NOTHING if held != NOTHING else None
        case Act.LOSE | Act.MAY_LOSE:
            left = held.devices - action.devices
            return (Held(held.phase, left) if left else NOTHING) if left != held.devices else None
        case Act.HOLDS:
            return held if held.phase == action.phase and _is_same(held.devices, action.devices) else None
        case Act.HOLDS_SOME:
            return held if held != NOTHING else None
        case Act.HOLDS_NONE:
            return held if held == NOTHING else None
    raise ValueError(f"{action.act} is nothing that happens to an owner")


def _is_same(held: frozenset[str], seen: frozenset[str]) -> bool:
    return held == seen or (held == ANY and bool(seen))


def held_by_owner(ledger: Holders) -> dict[str, Held]:
    """Read what each owner holds."""
    return {
        key: Held(allocation.phase.value, devices_of(names_of(allocation)))
        for key, allocation in ledger.allocations.items()
    }


def double_holdings(ledger: Holders) -> tuple[str, ...]:
    """Name the devices and CPUs that are held by more than one owner, except by share.

    Empty for a correct ledger. This does not use the product's own check on purpose: a defect there
    must not hide here.
    """
    holders: dict[tuple[str, str], set[str]] = {}
    whole: set[tuple[str, str]] = set()
    for key, allocation in ledger.allocations.items():
        for holding in allocation.holdings:
            units = [(device_class, name) for device_class, names in holding.devices.items() for name in names]
            for unit in (*units, *(("cpu", f"cpu-{cpu}") for cpu in holding.cpus)):
                holders.setdefault(unit, set()).add(key)
                if unit[1] not in holding.shared.get(unit[0], ()):
                    whole.add(unit)
    return tuple(
        f"{unit[1]} is held by {' and by '.join(sorted(keys))}"
        for unit, keys in sorted(holders.items())
        if len(keys) > 1 and unit in whole
    )


def devices_of(names: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """Return devices by class as one set: a device's name contains its class."""
    return frozenset(name for class_names in names.values() for name in class_names)
