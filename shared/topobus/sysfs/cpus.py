"""Reads the logical CPUs: which exist, which are online and allowed, and which share a core, die,
socket and level-3 cache.

They come from sys/devices/system/cpu, else from /proc/cpuinfo. Contradictory data gives warnings.
Sharing is read from the sets that the kernel publishes, never derived from ids, because ids repeat
between sockets and clusters.
Source: Documentation/ABI/stable/sysfs-devices-system-cpu,
Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from msgspec import Struct

from topobus.sysfs.idsets import read_cpus, read_ids
from topobus.sysfs.nest import Nest
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.idset import CpuSet
from topobus.values.machine import Cpu, L3Cache

__all__ = ["CPU_FOLDER", "CpuFacts", "read_cpu_facts"]

CPU_FOLDER = "sys/devices/system/cpu"

_HYBRID = {"cpu_core": "performance", "cpu_atom": "efficiency", "cpu_lowpower": "low-power"}
# Cores of one kind differ by a few percent in clock; little cores have half
# of a big one's capacity or less.
_KIND_STEP = 1.2
# AMD families 21 and 22 (Bulldozer to Puma): two cores of a compute unit list each other as thread
# siblings, with core ids of their own.
_COMPUTE_UNIT_FAMILIES = ("21", "22")
# More index folders than any processor has caches; a gap ends the list in no kernel.
_MAX_CACHES = 10
# The kernel writes KiB, `32768K`; larger units are those of recordings by hand.
_SIZE = re.compile(r"(\d{1,9})([KMG]?)")
_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30}


class CpuFacts(Struct, frozen=True, kw_only=True):
    """All present CPUs.

    `usable` are online and allowed, `seen` are online with known topology, allowed or not.
    """

    cpus: tuple[Cpu, ...]
    usable: CpuSet
    seen: CpuSet
    present: CpuSet
    l3_caches: tuple[L3Cache, ...] = ()
    warnings: tuple[str, ...] = ()


class _Sharing(Struct):
    """Accepted sets by kind, and by CPU the first set of each kind that has it."""

    nest: Nest
    sets: dict[str, dict[int, CpuSet]]
    warnings: list[str]
    l3_bytes: dict[CpuSet, int]
    """Sizes of level-3 caches, by their CPUs."""

    def add(self, kind: str, cpus: CpuSet, cpu: int) -> None:
        if not cpus:
            return
        if not self.nest.add(cpus):
            self.warnings.append(f"{CPU_FOLDER}/cpu{cpu}: its {kind} {cpus} overlaps another set of CPUs; left out")
            return
        for each_cpu in cpus:
            self.sets.setdefault(kind, {}).setdefault(each_cpu, cpus)

    def of(self, kind: str, cpu: int) -> CpuSet | None:
        return self.sets.get(kind, {}).get(cpu)


def read_cpu_facts(tree: Tree, allowed: CpuSet | None, node_of: Mapping[int, int]) -> CpuFacts:
    """Read all CPUs.

    `allowed` is our cpuset (None: no limit). `node_of` gives a CPU's NUMA node.

    Errors: raises HardwareError when the tree has no CPU at all.
    """
    present = CpuSet.of(int(name[3:]) for name in tree.names(CPU_FOLDER) if re.fullmatch(r"cpu\d+", name))
    warnings: list[str] = []
    online = _read_online(tree, present, warnings)
    seen = CpuSet.of(cpu for cpu in present & online if tree.exists(f"{CPU_FOLDER}/cpu{cpu}/topology"))
    if not seen:
        return _from_cpuinfo(tree, allowed, node_of)
    if (without := (present & online) - seen) and without:
        warnings.append(f"{CPU_FOLDER}: CPUs {without} are online and have no topology; left out")
    sharing = _Sharing(nest=Nest(), sets={}, warnings=warnings, l3_bytes={})
    ids = _Identifiers(tree)
    for cpu in seen:
        try:
            _read_sharing(tree, cpu, seen, sharing, ids)
        except HardwareError as err:
            warnings.append(err.message)
    usable = seen if allowed is None else seen & allowed
    if not usable:
        warnings.append(f"our cpuset ({allowed or 'empty'}) has none of the online CPUs {seen}; taken as no limit")
        usable = seen
    sockets = _number(sharing.sets.get("package", {}), ids.package, warnings)
    try:
        kinds = _read_kinds(tree) or _kinds_by_capacity(tree, seen)
    except HardwareError as err:
        warnings.append(f"{err.message}; kinds of cores taken as unknown")
        kinds = {}
    cpus = tuple(_make_cpu(cpu, cpu in seen, usable, sharing, sockets, ids, node_of, kinds) for cpu in present)
    # Named as `Cpu.l3` names them: by the lowest usable CPU.
    sizes = {(shared & usable or shared).lowest: size for shared, size in sharing.l3_bytes.items()}
    caches = tuple(L3Cache(cpu=cpu, size_bytes=sizes[cpu]) for cpu in sorted(sizes))
    return CpuFacts(cpus=cpus, usable=usable, seen=seen, present=present, l3_caches=caches, warnings=tuple(warnings))


class _Identifiers:
    """The kernel's own numbers, read once each."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._read: dict[tuple[str, int], int | None] = {}
        self.has_compute_units: bool | None = None if _is_compute_unit_processor(tree) else False

    def get(self, name: str, cpu: int) -> int | None:
        key = (name, cpu)
        if key not in self._read:
            value = self._tree.read_int(f"{CPU_FOLDER}/cpu{cpu}/topology/{name}")
            # -1 means unknown. Some kernels print it unsigned.
            self._read[key] = None if value is None or value < 0 or value >= 0xFFFFFFFF else value
        return self._read[key]

    def package(self, cpu: int) -> int | None:
        return self.get("physical_package_id", cpu)


