"""Hints for exclusive CPUs by kubelet's rules: on which NUMA nodes could so many CPUs be had?

The result is a rule (a `HintRule`) that the merge works on, or the list that kubelet would make, in
kubelet's order (by width, then by node ids). None is "no opinion". An empty rule or tuple is
"cannot be satisfied". Preferred are the masks as narrow as the *whole* capacity allows, busy CPUs
included, as in kubelet: on a busy node nothing may be preferred.
Source: kubelet 1.36 cm/cpumanager/policy_static.go.

Rules are exact on any machine. Lists are complete up to 16 candidate nodes (65,535 hints) and cut
beyond (`hint_rule.list_hints`).
"""

from __future__ import annotations

from collections.abc import Mapping

from topobus.engine.alignment.merge.hint_rule import HintRule, Unit, list_hints
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet

__all__ = ["cpu_hints", "cpu_rule"]

_NO_CPUS = CpuSet()


def cpu_rule(
    cpus_by_node: Mapping[int, CpuSet],
    available: CpuSet,
    request: int,
    *,
    reusable: CpuSet = _NO_CPUS,
    sockets: Mapping[int, frozenset[int]] | None = None,
) -> HintRule | None:
    """Return the hints for `request` exclusive CPUs as a rule.

    Shapes: cpus_by_node — all online CPUs by NUMA node, reserved and busy ones included; nodes
            without CPUs are no candidates; sockets — by NUMA node, with option align-by-socket
            only.
    Result: None when no CPU is asked for.
    """
    if request <= 0:
        return None
    usable = (available | reusable).bits
    units: list[Unit] = []
    musts: list[int] = []
    everywhere, candidates = 0, 0
    for node, cpus in sorted(cpus_by_node.items()):
        if not cpus:
            continue
        where = 1 << node
        candidates |= where
        everywhere |= cpus.bits
        units.append(Unit(where, len(cpus), (cpus.bits & usable).bit_count()))
        if cpus.bits & reusable.bits:
            musts.append(where)
    if reusable.bits & ~everywhere:
        # A reusable CPU outside every node (it went offline) is in no
        # mask, so kubelet drops them all.
        musts.append(0)
    by_socket: dict[int, int] = {}
    for node, sockets_of_node in (sockets or {}).items():
        for socket in sockets_of_node:
            by_socket[socket] = by_socket.get(socket, 0) | 1 << node
    return HintRule(
        units=tuple(units),
        request=request,
        candidates=candidates,
        musts=tuple(musts),
        sockets=tuple(by_socket[socket] for socket in sorted(by_socket)),
    )


def cpu_hints(
    cpus_by_node: Mapping[int, CpuSet],
    available: CpuSet,
    request: int,
    *,
    reusable: CpuSet = _NO_CPUS,
    sockets: Mapping[int, frozenset[int]] | None = None,
) -> tuple[Hint, ...] | None:
    """Return the hints for `request` exclusive CPUs as kubelet lists them. The arguments are those
    of `cpu_rule`.

    >>> cpu_hints({0: CpuSet(0, 1), 1: CpuSet(2, 3)}, CpuSet(1, 2, 3), 2)
    (Hint(nodes=NodeSet(1), preferred=True), Hint(nodes=NodeSet(0, 1), preferred=False))
    """
    rule = cpu_rule(cpus_by_node, available, request, reusable=reusable, sockets=sockets)
    return None if rule is None else list_hints(rule)
