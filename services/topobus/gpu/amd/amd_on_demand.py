"""Cuts AMD cards when somebody gets a part of them: one switch of a card at a time, the intent in the journal before it, never while anybody else uses the card.

Flows in: which mode each card of a request must have. Flows out: the edits of a driver, at once where the cards are as wanted, else as long work; or a refusal with who is in
the way. Every device that somebody has got here has a step in its record, so that who wants another mode knows of it also after a restart.

A card stays in its last mode when its last part is given back: each mode is as good as another for whoever comes next, and a switch more is one more that can fail. So what a
death left half done is done as soon as amdgpu and KFD agree on any mode; only a card on which they do not agree is brought back to the mode from before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, Json, Step
from topobus.devicekit.driver import LongWork, PrepareContext
from topobus.devicekit.partitioning.card_locks import CardLocks
from topobus.gpu.amd.amd_cards import WHOLE, AmdCard, read_amd_cards
from topobus.gpu.amd.amd_modes import SETTLE_S, card_users, refuse, settle_mode, write_mode, write_text
from topobus.gpu.leftovers import Timer
from topobus.sysfs.tree import Tree
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress

__all__ = ["AmdOnDemand", "ModeWish", "group_wishes"]

Edits = Mapping[str, ContainerEdits] | Refusal

_PART = "part"
"""Step: the owner has a device of a card that is cut on demand; nothing is to be undone."""
_MODE = "mode"
"""Step: the card is brought into another mode."""
# Seconds that `unprepare` waits for a card, in a call that has five in all.
_UNDO_S = 1.5


class ModeWish(Struct, frozen=True, kw_only=True):
    """How one card must be for a request."""

    card: str
    """The name of the whole card; its parts' names begin with it."""
    mode: str
    counts: Mapping[str, int]
    """By mode that it can have: the number of parts."""
    devices: tuple[str, ...]

    def is_rival(self, device: str) -> bool:
        """Say whether a device is one of this card in another mode. One of the same mode is none: its owner waits too, or had it before the node started anew.

        >>> ModeWish(card="gpu-0", mode="CPX", counts={}, devices=()).is_rival("gpu-0"), ModeWish(card="gpu-0", mode="SPX", counts={}, devices=()).is_rival("gpu-0")
        (True, False)
        """
        own = device == self.card if self.mode == WHOLE else device.startswith(f"{self.card}-{self.mode.lower()}-")
        return not own and (device == self.card or device.startswith(f"{self.card}-"))


