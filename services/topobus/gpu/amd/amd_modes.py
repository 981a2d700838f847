"""Brings an idle AMD card into another compute partition mode, and gives the reason when it cannot.

It writes `current_compute_partition` once. It refuses where a process uses the card, the kernel
refuses, or KFD does not agree in time.

The kernel refuses a card that a process computes on (EBUSY). Older kernels lock KFD as a whole, and
refuse while any process of the node has it open. The memory mode (NPS) is left as it is: amdgpu
stores a request for it for all cards of an XGMI hive, and applies it when the driver is loaded
again.
Source: drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c (available_compute_partition,
current_compute_partition), amdgpu_gmc.c (current_memory_partition: "please remove and reload the
driver"), amdkfd/kfd_device.c (kgd2kfd_check_and_lock_kfd).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

from topobus.devicekit.partitioning.card_cuts import SETTLE_S
from topobus.devicekit.pauses import Pauses, look_until
from topobus.devicekit.pci import pci_folder
from topobus.gpu.amd.amd_cards import COUNTS, WHOLE, AmdCard, partition_drm_nodes, read_amd_cards
from topobus.gpu.kfd_processes import kfd_processes
from topobus.gpu.processes import GpuProcess, holders_of, own_processes, process_of
from topobus.sysfs.drm import function_drm_nodes
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["card_users", "part_counts", "settle_mode", "write_mode"]

_CURRENT = "current_compute_partition"
_AVAILABLE = "available_compute_partition"
_CPX = "CPX"


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


def card_users(tree: Tree, card: AmdCard) -> tuple[GpuProcess, ...]:
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


def write_mode(tree: Tree, address: PciAddress, mode: str, write: Callable[[Path, str], None]) -> Refusal | None:
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
