"""Hints by kubelet's rules: on which NUMA nodes could so many CPUs, or so many devices of one class, be had?

Flows in: what exists, what is free, what may be reused, how much is wanted. Flows out: hints in kubelet's order (by width, then by node ids).
None is "no opinion"; an empty tuple is "cannot be satisfied". Preferred are the masks as narrow as the *whole* capacity allows, busy and sick
units included, as in kubelet: on a busy node nothing may be preferred.
Source: kubelet 1.36 cm/cpumanager/policy_static.go and cm/devicemanager/topology_hints.go.

Exact up to 16 candidate nodes. Beyond, 2^n hints would be listed; here the masks of up to the preferred width and the whole set are listed, and
`families` holds the rest implicitly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from topobus.domain.device import Device
from topobus.domain.hint import Hint
from topobus.domain.idset import CpuSet, NodeSet

__all__ = ["LIST_LIMIT", "cpu_hints", "device_hints"]

LIST_LIMIT = 16
"""Candidate nodes up to which every mask is listed (65,535 hints)."""

_NO_CPUS = CpuSet()
# Beyond LIST_LIMIT: so many masks are listed at most, the narrow ones first.
_MASK_BUDGET = 50_000


def cpu_hints(
    cpus_by_node: Mapping[int, CpuSet],
    available: CpuSet,
    request: int,
    *,
    reusable: CpuSet = _NO_CPUS,
    sockets: Mapping[int, frozenset[int]] | None = None,
) -> tuple[Hint, ...] | None:
    """Give hints for `request` exclusive CPUs.

    Shapes:  cpus_by_node — all online CPUs by NUMA node, reserved and busy ones included; nodes without CPUs are no candidates;
             sockets — by NUMA node, with option align-by-socket only: masks on as few sockets as the narrowest ones need are preferred, too.
    Result:  None when no CPU is asked for.

    >>> cpu_hints({0: CpuSet(0, 1), 1: CpuSet(2, 3)}, CpuSet(1, 2, 3), 2)
    (Hint(nodes=NodeSet(1), preferred=True), Hint(nodes=NodeSet(0, 1), preferred=False))
    """
    if request <= 0:
        return None
    groups = {1 << node: cpus for node, cpus in sorted(cpus_by_node.items()) if cpus}
    total = {mask: len(cpus) for mask, cpus in groups.items()}
    usable = available | reusable
    free = {mask: len(cpus & usable) for mask, cpus in groups.items()}
    musts = tuple(mask for mask, cpus in groups.items() if not cpus.isdisjoint(reusable))
    # A reusable CPU outside every node (it went offline) is in no mask, so kubelet drops them all.
    if not reusable <= CpuSet.from_bits(sum(cpus.bits for cpus in groups.values())):
        return ()
    hints = _enumerate(NodeSet.from_bits(sum(groups)), total, free, musts, request)
    return hints if sockets is None else _prefer_sockets(hints, sockets, _narrowest(total, request))


def device_hints(
    devices: Sequence[Device], available: Collection[str], count: int, nodes: NodeSet, *, reusable: Collection[str] = ()
) -> tuple[Hint, ...] | None:
    """Give hints for `count` devices of one class.

    Shapes:  devices — all of the class, sick and busy ones too; available — names that are free and healthy; nodes — the machine's NUMA nodes.
    Result:  None when no device tells a NUMA node, or none is asked for; empty when fewer are free than asked for.
    Source:  1.36: only nodes that host a device of the class are candidates (k/k PR 138244); all nodes when none of those is known.
    """
    if count <= 0 or not any(one.numa_nodes for one in devices):
        return None
    usable = set(available) | set(reusable)
    if len(usable) < count:
        return ()
    hosting = NodeSet.from_bits(0)
    total: dict[int, int] = {}
    free: dict[int, int] = {}
    for device in devices:
        if not device.numa_nodes:
            continue
        hosting |= device.numa_nodes
        mask = device.numa_nodes.bits
        total[mask] = total.get(mask, 0) + 1
        if device.name in usable:
            free[mask] = free.get(mask, 0) + 1
    # A reusable device that tells an empty node set touches no mask, so it blocks all of them; one that tells nothing (None) blocks none.
    musts = tuple({one.numa_nodes.bits for one in devices if one.numa_nodes is not None and one.name in reusable})
    return _enumerate(hosting & nodes or nodes, total, free, musts, count)


def _enumerate(
    candidates: NodeSet, total: Mapping[int, int], free: Mapping[int, int], musts: Collection[int], request: int
) -> tuple[Hint, ...]:
    """List the masks: feasible by what is free, preferred when as narrow as the total allows. Units on several nodes count once."""
    width = len(candidates)
    feasible: list[int] = []
    for mask in _masks(candidates, total, request):
        size = mask.bit_count()
        if size < width and _touching(total, mask) >= request:
            width = size
        if _touching(free, mask) >= request and all(must & mask for must in musts):
            feasible.append(mask)
    return tuple(Hint(NodeSet.from_bits(mask), mask.bit_count() == width) for mask in feasible)


def _prefer_sockets(hints: Sequence[Hint], sockets: Mapping[int, frozenset[int]], narrowest: int) -> tuple[Hint, ...]:
    """Prefer, too, every mask on exactly the sockets that the narrowest masks need on average."""
    count = len(frozenset().union(*sockets.values())) if sockets else 0
    nodes_a_socket = len(sockets) // count if count else 1
    # kubelet divides by it; more sockets than nodes makes it zero, and kubelet refuses the option there.
    wanted = -(-narrowest // max(nodes_a_socket, 1))
    return tuple(
        Hint(hint.nodes, hint.preferred or len(frozenset().union(*(sockets.get(node, frozenset()) for node in hint.nodes or ()))) == wanted)
        for hint in hints
    )


def _narrowest(total: Mapping[int, int], request: int) -> int:
    """How many nodes the request needs at least by capacity; all of them when it is beyond it."""
    amounts = sorted(total.values(), reverse=True)
    return next((size for size in range(1, len(amounts) + 1) if sum(amounts[:size]) >= request), len(amounts))


def _touching(units: Mapping[int, int], mask: int) -> int:
    return sum(amount for where, amount in units.items() if where & mask)


def _masks(candidates: NodeSet, total: Mapping[int, int], request: int) -> Iterator[int]:
    bits = [1 << one for one in candidates]
    budget = _MASK_BUDGET
    for size in range(1, len(bits) + 1):
        has_met = False
        for chosen in combinations(bits, size):
            mask = sum(chosen)
            yield mask
            if len(bits) > LIST_LIMIT:
                budget -= 1
                has_met = has_met or _touching(total, mask) >= request
                if budget <= 0:
                    break
        if len(bits) > LIST_LIMIT and (budget <= 0 or has_met) and size < len(bits):
            yield sum(bits)
            return