class AmdOnDemand:
    """The switches of one driver's cards."""

    def __init__(self, *, timer: Timer | None = None, write: Callable[[Path, str], None] = write_text) -> None:
        self.timer = timer or Timer()
        self.write = write
        self._locks = CardLocks()

    def is_switching(self, address: PciAddress) -> bool:
        """Say whether a card is being brought into another mode by this process: what it looks like meanwhile means nothing."""
        return self._locks.is_changing(address)

    def prepare(
        self, tree: Tree, wishes: Mapping[PciAddress, ModeWish], context: PrepareContext, edits: Callable[[], Edits]
    ) -> Edits | LongWork:
        """Give the edits of cards that are as wanted, at once; of others after a switch, which is long work."""
        with self._locks.locked(wishes, 0) as is_mine:
            if is_mine and all(
                card.mode == wishes[at].mode and not card.fault for at, card in read_amd_cards(tree, sorted(wishes)).items()
            ):
                _note(wishes.values(), context)
                return edits()
        what = ", ".join(f"{address} into mode {wishes[address].mode}" for address in sorted(wishes))
        limit_s = 2 * SETTLE_S * (1 + len(wishes))
        return LongWork(limit_s=limit_s, what=f"bringing {what}", work=lambda: self._work(tree, wishes, context, edits))

    def undo(self, tree: Tree, address: PciAddress | None, record: DeviceRecord) -> None:
        """Let an owner go; a switch that a death or a refusal cut off is undone, unless the card is whole in some mode.

        Errors: raises HardwareError while the card is at work, or cannot be brought back yet.
        """
        step = record.step(_MODE)
        if step is not None and not step.is_done and address is not None:
            with self._locks.locked([address], _UNDO_S) as is_mine:
                if not is_mine:
                    raise HardwareError(f"{address} is being brought into another mode")
                self._bring_back(tree, address, step)
        record.undone(_MODE)
        record.undone(_PART)

    def _work(self, tree: Tree, wishes: Mapping[PciAddress, ModeWish], context: PrepareContext, edits: Callable[[], Edits]) -> Edits:
        with self._locks.locked(wishes, SETTLE_S * (1 + len(wishes))) as is_mine:
            if not is_mine:
                cards = ", ".join(map(str, sorted(wishes)))
                return refuse("card-in-use", f"{cards}: another claim's switch of the card has not ended", devices=_names(wishes.values()))
            _note(wishes.values(), context)
            for address in sorted(wishes):
                refusal = self._bring(tree, address, wishes[address], context)
                if refusal is not None:
                    return refusal
            return edits()

    def _bring(self, tree: Tree, address: PciAddress, wish: ModeWish, context: PrepareContext) -> Refusal | None:
        """Bring a card into the mode that is wanted; the caller has its lock."""
        card = read_amd_cards(tree, [address])[address]
        if card.fault or not card.mode:
            text = f"{address} cannot be brought into mode {wish.mode}: {card.fault or 'amdgpu tells no mode of it'}"
            return refuse("partition-mode-unsettled", text, address=str(address), mode=wish.mode)
        if card.mode == wish.mode:
            return None
        refusal = _refuse_users(tree, card, wish, context.in_use())
        if refusal is not None:
            return refusal
        record = context.records.get(wish.devices[0], DeviceRecord())
        facts: dict[str, Json] = {
            "mode": card.mode,
            "count": wish.counts.get(card.mode, len(card.nodes)),
            "to": wish.mode,
            "to_count": wish.counts[wish.mode],
        }
        record.intend(_MODE, facts)
        with self._locks.changing(address):
            refusal = write_mode(tree, address, wish.mode, self.write)
            if refusal is not None:
                return refusal
            settled = settle_mode(tree, address, wish.mode, wish.counts[wish.mode], self.timer)
        if isinstance(settled, Refusal):
            return settled
        record.done(_MODE)
        return None

    def _bring_back(self, tree: Tree, address: PciAddress, step: Step) -> None:
        before = step.before
        counts = {before["mode"]: before["count"], before["to"]: before["to_count"]}
        card = read_amd_cards(tree, [address])[address]
        if card.mode not in counts and card.mode and not card.fault:
            # Somebody else has brought it into another mode since.
            return
        with self._locks.changing(address):
            if card.mode in counts and not isinstance(
                settle_mode(tree, address, card.mode, counts[card.mode], self.timer, _UNDO_S / 3), Refusal
            ):
                return
            refusal = write_mode(tree, address, before["mode"], self.write)
            settled = refusal or settle_mode(tree, address, before["mode"], before["count"], self.timer, _UNDO_S)
        if isinstance(settled, Refusal):
            raise HardwareError("; ".join(reason.message for reason in settled.reasons), address=str(address))


def _note(wishes: Collection[ModeWish], context: PrepareContext) -> None:
    """Write down who has what, before it is looked at who else has something of the cards."""
    for wish in wishes:
        for device in wish.devices:
            record = context.records.get(device, DeviceRecord())
            record.intend(_PART, {"mode": wish.mode})
            if (step := record.step(_PART)) is not None and not step.is_done:
                record.done(_PART)


def _refuse_users(tree: Tree, card: AmdCard, wish: ModeWish, in_use: frozenset[str]) -> Refusal | None:
    rivals = tuple(sorted(filter(wish.is_rival, in_use)))
    if rivals:
        text = f"{card.address} is in mode {card.mode} and cannot be brought into {wish.mode}: {', '.join(rivals)} is held, or is still being cleaned"
        return refuse("card-in-use", text, address=str(card.address), devices=rivals)
    users = card_users(tree, card)
    if users:
        text = f"{card.address} is in mode {card.mode} and cannot be brought into {wish.mode}: {', '.join(map(str, users))} has it open"
        return refuse("card-in-use", text, address=str(card.address), pids=tuple(str(process.pid) for process in users))
    return None


def _names(wishes: Collection[ModeWish]) -> tuple[str, ...]:
    return tuple(sorted(device for wish in wishes for device in wish.devices))


def group_wishes(
    wanted: Sequence[tuple[PciAddress, str, str, str]], counts: Mapping[PciAddress, Mapping[str, int]]
) -> Mapping[PciAddress, ModeWish] | Refusal:
    """Group what is wanted by card.

    Shapes: wanted — address, name of the card, mode and device of each. Errors: refuses a card of which two modes are wanted at once.
    """
    wishes: dict[PciAddress, ModeWish] = {}
    for address, card, mode, device in sorted(wanted):
        wish = wishes.get(address, ModeWish(card=card, mode=mode, counts=counts[address], devices=()))
        if wish.mode != mode or mode not in wish.counts:
            text = f"{device}: {address} cannot be in mode {mode}" + (f" and {wish.mode} at once" if wish.mode != mode else " now")
            return refuse("device-not-offered", text, devices=(device,))
        wishes[address] = ModeWish(card=card, mode=mode, counts=wish.counts, devices=(*wish.devices, device))
    return wishes
