"""Hints by kubelet's rules: on which NUMA nodes could so many CPUs, or so many devices of one class, be had?

Flows in: what exists, what is free, what may be reused, how much is wanted. Flows out: the rule (a `Family`) that the merge works on, or the list that
kubelet would make, in kubelet's order (by width, then by node ids). None is "no opinion"; an empty family or tuple is "cannot be satisfied". Preferred
are the masks as narrow as the *whole* capacity allows, busy and sick units included, as in kubelet: on a busy node nothing may be preferred.
Source: kubelet 1.36 cm/cpumanager/policy_static.go and cm/devicemanager/topology_hints.go.

Families are exact on any machine. Lists are complete up to 16 candidate nodes (65,535 hints) and cut beyond; see `families.feasible_masks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from topobus.domain.alignment.families import Family, Unit, list_hints
from topobus.domain.device import Device
from topobus.domain.hint import Hint
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.view import KubeletVersion

__all__ = ["cpu_family", "cpu_hints", "device_family", "device_hints"]

_NO_CPUS = CpuSet()


def cpu_family(
    cpus_by_node: Mapping[int, CpuSet],
    available: CpuSet,
    request: int,
    *,
    reusable: CpuSet = _NO_CPUS,
    sockets: Mapping[int, frozenset[int]] | None = None,
) -> Family | None:
    """Give the hints for `request` exclusive CPUs as a rule.

    Shapes:  cpus_by_node — all online CPUs by NUMA node, reserved and busy ones included; nodes without CPUs are no candidates;
             sockets — by NUMA node, with option align-by-socket only.
    Result:  None when no CPU is asked for.
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
        # A reusable CPU outside every node (it went offline) is in no mask, so kubelet drops them all.
        musts.append(0)
    by_socket: dict[int, int] = {}
    for node, found in (sockets or {}).items():
        for socket in found:
            by_socket[socket] = by_socket.get(socket, 0) | 1 << node
    return Family(
        units=tuple(units),
        request=request,
        candidates=candidates,
        musts=tuple(musts),
        sockets=tuple(by_socket[socket] for socket in sorted(by_socket)),
    )


def device_family(
    devices: Sequence[Device],
    available: Collection[str],
    count: int,
    nodes: NodeSet,
    *,
    reusable: Collection[str] = (),
    kubelet: KubeletVersion = KubeletVersion.V1_36,
) -> Family | None:
    """Give the hints for `count` devices of one class as a rule.

    Shapes:  devices — all of the class, sick and busy ones too; available — names that are free and healthy; nodes — the machine's NUMA nodes.
    Result:  None when no device tells a NUMA node, or none is asked for.
    Source:  from 1.36 on only nodes that host a device of the class are candidates (k/k PR 138244), all nodes when none of those is known;
             before, all nodes. The preferred flags are the same, the masks of a best-effort answer are not.
    """
    if count <= 0 or not any(one.numa_nodes for one in devices):
        return None
    amounts: dict[int, list[int]] = {}
    hosting = 0
    musts: set[int] = set()
    for device in devices:
        if device.numa_nodes is None:
            continue
        where = device.numa_nodes.bits
        if device.name in reusable:
            # A reusable device that tells an empty node set touches no mask, so it blocks all of them; one that tells nothing (None) blocks none.
            musts.add(where)
        if not where:
            continue
        hosting |= where
        amount = amounts.setdefault(where, [0, 0])
        amount[0] += 1
        amount[1] += device.name in available or device.name in reusable
    return Family(
        units=tuple(Unit(where, total, free) for where, (total, free) in sorted(amounts.items())),
        request=count,
        candidates=nodes.bits if kubelet is KubeletVersion.V1_35 else hosting & nodes.bits or nodes.bits,
        musts=tuple(sorted(musts)),
    )


def cpu_hints(
    cpus_by_node: Mapping[int, CpuSet],
    available: CpuSet,
    request: int,
    *,
    reusable: CpuSet = _NO_CPUS,
    sockets: Mapping[int, frozenset[int]] | None = None,
) -> tuple[Hint, ...] | None:
    """Give the hints for `request` exclusive CPUs as kubelet lists them; see `cpu_family`.

    >>> cpu_hints({0: CpuSet(0, 1), 1: CpuSet(2, 3)}, CpuSet(1, 2, 3), 2)
    (Hint(nodes=NodeSet(1), preferred=True), Hint(nodes=NodeSet(0, 1), preferred=False))
    """
    family = cpu_family(cpus_by_node, available, request, reusable=reusable, sockets=sockets)
    return None if family is None else list_hints(family)


def device_hints(
    devices: Sequence[Device],
    available: Collection[str],
    count: int,
    nodes: NodeSet,
    *,
    reusable: Collection[str] = (),
    kubelet: KubeletVersion = KubeletVersion.V1_36,
) -> tuple[Hint, ...] | None:
    """Give the hints for `count` devices of one class as kubelet lists them; see `device_family`."""
    family = device_family(devices, available, count, nodes, reusable=reusable, kubelet=kubelet)
    return None if family is None else list_hints(family)