def _read_online(tree: Tree, present: CpuSet, warnings: list[str]) -> CpuSet:
    try:
        online = read_ids(tree, f"{CPU_FOLDER}/online", CpuSet)
    except HardwareError as err:
        warnings.append(err.message)
        online = None
    if online is not None:
        return online
    # A CPU without the file cannot go offline.
    return CpuSet.of(cpu for cpu in present if tree.read(f"{CPU_FOLDER}/cpu{cpu}/online") != "0")


def _read_sharing(tree: Tree, cpu: int, seen: CpuSet, sharing: _Sharing, ids: _Identifiers) -> None:
    """Add the sets that begin with this CPU.

    Each set is read once, from its lowest CPU, and the larger ones only from the smaller.
    """
    folder = f"{CPU_FOLDER}/cpu{cpu}/topology"
    core = _first_of(tree, folder, seen, ("core_cpus", "core_cpus_list"), ("thread_siblings", "thread_siblings_list"))
    is_first = core is None or not core or core.lowest == cpu
    if core:
        if len(core) > 1 and ids.has_compute_units is None:
            sibling = next(other for other in core if other != cpu)
            ids.has_compute_units = ids.get("core_id", sibling) != ids.get("core_id", cpu)
        if ids.has_compute_units:
            sharing.add("core", CpuSet(cpu), cpu)
        elif is_first:
            sharing.add("core", core, cpu)
    between: dict[str, CpuSet] = {}
    for kind in ("cluster", "die"):
        cpus = _first_of(tree, folder, seen, (f"{kind}_cpus", f"{kind}_cpus_list")) if is_first else None
        if cpus is not None and len(cpus) > 1:
            between[kind], is_first = cpus, cpus.lowest == cpu
    if is_first:
        package = _first_of(
            tree, folder, seen, ("package_cpus", "package_cpus_list"), ("core_siblings", "core_siblings_list")
        )
        if package and package.lowest == cpu:
            sharing.add("package", package, cpu)
    for kind, cpus in between.items():
        if cpus.lowest == cpu:
            sharing.add(kind, cpus, cpu)
    _read_caches(tree, cpu, seen, core, sharing)


def _read_caches(tree: Tree, cpu: int, seen: CpuSet, core: CpuSet | None, sharing: _Sharing) -> None:
    for index in range(_MAX_CACHES):
        folder = f"{CPU_FOLDER}/cpu{cpu}/cache/index{index}"
        shared = read_cpus(tree, folder, "shared_cpu_map", "shared_cpu_list")
        if shared is None:
            # Folders may be missing in the middle of a recording, and are at the end of a list.
            if index > 4:
                return
            continue
        if not shared and core is not None:
            # ia64 leaves the set empty where it means "this core".
            shared = core
        shared &= seen
        if not shared or shared.lowest != cpu:
            continue
        level = tree.read_int(f"{folder}/level")
        if level is not None:
            is_code = (tree.read(f"{folder}/type") or "").startswith("Instruction")
            sharing.add(f"L{level}{'i' if is_code else ''}", shared, cpu)
            is_l3 = level == 3 and sharing.of("L3", cpu) == shared
            size = _SIZE.fullmatch(tree.read(f"{folder}/size") or "") if is_l3 else None
            if size is not None:
                sharing.l3_bytes[shared] = int(size[1]) << _SHIFTS[size[2]]


def _first_of(tree: Tree, folder: str, seen: CpuSet, *names: tuple[str, str]) -> CpuSet | None:
    for mask, listed in names:
        cpu_set = read_cpus(tree, folder, mask, listed)
        if cpu_set is not None:
            return cpu_set & seen
    return None


def _number(sets: Mapping[int, CpuSet], number_of: Callable[[int], int | None], warnings: list[str]) -> dict[int, int]:
    """Number packages: by the kernel's ids where they are known and differ, else by order."""
    firsts = {cpus.bits: cpus.lowest for cpus in sets.values()}
    wanted = {bits: number for bits, first in firsts.items() if (number := number_of(first)) is not None}
    if len(set(wanted.values())) < len(firsts):
        if len(firsts) > 1:
            warnings.append(
                f"{CPU_FOLDER}: sockets have no ids of their own (physical_package_id); numbered in the order "
                "of their CPUs"
            )
        wanted = {bits: order for order, bits in enumerate(sorted(firsts, key=lambda bits: firsts[bits]))}
    return {cpu: wanted[cpus.bits] for cpu, cpus in sets.items()}


