"""Brings AMD cards into the mode that a request wants: whole, or in one of the numbers of parts
that they can have.

A card stays in its last mode after its last part is released: no mode is better than another for
the next owner, and each further switch could fail. So a switch that a crash interrupted counts as
done as soon as amdgpu and KFD agree on any mode. Only a card on which they do not agree is brought
back to its previous mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, Json, Step
from topobus.devicekit.partitioning.card_cuts import PART, UNDO_S, CardCuts
from topobus.devicekit.prepare_context import PrepareContext
from topobus.gpu.amd.amd_cards import WHOLE, AmdCard, read_amd_cards
from topobus.gpu.amd.amd_modes import card_users, settle_mode, write_mode
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["AmdOnDemand", "ModeWish", "group_wishes"]

_MODE = "mode"
"""Step: the card is brought into another mode."""


class ModeWish(Struct, frozen=True, kw_only=True):
    """The mode that one card must have for a request."""

    name: str
    """The name of the whole card. Its parts' names begin with it."""
    mode: str
    counts: Mapping[str, int]
    """By mode that it can have: the number of parts."""
    devices: tuple[str, ...]

    def is_rival(self, device: str) -> bool:
        """Return whether a device belongs to this card in another mode.

        A device of the same mode is no rival: its owner waits as well, or had it before the node
        was restarted.

        >>> ModeWish(name="gpu-0", mode="CPX", counts={}, devices=()).is_rival("gpu-0"), ModeWish(name="gpu-0", mode="SPX", counts={}, devices=()).is_rival("gpu-0")
        (True, False)
        """  # noqa: E501
        own = device == self.name if self.mode == WHOLE else device.startswith(f"{self.name}-{self.mode.lower()}-")
        return not own and (device == self.name or device.startswith(f"{self.name}-"))


class AmdOnDemand(CardCuts[ModeWish]):
    """The switches of one driver's cards."""

    def are_as_wanted(self, tree: Tree, wishes: Mapping[PciAddress, ModeWish]) -> bool:
        """Return whether all cards are in their modes, without faults."""
        cards = read_amd_cards(tree, sorted(wishes))
        return all(card.mode == wishes[address].mode and not card.fault for address, card in cards.items())

    def describe(self, address: PciAddress, wish: ModeWish) -> str:
        """Name the card and the mode that it is to have."""
        return f"{address} in mode {wish.mode}"

    def undo(self, tree: Tree, address: PciAddress | None, record: DeviceRecord) -> None:
        """Release a card.

        A switch that a crash or a refusal interrupted is undone, unless the card is whole in some
        mode.

        Errors: raises HardwareError while the card is in use, or cannot be brought back yet.
        """
        step = record.step(_MODE)
        if step is not None and not step.is_done and address is not None:
            with self.turn_to_undo(address):
                self._bring_back(tree, address, step)
        record.undone(_MODE)
        record.undone(PART)

    def bring(self, tree: Tree, address: PciAddress, wish: ModeWish, context: PrepareContext) -> Refusal | None:
        """Bring a card into the wanted mode."""
        card = read_amd_cards(tree, [address])[address]
        if card.fault or not card.mode:
            text = (
                f"{address} cannot be brought into mode {wish.mode}: {card.fault or 'amdgpu does not report its mode'}"
            )
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
        with self.locks.changing(address):
            refusal = write_mode(tree, address, wish.mode, self.write)
            if refusal is not None:
                return refusal
            settled = settle_mode(tree, address, wish.mode, wish.counts[wish.mode], self.pauses)
        if isinstance(settled, Refusal):
            return settled
        record.done(_MODE)
        return None

    def _bring_back(self, tree: Tree, address: PciAddress, step: Step) -> None:
        before = step.before
        counts = {before["mode"]: before["count"], before["to"]: before["to_count"]}
        card = read_amd_cards(tree, [address])[address]
        if card.mode not in counts and card.mode and not card.fault:
            # The card was brought into another mode from outside since.
            return
        with self.locks.changing(address):
            if card.mode in counts and not isinstance(
                settle_mode(tree, address, card.mode, counts[card.mode], self.pauses, UNDO_S / 3), Refusal
            ):
                return
            refusal = write_mode(tree, address, before["mode"], self.write)
            settled = refusal or settle_mode(tree, address, before["mode"], before["count"], self.pauses, UNDO_S)
        if isinstance(settled, Refusal):
            raise HardwareError("; ".join(reason.message for reason in settled.reasons), address=str(address))


def _refuse_users(tree: Tree, card: AmdCard, wish: ModeWish, in_use: frozenset[str]) -> Refusal | None:
    rivals = tuple(sorted(filter(wish.is_rival, in_use)))
    if rivals:
        text = (
            f"{card.address} is in mode {card.mode} and cannot be brought into {wish.mode}: {', '.join(rivals)} "
            "is held, or is still being cleaned"
        )
        return refuse("card-in-use", text, address=str(card.address), devices=rivals)
    users = card_users(tree, card)
    if users:
        text = (
            f"{card.address} is in mode {card.mode} and cannot be brought into {wish.mode}: "
            f"{', '.join(map(str, users))} has it open"
        )
        return refuse("card-in-use", text, address=str(card.address), pids=tuple(str(process.pid) for process in users))
    return None


def group_wishes(
    wanted: Sequence[tuple[PciAddress, str, str, str]], counts: Mapping[PciAddress, Mapping[str, int]]
) -> Mapping[PciAddress, ModeWish] | Refusal:
    """Group what is wanted by card.

    Shapes: wanted — address, name of the card, mode and device of each.
    Errors: raises nothing; refuses a card of which two modes are wanted at once.
    """
    wishes: dict[PciAddress, ModeWish] = {}
    for address, card, mode, device in sorted(wanted):
        wish = wishes.get(address, ModeWish(name=card, mode=mode, counts=counts[address], devices=()))
        if wish.mode != mode or mode not in wish.counts:
            text = f"{device}: {address} cannot be in mode {mode}" + (
                f" and {wish.mode} at once" if wish.mode != mode else " now"
            )
            return refuse("device-not-offered", text, devices=(device,))
        wishes[address] = ModeWish(name=card, mode=mode, counts=wish.counts, devices=(*wish.devices, device))
    return wishes
