"""Take CPUs exactly as kubelet's static policy takes them.

`compatible` is kubelet 1.36.2 bit for bit, its defect with retained node combinations included.
`corrected` differs in the cases named at `CpuOptions.is_corrected`.
Source: kubelet 1.36 cm/cpumanager/{policy_static,cpu_assignment}.go;
docs/knowledge/kubelet-cpu-assignment.md#packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.engine.alignment.cpus.numa_distribution import find_spread
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.view import CpuOptions

__all__ = ["CpuOptions", "assign_cpus", "contradiction", "take_cpus"]


_PLAIN = CpuOptions()


def contradiction(options: CpuOptions) -> str:
    """Name two options that kubelet refuses together. Empty when there are none.

    Source: kubelet 1.36 cm/cpumanager/policy_options.go, ValidateStaticPolicyOptions.

    >>> contradiction(CpuOptions(full_pcpus_only=True, distribute_cpus_across_cores=True))
    'full-pcpus-only and distribute-cpus-across-cores'
    """
    pairs = (
        ("full_pcpus_only", "distribute_cpus_across_cores"),
        ("distribute_cpus_across_numa", "distribute_cpus_across_cores"),
        ("prefer_align_cpus_by_uncorecache", "distribute_cpus_across_cores"),
        ("prefer_align_cpus_by_uncorecache", "distribute_cpus_across_numa"),
    )
    clashes = (
        f"{first} and {second}" for first, second in pairs if getattr(options, first) and getattr(options, second)
    )
    return next(clashes, "").replace("_", "-")


def assign_cpus(
    topology: CpuTopology, usable: CpuSet, count: int, nodes: NodeSet | None, options: CpuOptions = _PLAIN
) -> CpuSet | None:
    """Take `count` of the usable CPUs, those inside the alignment first, the rest from anywhere.

    Shapes: usable — free CPUs and reusable ones; nodes — the merged affinity, None for no opinion.
    Result: exactly `count` CPUs, or None when there are too few.
    Order: deterministic: equal units go by id.
    Cost: O(CPUs x levels). With distribute-cpus-across-numa at most 200,000 combinations of NUMA
            nodes.
    """
    inside: CpuSet | None = CpuSet()
    if nodes is not None:
        near = topology.cpus_of_sockets_of(nodes) if options.align_by_socket else topology.cpus_of_nodes(nodes)
        aligned = CpuSet.from_bits(near & usable.bits)
        inside = take_cpus(topology, aligned, min(count, len(aligned)), options, floor=len(nodes))
    rest = take_cpus(topology, usable - inside, count - len(inside), options) if inside is not None else None
    return inside | rest if inside is not None and rest is not None else None


def take_cpus(
    topology: CpuTopology, free: CpuSet, count: int, options: CpuOptions = _PLAIN, *, floor: int = 0
) -> CpuSet | None:
    """Take `count` of the free CPUs, whole units first. None when there are too few.

    >>> from topobus.engine.alignment.cpus.cpu_topology import CpuPlace
    >>> machine = CpuTopology([CpuPlace(cpu, cpu % 4, 0, 0, 0) for cpu in range(8)])
    >>> take_cpus(machine, CpuSet(0, 1, 2, 5, 6, 7), 2)
    CpuSet(1, 5)
    """
    group = topology.threads_per_core if options.full_pcpus_only else 1
    if not options.distribute_cpus_across_numa or count % group or not topology.by_numa:
        return _packed(topology, free, count, options)
    if count > len(free):
        return None
    if count <= 0:
        return CpuSet()
    order = _Taking(topology, free, count, options).sorted_numa_nodes()
    amounts = {node: (topology.by_numa[node] & free.bits).bit_count() for node in order}
    spread = find_spread(
        amounts,
        count,
        group,
        total_nodes=len(topology.by_numa),
        total_cpus=topology.count,
        floor=floor if options.is_corrected or options.has_affinity_floor else 0,
        is_corrected=options.is_corrected,
    )
    plain = CpuOptions(
        distribute_cpus_across_cores=options.distribute_cpus_across_cores, is_corrected=options.is_corrected
    )
    if spread is None:
        return _packed(topology, free, count, plain)
    taken = CpuSet()
    for node, share in spread:
        left = CpuSet.from_bits(topology.by_numa[node] & free.bits) - taken
        taken |= _pack(topology, left, min(share, len(left)), plain)
    return taken if len(taken) == count else None


def _packed(topology: CpuTopology, free: CpuSet, count: int, options: CpuOptions) -> CpuSet | None:
    return _pack(topology, free, count, options) if count <= len(free) else None


def _pack(topology: CpuTopology, free: CpuSet, count: int, options: CpuOptions) -> CpuSet:
    """Take `count` of the free CPUs, of which there are at least as many."""
    taking = _Taking(topology, free, count, options)
    taking.run()
    return CpuSet.from_bits(taking.taken)


class _Taking:
    """One packed assignment in progress: the CPUs that are still free, those taken, and how many
    are still wanted. kubelet's cpuAccumulator.
    """

    __slots__ = ("free", "options", "taken", "topology", "wanted")

    def __init__(self, topology: CpuTopology, free: CpuSet, count: int, options: CpuOptions) -> None:
        self.topology = topology
        self.free = free.bits & topology.all_bits
        self.wanted = count
        self.taken = 0
        self.options = options

    def run(self) -> None:
        """Take whole NUMA nodes and sockets, whole L3 groups, whole cores, then single CPUs."""
        steps = (
            [self._take_numa_nodes, self._take_sockets]
            if self._numa_is_above()
            else [self._take_sockets, self._take_numa_nodes]
        )
        if self.options.prefer_align_cpus_by_uncorecache:
            steps.append(self._take_l3_groups)
        if not self.options.distribute_cpus_across_cores:
            steps.append(self._take_cores)
        for step in steps:
            step()
            if self.wanted <= 0:
                return
        self._take_single_cpus()

    def sorted_numa_nodes(self) -> list[int]:
        """NUMA nodes with free CPUs, the fullest first.

        Inside their sockets when sockets are the wider level.
        """
        by_numa, by_socket = self.topology.by_numa, self.topology.by_socket
        if self._numa_is_above():
            return self._sorted(by_numa, self.free)
        return [
            node
            for socket in self._sorted_sockets()
            for node in self._sorted(by_numa, self.free & by_socket[socket], count_in=self.free)
        ]

    def _numa_is_above(self) -> bool:
        return len(self.topology.by_socket) >= len(self.topology.by_numa)

    def _sorted(self, units: Mapping[int, int], within: int, *, count_in: int | None = None) -> list[int]:
        """Ids of units with CPUs in `within`, fewest free CPUs first, then by id."""
        free = self.free if count_in is None else count_in
        return sorted(
            (key for key, bits in units.items() if bits & within),
            key=lambda key: ((units[key] & free).bit_count(), key),
        )

    def _sorted_sockets(self) -> list[int]:
        by_numa, by_socket = self.topology.by_numa, self.topology.by_socket
        if not self._numa_is_above():
            return self._sorted(by_socket, self.free)
        sockets = [
            socket
            for node in self.sorted_numa_nodes()
            for socket in self._sorted(by_socket, self.free & by_numa[node], count_in=self.free)
        ]
        # CPUs whose NUMA node is unknown are in none of the nodes above. kubelet has no such CPU.
        return [*sockets, *(socket for socket in self._sorted(by_socket, self.free) if socket not in set(sockets))]

    def _sorted_cores(self) -> Iterator[int]:
        by_core = self.topology.by_core
        seen: set[int] = set()
        if self._numa_is_above():
            groups = [self.topology.by_socket[socket] for socket in self._sorted_sockets()]
        else:
            groups = [self.topology.by_numa[numa_node] for numa_node in self.sorted_numa_nodes()]
        for group in (*groups, self.topology.all_bits):
            for core in self._sorted(by_core, self.free & group):
                if core not in seen:
                    seen.add(core)
                    yield core

    def _take(self, bits: int) -> None:
        self.taken |= bits
        self.free &= ~bits
        self.wanted -= bits.bit_count()

    def _take_whole(self, ids: list[int], units: Mapping[int, int], average: int | None) -> None:
        """Take each wholly free unit that is not bigger than the number still wanted."""
        for identifier in ids:
            bits = units[identifier]
            size = bits.bit_count()
            is_free = (bits & self.free).bit_count() == (
                size if average is None or self.options.is_corrected else average
            )
            # Where a sibling is offline, kubelet's average lets a half busy core pass for free and
            # hands out its busy half. Never here.
            if is_free and self.wanted >= size and not bits & ~self.free:
                self._take(bits)

    def _take_numa_nodes(self) -> None:
        self._take_whole(self.sorted_numa_nodes(), self.topology.by_numa, None)

    def _take_sockets(self) -> None:
        self._take_whole(self._sorted_sockets(), self.topology.by_socket, self.topology.cpus_per_socket)

    def _take_cores(self) -> None:
        self._take_whole(list(self._sorted_cores()), self.topology.by_core, self.topology.threads_per_core)

    def _sorted_l3(self) -> list[int]:
        by_l3, by_numa = self.topology.by_l3, self.topology.by_numa
        return [
            group
            for node in self.sorted_numa_nodes()
            for group in self._sorted(by_l3, self.free & by_numa[node], count_in=self.free)
        ]

    def _take_l3_groups(self) -> None:
        for group in self._sorted_l3():
            if self.wanted >= self.topology.cpus_per_l3:
                self._take_whole(self._sorted_l3(), self.topology.by_l3, None)
            if self.wanted <= 0:
                return
            self._take_part_of_l3(group)
            if self.wanted <= 0:
                return

    def _take_part_of_l3(self, group: int) -> None:
        """Take what is still wanted from one L3 group, if kubelet's core arithmetic makes it fit
        exactly.
        """
        threads = self.topology.threads_per_core
        by_core = self.topology.by_core
        cores = [core for core in sorted(by_core) if by_core[core] & self.free & self.topology.by_l3[group]]
        if self.options.is_corrected:
            within = self.free & self.topology.by_l3[group]
            if within.bit_count() >= self.wanted:
                self._take(
                    _pack(self.topology, CpuSet.from_bits(within), self.wanted, CpuOptions(is_corrected=True)).bits
                )
            return
        bits = 0
        for core in cores[: -(-self.wanted // threads)]:
            bits |= by_core[core] & self.free
        if self.wanted % 2 and threads > 1 and bits.bit_count() > self.wanted:
            bits ^= 1 << (bits.bit_length() - 1)
        if bits.bit_count() == self.wanted:
            self._take(bits)

    def _take_single_cpus(self) -> None:
        if self.options.distribute_cpus_across_cores:
            groups = [self.topology.by_socket[socket] & self.free for socket in self._sorted_sockets()]
        else:
            groups = [self.topology.by_core[core] & self.free for core in self._sorted_cores()]
        single_cpus = [cpu for group in groups for cpu in CpuSet.from_bits(group)]
        self._take(CpuSet.of(single_cpus[: self.wanted]).bits)
