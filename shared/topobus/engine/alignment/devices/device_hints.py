"""Hints for devices by kubelet's rules: on which NUMA nodes could so many devices of one class be
had?

The result is a rule (a `HintRule`) that the merge works on, or the list that kubelet would make, in
kubelet's order (by width, then by node ids). None is "no opinion". An empty rule or tuple is
"cannot be satisfied". Preferred are the masks as narrow as the *whole* capacity allows, busy and
unhealthy devices included, as in kubelet: on a busy node nothing may be preferred.
Source: kubelet 1.36 cm/devicemanager/topology_hints.go.

Rules are exact on any machine. Lists are complete up to 16 candidate nodes (65,535 hints) and cut
beyond (`hint_rule.list_hints`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from topobus.engine.alignment.merge.hint_rule import HintRule, Unit, list_hints
from topobus.values.device import Device
from topobus.values.hint import Hint
from topobus.values.idset import NodeSet
from topobus.values.view import KubeletVersion

__all__ = ["device_hints", "device_rule"]


def device_rule(
    devices: Sequence[Device],
    available: Collection[str],
    count: int,
    nodes: NodeSet,
    *,
    reusable: Collection[str] = (),
    kubelet: KubeletVersion = KubeletVersion.V1_36,
) -> HintRule | None:
    """Return the hints for `count` devices of one class as a rule.

    Shapes: devices — all of the class, also unhealthy and busy ones; available — names that are
            free and healthy; nodes — the machine's NUMA nodes.
    Result: None when no device has a NUMA node, or no device is asked for.
    Source: from 1.36 on only nodes that host a device of the class are candidates (k/k PR 138244),
            all nodes when none of those is known. Before 1.36, all nodes are. The preferred flags
            are the same, the masks of a best-effort answer are not.
    """
    if count <= 0 or not any(device.numa_nodes for device in devices):
        return None
    amounts: dict[int, list[int]] = {}
    hosting = 0
    musts: set[int] = set()
    for device in devices:
        if device.numa_nodes is None:
            continue
        where = device.numa_nodes.bits
        if device.name in reusable:
            # A reusable device with an empty node set touches no mask, so it blocks all of them.
            # One without a node set (None) blocks none.
            musts.add(where)
        if not where:
            continue
        hosting |= where
        amount = amounts.setdefault(where, [0, 0])
        amount[0] += 1
        amount[1] += device.name in available or device.name in reusable
    return HintRule(
        units=tuple(Unit(where, total, free) for where, (total, free) in sorted(amounts.items())),
        request=count,
        candidates=nodes.bits if kubelet is KubeletVersion.V1_35 else hosting & nodes.bits or nodes.bits,
        musts=tuple(sorted(musts)),
    )


def device_hints(
    devices: Sequence[Device],
    available: Collection[str],
    count: int,
    nodes: NodeSet,
    *,
    reusable: Collection[str] = (),
    kubelet: KubeletVersion = KubeletVersion.V1_36,
) -> tuple[Hint, ...] | None:
    """Return the hints for `count` devices of one class as kubelet lists them.

    Shapes: as `device_rule`, whose rule this lists; result — None where the class has no opinion.
    Order: by width, then by ids. Cost: up to 2 ^ NUMA nodes hints. On a machine with very many
            nodes the list is cut (`list_hints`).
    """
    rule = device_rule(devices, available, count, nodes, reusable=reusable, kubelet=kubelet)
    return None if rule is None else list_hints(rule)
