"""Decides whether a claim tolerates a taint. Pure.

Source: KEP-5055; k8s.io/dynamic-resource-allocation/resourceclaim, ToleratesTaint, 1.36.
"""

from __future__ import annotations

from topobus.formats.kubernetes.resource import Taint, Toleration

__all__ = ["tolerates"]


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Say whether a toleration covers a taint. Its duration is not considered.

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
