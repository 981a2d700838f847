"""Cuts cards when a request wants a part of them, or the whole.

One change of a card at a time, the intent in the journal before it, never
while another owner uses the card.
Flows in: how each card of a request must be. Flows out: a driver's edits, at once where the
cards are as wanted, else as long work; or a refusal with who is in the way. Every device that
an owner has here has a step in its record, so that a request that wants its card otherwise sees
it, also after a restart. What a card is cut into, and how, is the subclass's: modes of AMD's
GPUs, virtual functions of SR-IOV.
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
from topobus.values.outcome import Reason, Refusal
from topobus.values.pci import PciAddress

__all__ = ["PART", "SETTLE_S", "UNDO_S", "CardCuts", "CardLocks", "CardWish", "Edits", "refuse", "write_text"]

Edits = Mapping[str, ContainerEdits] | Refusal

SETTLE_S = 30.0
"""Seconds that the kernel may take until a card is as it was asked to be."""
PART = "part"
"""Step: the owner has a device of a card that is cut on demand; nothing is to be undone."""
# Seconds that `unprepare` waits for a card, in a call that has five in all.
UNDO_S = 1.5


class CardWish(Protocol):
    """How one card must be for a request."""

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
        """Say whether this process changes a card now: what it looks
        like meanwhile means nothing.
        """
        return address in self._changing

    @contextmanager
    def changing(self, address: PciAddress) -> Iterator[None]:
        """Mark a card; the caller has its lock."""
        with self._guard:
            self._changing |= {address}
        try:
            yield
        finally:
            with self._guard:
                self._changing -= {address}

    @contextmanager
    def locked(self, addresses: Collection[PciAddress], limit_s: float) -> Iterator[bool]:
        """Have these cards for oneself.

        False when somebody else has one of them for longer than the limit. 0: do not wait.
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

    def __init__(self, *, pauses: Pauses | None = None, write: Callable[[Path, str], None] | None = None) -> None:
        self.locks = CardLocks()
        self.pauses = pauses or Pauses()
        self.write = write or write_text

    def prepare(
        self, tree: Tree, wishes: Mapping[PciAddress, WishT], context: PrepareContext, edits: Callable[[], Edits]
    ) -> Edits | LongWork:
        """Give the edits of cards that are as wanted, at once.

        Of others after a change, which is long work.
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
        """Say whether nothing is to be changed; the caller has the cards' locks."""

    @abstractmethod
    def describe(self, address: PciAddress, wish: WishT) -> str:
        """Say, for people, how a card is to be."""

    @abstractmethod
    def bring(self, tree: Tree, address: PciAddress, wish: WishT, context: PrepareContext) -> Refusal | None:
        """Change a card; None: it is as wanted.

        The caller has its lock, and who has what is written down.
        """

    @contextmanager
    def turn_to_undo(self, address: PciAddress) -> Iterator[None]:
        """Have a card for oneself within `unprepare`.

        Errors: raises HardwareError while it is at work for another claim.
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
    """Write a file of the kernel's.

    It answers when the driver has done it, or refuses as an OSError.
    """
    path.write_text(f"{text}\n", encoding="ascii")


def refuse(code: str, message: str, **facts: str | int | tuple[str, ...]) -> Refusal:
    """Refuse with one reason."""
    return Refusal(reasons=(Reason(code=code, message=message, facts=dict(facts)),))


def _note(wishes: Collection[CardWish], context: PrepareContext) -> None:
    """Write down who has what, before it is looked at who else has something of the cards."""
    for wish in wishes:
        for device in wish.devices:
            context.records.get(device, DeviceRecord()).intend(PART, {"of": wish.name})


def _with_note(wishes: Collection[CardWish], context: PrepareContext, edits: Callable[[], Edits]) -> Edits:
    """Give the edits, and close the note when they are given: a refused owner has had no part that
    could go with it.
    """
    _note(wishes, context)
    answer = edits()
    for wish in wishes if not isinstance(answer, Refusal) else ():
        for device in wish.devices:
            record = context.records.get(device, DeviceRecord())
            if (step := record.step(PART)) is not None and not step.is_done:
                record.done(PART)
    return answer