def _make_cpu(
    cpu: int,
    is_seen: bool,
    usable: CpuSet,
    sharing: _Sharing,
    sockets: Mapping[int, int],
    ids: _Identifiers,
    node_of: Mapping[int, int],
    kinds: Mapping[int, str],
) -> Cpu:
    if not is_seen:
        return Cpu(id=cpu, online=False)

    def lowest(kind: str) -> int | None:
        shared = sharing.of(kind, cpu)
        # The lowest usable CPU names the group, as kubelet names cores; a
        # group without one keeps its lowest.
        return None if shared is None else (shared & usable or shared).lowest

    return Cpu(
        id=cpu,
        online=cpu in usable,
        core=lowest("core"),
        socket=sockets.get(cpu),
        die=ids.get("die_id", cpu),
        numa_node=node_of.get(cpu),
        l3=lowest("L3"),
        kind=kinds.get(cpu, ""),
        is_allowed=cpu in usable,
    )


def _read_kinds(tree: Tree) -> dict[int, str]:
    kinds: dict[int, str] = {}
    for name, kind in _HYBRID.items():
        for cpu in read_ids(tree, f"sys/devices/{name}/cpus", CpuSet) or ():
            kinds[cpu] = kind
    return kinds


def _kinds_by_capacity(tree: Tree, seen: CpuSet) -> dict[int, str]:
    """Derive the kinds of CPUs from their greatest capacity, which the kernel publishes where CPUs
    differ (arm64 and RISC-V: `cpu_capacity`, the best has 1024).

    The widest step between two capacities separates efficiency from performance: a core that only
    clocks a little higher than others is of their kind.
    Source: Documentation/scheduler/sched-capacity.rst.
    """
    capacities: dict[int, int] = {}
    for cpu in seen:
        text = tree.read(f"{CPU_FOLDER}/cpu{cpu}/cpu_capacity") or ""
        if not text.isdecimal() or not int(text):
            # One file is missing: this kernel does not publish it, or the CPU is being removed.
            # Nothing is guessed from a part.
            return {}
        capacities[cpu] = int(text)
    levels = sorted(set(capacities.values()))
    steps = [(high / low, high) for low, high in pairwise(levels)]
    widest, least = max(steps, key=lambda step: step[0], default=(1.0, 0))
    if widest < _KIND_STEP:
        return {}
    return {cpu: "performance" if capacity >= least else "efficiency" for cpu, capacity in capacities.items()}


def _from_cpuinfo(tree: Tree, allowed: CpuSet | None, node_of: Mapping[int, int]) -> CpuFacts:
    """Read the CPUs of /proc/cpuinfo. Kernels without topology files publish no more than that (x86
    adds socket and core ids).
    """
    blocks = list(_cpuinfo_blocks(tree))
    if not blocks:
        raise HardwareError(
            f"no CPU found: {CPU_FOLDER} has no CPU with a topology folder, and proc/cpuinfo under "
            f"{tree.root} lists none",
            next_step="check hardware.root: it must be the folder that holds sys and proc of a Linux machine",
            path=CPU_FOLDER,
        )
    present = CpuSet.of(int(block["processor"]) for block in blocks)
    usable = present if allowed is None or not present & allowed else present & allowed
    cores: dict[tuple[str, str], int] = {}
    cpus: list[Cpu] = []
    for block in sorted(blocks, key=lambda block: int(block["processor"])):
        cpu = int(block["processor"])
        socket, core = block.get("physical id", ""), block.get("core id", "")
        is_known = socket.isdecimal() and core.isdecimal()
        cpus.append(
            Cpu(
                id=cpu,
                online=cpu in usable,
                core=cores.setdefault((socket, core), cpu) if is_known else None,
                socket=int(socket) if socket.isdecimal() else None,
                numa_node=node_of.get(cpu),
                is_allowed=cpu in usable,
            )
        )
    warning = f"{CPU_FOLDER} has no topology; CPUs taken from proc/cpuinfo, caches unknown"
    return CpuFacts(cpus=tuple(cpus), usable=usable, seen=present, present=present, warnings=(warning,))


def _cpuinfo_blocks(tree: Tree) -> Iterable[dict[str, str]]:
    block: dict[str, str] = {}
    for line in [*(tree.read("proc/cpuinfo") or "").splitlines(), ""]:
        key, colon, value = line.partition(":")
        if not line.strip():
            if block.get("processor", "").isdecimal():
                yield block
            block = {}
        elif colon:
            block[key.strip()] = value.strip()


def _is_compute_unit_processor(tree: Tree) -> bool:
    block = next(iter(_cpuinfo_blocks(tree)), {})
    return block.get("vendor_id") == "AuthenticAMD" and block.get("cpu family") in _COMPUTE_UNIT_FAMILIES
