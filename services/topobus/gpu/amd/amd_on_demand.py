"""Brings AMD cards into the mode that a request wants: whole, or in one of the numbers of parts
that they can have.

A card stays in its last mode after its last part is released: no mode is better than another for
the next owner, and each further switch could fail. So a switch that a crash interrupted counts as
done as soon as amdgpu and KFD agree on any mode. Only a card on which they do not agree is brought
back to its previous mode.

A switch is one write of `current_compute_partition`. It is refused, with the reason, where a
process uses the card, the kernel refuses, or KFD does not agree in time. The kernel refuses a card
that a process computes on (EBUSY). Older kernels lock KFD as a whole, and refuse while any process
of the node has it open. The memory mode (NPS) is left as it is: amdgpu stores a request for it for
all cards of an XGMI hive, and applies it when the driver is loaded again.
Source: drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c (available_compute_partition,
current_compute_partition), amdgpu_gmc.c (current_memory_partition: "please remove and reload the
driver"), amdkfd/kfd_device.c (kgd2kfd_check_and_lock_kfd).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from topobus.devicekit.device_record import DeviceRecord, Json, Step
from topobus.devicekit.partitioning.card_cuts import PART, SETTLE_S, UNDO_S, CardCuts
from topobus.devicekit.pauses import Pauses, look_until
from topobus.devicekit.prepare_context import PrepareContext
from topobus.gpu.amd.amd_cards import COUNTS, WHOLE, AmdCard, partition_drm_nodes, read_amd_cards
from topobus.gpu.processes import GpuProcess, holders_of, kfd_processes, own_processes, process_of
from topobus.sysfs.drm import function_drm_nodes
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["AmdOnDemand", "ModeWish", "group_wishes", "part_counts", "settle_mode"]

_MODE = "mode"
"""Step: the card is brought into another mode."""
_CURRENT = "current_compute_partition"
_AVAILABLE = "available_compute_partition"
_CPX = "CPX"


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
            refusal = _write_mode(tree, address, wish.mode, self.write)
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
            refusal = _write_mode(tree, address, before["mode"], self.write)
            settled = refusal or settle_mode(tree, address, before["mode"], before["count"], self.pauses, UNDO_S)
        if isinstance(settled, Refusal):
            raise HardwareError(settled.why, address=str(address))


def _refuse_users(tree: Tree, card: AmdCard, wish: ModeWish, in_use: frozenset[str]) -> Refusal | None:
    rivals = tuple(sorted(filter(wish.is_rival, in_use)))
    if rivals:
        text = (
            f"{card.address} is in mode {card.mode} and cannot be brought into {wish.mode}: {', '.join(rivals)} "
            "is held, or is still being cleaned"
        )
        return refuse("card-in-use", text, address=str(card.address), devices=rivals)
    users = _card_users(tree, card)
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


def part_counts(tree: Tree, card: AmdCard, compute_dies: int) -> dict[str, int]:
    """Return the modes that a card can have, with how many parts each makes.

    A card with fewer than two modes cannot be cut on demand.

    Shapes: compute_dies — from the table of products; 0 when the card is not in it, and KFD's
    number is used.
    """
    text = tree.read(f"{pci_folder(card.address)}/{_AVAILABLE}") or ""
    dies = (
        compute_dies or sum(node.xcc_count for node in card.nodes) or (len(card.partitions) if card.mode == _CPX else 0)
    )
    counts = {WHOLE: 1, **COUNTS, _CPX: dies}
    return {mode: counts[mode] for mode in re.findall(r"[A-Z]+", text.upper()) if counts.get(mode)}


def _card_users(tree: Tree, card: AmdCard) -> tuple[GpuProcess, ...]:
    """Find the processes that use a card, whole or in parts: those that compute, and those that
    have one of its nodes open. This service is left out.

    Errors: raises HardwareError when KFD cannot be read.
    Cost: one readlink for each open file of the node.
    """
    nodes = {path.rpartition("/")[2] for path in function_drm_nodes(tree, card.address).paths}
    nodes |= {path.rpartition("/")[2] for part in card.partitions for path in partition_drm_nodes(tree, card, part)}
    computing = kfd_processes(tree, {node.number for node in card.nodes})
    users = {pid: process_of(tree, pid, used) for pid, used in computing.items()}
    users = {process.pid: process for process in holders_of(tree, nodes).processes} | users
    own = own_processes(tree, tuple(users.values()))
    return tuple(users[pid] for pid in sorted(users) if pid not in own)


def _write_mode(tree: Tree, address: PciAddress, mode: str, write: Callable[[Path, str], None]) -> Refusal | None:
    """Write a mode for the kernel to set, and return None when it accepts it."""
    try:
        write(tree.path(f"{pci_folder(address)}/{_CURRENT}"), mode)
    except OSError as err:
        hint = {
            errno.EBUSY: "a process still has KFD open (on kernels that lock KFD as a whole: on any GPU of this node)",
            errno.EINVAL: "the card does not have this mode with its memory mode",
            errno.EROFS: "/sys cannot be written: partitions.on_demand needs root and a writable /sys/devices "
            "(deploy/kubernetes-gpu-partitions)",
            errno.EACCES: "/sys cannot be written: partitions.on_demand needs root and a writable /sys/devices "
            "(deploy/kubernetes-gpu-partitions)",
            errno.EPERM: "the card is being reset, or the service may not write /sys",
        }.get(err.errno or 0, "")
        text = f"amdgpu does not bring {address} into mode {mode}: {err.strerror}" + (f": {hint}" if hint else "")
        return refuse("partition-mode-refused", text, address=str(address), mode=mode, error=err.errno or 0)
    return None


def settle_mode(
    tree: Tree, address: PciAddress, mode: str, count: int, pauses: Pauses, limit_s: float = SETTLE_S
) -> AmdCard | Refusal:
    """Wait until amdgpu, KFD and the render nodes agree on a mode, and return the card as it is
    then.
    """

    def look() -> tuple[AmdCard | None, str]:
        try:
            # A new tree has nothing cached: folders come and go below the same names.
            card = read_amd_cards(Tree(tree.settings), [address])[address]
            why = _unsettled(tree, card, mode, count)
        except HardwareError as err:
            return None, err.message
        return (None, why) if why else (card, "")

    settled = look_until(look, pauses, limit_s)
    if isinstance(settled, AmdCard):
        return settled
    text = f"{address} was asked for mode {mode} and is not in it after {limit_s:g} s: {settled}"
    return refuse("partition-mode-unsettled", text, address=str(address), mode=mode)


def _unsettled(tree: Tree, card: AmdCard, mode: str, count: int) -> str:
    """Return what is missing for a card to be in a mode, or "" when it is in it."""
    if card.fault:
        return card.fault
    if card.mode != mode:
        return f"it is in mode {card.mode or 'unknown'}"
    if len(card.nodes) != count:
        return f"KFD lists {len(card.nodes)} of its {count} parts"
    if mode == WHOLE:
        return "" if function_drm_nodes(tree, card.address).render else "it has no render node"
    missing = [part.index for part in card.partitions if not _has_node(tree, card, part.node.render_minor)]
    return f"there is no render node of part {', '.join(map(str, missing))}" if missing else ""


def _has_node(tree: Tree, card: AmdCard, minor: int) -> bool:
    """Return whether udev has made a render node. True on a tree without such a folder."""
    return not tree.exists("dev/dri") or tree.exists(f"dev/dri/renderD{minor}") or not minor
