"""Judges CPUs by counters of the kernel: throttling because of heat, the errors of a socket's memory
controllers (EDAC), and the pages of a NUMA node's memory that the kernel has given up.

The counters only grow, and the first reading sets the baseline. A file that cannot be read is a
fault of its own CPUs alone.

Machine checks of a single CPU are not judged. Sysfs has no counter of them (`machinecheck` holds
settings), and the one in /proc/interrupts rises for every CPU, because Intel's processors broadcast
each exception. Memory errors among them are counted by EDAC.

Source: arch/x86/kernel/cpu/mce/therm_throt.c (thermal_throttle/core_throttle_count);
Documentation/admin-guide/RAS/main.rst (edac/mc/mc*/{ce_count,ue_count,mc_name});
drivers/edac/{skx_common,i10nm_base,sb_edac,amd64_edac}.c for the names;
Documentation/ABI/stable/sysfs-devices-node (memory_failure/total).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from topobus.devicekit.counter_rises import CounterRises
from topobus.devicekit.edits_text import unreadable
from topobus.sysfs.numa import NODE_FOLDER
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.health_reasons import sign

__all__ = ["lost_pages", "memory_errors", "throttling"]

_CPU = "sys/devices/system/cpu"
_CONTROLLERS = "sys/devices/system/edac/mc"
# Intel's drivers name a controller `Skylake Socket#0 IMC#1` or `Broadwell SrcID#0_Ha#0`.
_SOCKET = re.compile(r"(?:Socket|SrcID)#(\d+)")
# AMD's driver names a controller by the family alone, and numbers the controllers by their dies,
# socket by socket.
_BY_FAMILY = re.compile(r"F[0-9A-F]{2}h")
# This many corrected errors between two looks mean a failing module, not cosmic noise. The limit is
# the same for corrected PCIe errors.
_CORRECTED_STORM = 100


def throttling(tree: Tree, cores: Mapping[int, int], counters: CounterRises) -> Mapping[int, Observation]:
    """Report the CPUs whose core lowered its clock because of heat since the last look.

    Shapes: cores — by CPU, the CPU whose file is read: the kernel counts alike for all CPUs of a
    core, so they name the same one; result — by CPU; empty on a processor that does not count (it
    has no such folder).
    Cost: one read per core.
    """
    leaders = sorted(set(cores.values()))
    if not leaders or not any(tree.exists(f"{_CPU}/cpu{cpu}/thermal_throttle") for cpu in leaders[:2]):
        return {}
    signs = {leader: sign for leader in leaders if (sign := _core_throttling(tree, leader, counters)) is not None}
    return {cpu: signs[leader] for cpu, leader in cores.items() if leader in signs}


def memory_errors(tree: Tree, sockets: Collection[int], counters: CounterRises) -> Mapping[int, Observation]:
    """Report the sockets with new errors in their memory.

    Controllers whose socket is not known are left out, because the CPUs that they serve are not
    known.

    Shapes: sockets — all that the machine has; result — by socket, the worst of its controllers.
    """
    controllers = [name for name in tree.names(_CONTROLLERS) if name.removeprefix("mc").isdecimal()]
    seen: dict[int, Observation] = {}
    for name in controllers:
        fault = _controller_errors(tree, name, counters)
        socket = _socket_of(tree, name, controllers, sockets) if fault is not None else None
        if fault is not None and socket is not None and (socket not in seen or fault.reason == "memory-errors"):
            seen[socket] = fault
    return seen


def lost_pages(tree: Tree, nodes: Iterable[int], counters: CounterRises) -> Mapping[int, Observation]:
    """Report the NUMA nodes of whose memory the kernel has given up pages since the last look.

    It gives up a page in which the hardware met an uncorrected error, with or without a driver of
    its controller, and one that an operator takes out of service (`hard_offline_page`).

    Shapes: result — by node; empty on a kernel that does not count (Linux 6.3 does).
    Cost: one read per node.
    """
    seen: dict[int, Observation] = {}
    for node in sorted(nodes):
        path = f"{NODE_FOLDER}/node{node}/memory_failure/total"
        try:
            count = tree.read_int(path)
        except HardwareError as err:
            seen[node] = unreadable(err)
            continue
        if rise := counters.rise(path, count):
            seen[node] = sign(
                "memory-pages-lost",
                f"the kernel has given up {rise} page(s) of the memory of NUMA node {node}",
                path,
                count,
            )
    return seen


def _core_throttling(tree: Tree, cpu: int, counters: CounterRises) -> Observation | None:
    path = f"{_CPU}/cpu{cpu}/thermal_throttle/core_throttle_count"
    try:
        count = tree.read_int(path)
    except HardwareError as err:
        return unreadable(err)
    rise = counters.rise(path, count)
    if not rise:
        return None
    return sign("throttled", f"its core was throttled {rise} time(s) because of heat", path, count)


def _controller_errors(tree: Tree, name: str, counters: CounterRises) -> Observation | None:
    paths = {kind: f"{_CONTROLLERS}/{name}/{kind}_count" for kind in ("ue", "ce")}
    try:
        counts = {kind: tree.read_int(path) for kind, path in paths.items()}
    except HardwareError as err:
        return unreadable(err)
    rises = {kind: counters.rise(paths[kind], count) for kind, count in counts.items()}
    if rises["ue"]:
        kind, code = "ue", "memory-errors"
        message = f"{rises['ue']} new uncorrected error(s) in the memory of its socket (controller {name})"
    elif rises["ce"] >= _CORRECTED_STORM:
        kind, code = "ce", "memory-corrected-storm"
        message = f"{rises['ce']} corrected errors between two looks in the memory of its socket (controller {name})"
    else:
        return None
    return sign(code, message, paths[kind], counts[kind])


def _socket_of(tree: Tree, name: str, controllers: Iterable[str], sockets: Collection[int]) -> int | None:
    text = _name_of(tree, name)
    if (match := _SOCKET.search(text)) is not None:
        return int(match.group(1))
    if _BY_FAMILY.match(text) is None:
        return None
    # The memory of an accelerator card (MI200) has controllers under other names. A socket without
    # modules has no controller, and then the numbers do not lead to a socket.
    alike = [controller for controller in controllers if _BY_FAMILY.match(_name_of(tree, controller))]
    if not sockets or len(alike) % len(sockets):
        return None
    return sorted(sockets)[alike.index(name) * len(sockets) // len(alike)]


def _name_of(tree: Tree, controller: str) -> str:
    try:
        return tree.read(f"{_CONTROLLERS}/{controller}/mc_name") or ""
    except HardwareError:
        return ""
