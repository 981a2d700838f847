"""Decides whether a claim tolerates a taint. Pure.

Flows in: a toleration as a claim's request or its allocation has it, a taint as a slice has it.
Flows out: whether the toleration covers the taint.
Source: KEP-5055; k8s.io/dynamic-resource-allocation/resourceclaim, ToleratesTaint, 1.36.
"""

from __future__ import annotations

from topobus.formats.kubernetes.resource import Taint, Toleration

__all__ = ["tolerates"]


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Say whether a toleration bears a taint; for how long is not asked here.

    >>> tolerates(Toleration(key="a", operator="Exists"), Taint(key="a", value="b", effect="NoExecute"))
    True
    """
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    match toleration.operator:
        case "" | "Equal":
            return toleration.value == taint.value
        case "Exists":
            return True
        case _:
            return False
