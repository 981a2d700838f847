"""Cuts cards when a request wants a part of them, or the whole.

A card has only one change at a time, with the intent in the journal before it, and never while
another owner uses the card. The result is a driver's edits, at once where the cards are as wanted,
else as long work, or a refusal that names the users. Every device that an owner has here has a step
in its record, so that a request that wants its card otherwise sees it, also after a restart. The
subclass decides into what a card is cut, and how: modes of AMD's GPUs, virtual functions of SR-IOV.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.pauses import Pauses
from topobus.devicekit.prepare_context import LongWork, PrepareContext
from topobus.sysfs.tree import Tree
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["PART", "SETTLE_S", "UNDO_S", "CardCuts", "CardLocks", "CardWish", "Edits", "write_text"]

Edits = Mapping[str, ContainerEdits] | Refusal

SETTLE_S = 30.0
"""Seconds that the kernel may take until a card is as it was asked to be."""
PART = "part"
"""Step: the owner has a device of a card that is cut on demand; nothing is to be undone."""
# Seconds that `unprepare` waits for a card, in a call that has five in all.
UNDO_S = 1.5


class CardWish(Protocol):
    """The state of one card that a request needs."""

    @property
    def name(self) -> str:
        """The device of the whole card."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that the request wants of it."""
        ...


WishT = TypeVar("WishT", bound=CardWish)


class CardLocks:
    """The locks of one driver's cards."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[PciAddress, threading.Lock] = {}
        self._changing: frozenset[PciAddress] = frozenset()

    def is_changing(self, address: PciAddress) -> bool:
        """Return whether this process changes a card now. What the card looks like meanwhile does
        not count.
        """
        return address in self._changing

    @contextmanager
    def changing(self, address: PciAddress) -> Iterator[None]:
        """Mark a card as changing. The caller has its lock."""
        with self._guard:
            self._changing |= {address}
        try:
            yield
        finally:
            with self._guard:
                self._changing -= {address}

    @contextmanager
    def locked(self, addresses: Collection[PciAddress], limit_s: float) -> Iterator[bool]:
        """Lock these cards.

        False when another holder has one of them for longer than the limit. 0: do not wait.
        """
        with self._guard:
            locks = [self._locks.setdefault(address, threading.Lock()) for address in sorted(addresses)]
        taken: list[threading.Lock] = []
        try:
            for lock in locks:
                if not lock.acquire(timeout=limit_s if limit_s else -1, blocking=bool(limit_s)):
                    break
                taken.append(lock)
            yield len(taken) == len(locks)
        finally:
            for lock in taken:
                lock.release()


class CardCuts(ABC, Generic[WishT]):
    """The cards of one driver."""

    def __init__(self) -> None:
        self.locks = CardLocks()
        self.pauses = Pauses()
        self.write: Callable[[Path, str], None] = write_text

    def prepare(
        self, tree: Tree, wishes: Mapping[PciAddress, WishT], context: PrepareContext, edits: Callable[[], Edits]
    ) -> Edits | LongWork:
        """Return the edits at once if all cards are as wanted.

        Otherwise return the change as long work.
        """
        with self.locks.locked(wishes, 0) as is_mine:
            if is_mine and self.are_as_wanted(tree, wishes):
                return _with_note(wishes.values(), context, edits)
        what = ", ".join(self.describe(address, wishes[address]) for address in sorted(wishes))
        limit_s = 2 * SETTLE_S * (1 + len(wishes))
        return LongWork(
            limit_s=limit_s, what=f"setting up {what}", work=lambda: self._work(tree, wishes, context, edits)
        )

    @abstractmethod
    def are_as_wanted(self, tree: Tree, wishes: Mapping[PciAddress, WishT]) -> bool:
        """Return whether nothing must be changed. The caller has the cards' locks."""

    @abstractmethod
    def describe(self, address: PciAddress, wish: WishT) -> str:
        """Describe for people the state that a card must have."""

    @abstractmethod
    def bring(self, tree: Tree, address: PciAddress, wish: WishT, context: PrepareContext) -> Refusal | None:
        """Change a card. None when it is as wanted.

        The caller has its lock, and has recorded the owners.
        """

    @contextmanager
    def turn_to_undo(self, address: PciAddress) -> Iterator[None]:
        """Lock a card within `unprepare`.

        Errors: raises HardwareError while the card is being changed for another claim.
        """
        with self.locks.locked([address], UNDO_S) as is_mine:
            if not is_mine:
                raise HardwareError(f"{address} is being set up for another claim")
            yield

    def _work(
        self, tree: Tree, wishes: Mapping[PciAddress, WishT], context: PrepareContext, edits: Callable[[], Edits]
    ) -> Edits:
        with self.locks.locked(wishes, SETTLE_S * (1 + len(wishes))) as is_mine:
            if not is_mine:
                text = f"{', '.join(map(str, sorted(wishes)))}: it is still being set up for another claim"
                return refuse(
                    "card-in-use",
                    text,
                    devices=tuple(sorted(device for wish in wishes.values() for device in wish.devices)),
                )
            _note(wishes.values(), context)
            for address in sorted(wishes):
                refusal = self.bring(tree, address, wishes[address], context)
                if refusal is not None:
                    return refusal
            return _with_note(wishes.values(), context, edits)


def write_text(path: Path, text: str) -> None:
    """Write a kernel file.

    It returns when the driver has done it, or raises its refusal as an OSError.
    """
    path.write_text(f"{text}\n", encoding="ascii")


def _note(wishes: Collection[CardWish], context: PrepareContext) -> None:
    """Record the devices of this owner, before other owners of the cards are looked up."""
    for wish in wishes:
        for device in wish.devices:
            context.records.get(device, DeviceRecord()).intend(PART, {"of": wish.name})


def _with_note(wishes: Collection[CardWish], context: PrepareContext, edits: Callable[[], Edits]) -> Edits:
    """Return the edits, and complete the record when they are given. A refused owner had no part
    that its removal could affect.
    """
    _note(wishes, context)
    answer = edits()
    for wish in wishes if not isinstance(answer, Refusal) else ():
        for device in wish.devices:
            record = context.records.get(device, DeviceRecord())
            if (step := record.step(PART)) is not None and not step.is_done:
                record.done(PART)
    return answer
