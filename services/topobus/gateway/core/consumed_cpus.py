"""Reads how many CPUs of a group a claim was given: the consumed capacity in its allocation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.domain.alignment.planning.node_view import CPU_CLASS
from topobus.domain.cpu_groups import GROUP_CAPACITY
from topobus.domain.device import driver_name
from topobus.domain.idset import CpuSet
from topobus.domain.quantity import Quantity

__all__ = ["add_cpus", "cpu_count"]


def add_cpus(group_cpus: dict[str, int], group: str, result: Mapping[str, Any]) -> bool:
    """Count the CPUs that a result has of a group; False when it does not say so in whole CPUs."""
    count = cpu_count(result)
    group_cpus[group] = group_cpus.get(group, 0) + (count or 0)
    return count is not None


def cpu_count(result: Mapping[str, Any]) -> int | None:
    """Read how many CPUs of a group a result of an allocation has; None when it does not say so in whole CPUs.

    >>> cpu_count({"consumedCapacity": {"cpus": "4"}}), cpu_count({"consumedCapacity": {"cpus": "500m"}}), cpu_count({})
    (4, None, None)
    """
    consumed = result.get("consumedCapacity")
    amounts = consumed if isinstance(consumed, Mapping) else {}
    text = amounts.get(GROUP_CAPACITY, amounts.get(f"{driver_name(CPU_CLASS)}/{GROUP_CAPACITY}"))
    try:
        amount = Quantity.parse(text) if isinstance(text, str) else None
    except ValueError:
        return None
    whole, rest = divmod(amount.nano, 10**9) if amount is not None else (0, 1)
    return whole if not rest and 0 < whole <= CpuSet.MAX_ID else None
