"""Judges CPUs by what the kernel counts: throttling because of heat, and uncorrected memory errors of a socket's memory controllers (EDAC).

Flows in: CPUs by their numbers. Flows out: observations by CPU. Both counts only grow; the first look takes the stand as it finds it. Machine checks of a CPU by itself have
no count in sysfs: what they count of memory is EDAC's.
Source: arch/x86/kernel/cpu/mce/therm_throt.c (thermal_throttle/core_throttle_count); Documentation/admin-guide/RAS/main.rst (edac/mc/mc*/ue_count, mc_name).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from topobus.devicekit.counter_rises import CounterRises
from topobus.domain.health import Dimension, HealthState, Observation, RecoveryAction
from topobus.sysfs.tree import Tree

__all__ = ["memory_errors", "throttling"]

_CPU = "sys/devices/system/cpu"
_CONTROLLERS = "sys/devices/system/edac/mc"
# Intel's drivers name a controller `Skylake Socket#0 IMC#1`; others tell no socket.
_SOCKET = re.compile(r"Socket#(\d+)")


def throttling(tree: Tree, cpu: int, counters: CounterRises) -> Observation | None:
    """See whether the core of a CPU lowered its clock because of heat since the last look.

    Errors: raises HardwareError for a file that is no number.
    """
    path = f"{_CPU}/cpu{cpu}/thermal_throttle/core_throttle_count"
    count = tree.read_int(path)
    rise = counters.rise(path, count)
    if not rise:
        return None
    return Observation(
        dimension=Dimension.THERMAL,
        state=HealthState.DEGRADED,
        reason="throttled",
        message=f"its core was throttled {rise} time(s) because of heat",
        evidence={"path": path, "value": str(count)},
        action=RecoveryAction.WAIT,
    )


def memory_errors(tree: Tree, counters: CounterRises) -> Mapping[int, Observation]:
    """See which sockets have new uncorrected memory errors; controllers that tell no socket are left out, for their CPUs are not known.

    Errors: raises HardwareError for a file that is no number.
    """
    seen: dict[int, Observation] = {}
    for name in tree.names(_CONTROLLERS):
        if not name.removeprefix("mc").isdecimal():
            continue
        path = f"{_CONTROLLERS}/{name}/ue_count"
        count = tree.read_int(path)
        rise = counters.rise(path, count)
        socket = _SOCKET.search(tree.read(f"{_CONTROLLERS}/{name}/mc_name") or "") if rise else None
        if socket is not None:
            seen[int(socket.group(1))] = Observation(
                dimension=Dimension.MEMORY,
                state=HealthState.DEGRADED,
                reason="memory-errors",
                message=f"{rise} new uncorrected error(s) in the memory of its socket (controller {name})",
                evidence={"path": path, "value": str(count)},
                action=RecoveryAction.REPLACE,
            )
    return seen
