"""Chooses which CPUs classic claims get: those that kubelet's static policy would take out of all
that could serve each claim.

It starts from a choice that fits, and refuses where the policy forbids it (full-pcpus-only).
`topobus.engine.allocation.cpu_policy` does the same for structured claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from topobus.controller.classic.rules.device_choice import Wanted, fitting_devices
from topobus.engine.alignment.cpus.cpu_topology import CpuTopology
from topobus.engine.alignment.cpus.exclusive_choice import choose_exclusive_cpus
from topobus.engine.alignment.planning.node_view import cpu_name, cpu_of_name
from topobus.engine.allocation.cpu_policy import is_policy_cpu
from topobus.engine.allocation.pools import Candidate
from topobus.engine.allocation.values import DeviceId, Node
from topobus.values.idset import CpuSet
from topobus.values.outcome import Refusal

__all__ = ["with_policy_cpus"]

Names = tuple[tuple[str, ...], ...]


def with_policy_cpus(
    node: Node, wanted: Sequence[Wanted], devices: Sequence[Candidate], taken: Mapping[DeviceId, str], chosen: Names
) -> Names | Refusal:
    """Replace chosen CPUs by those of the node's policy. Other devices stay.

    Shapes: chosen — names for each of `wanted`, as `choose` gives them for these devices.
    Order: claims in order. A claim may take a CPU that was chosen for a later one. Where the later
    one then gets none, each claim is limited to CPUs that no other claim got.
    Errors: raises nothing; Refusal code smt-alignment.
    """
    if node.cpus is None or not devices or not all(is_policy_cpu(device, node.name) for device in devices):
        return chosen
    topology = CpuTopology.of_cores(node.cpus.cores)
    usable = [
        _cpus(devices[index].id.device for index in fitting_devices(node.name, claim, devices, taken)[0])
        for claim in wanted
    ]
    for may_move_others in (True, False):
        left = [_cpus(names) for names in chosen]
        for place, claim in enumerate(wanted):
            others = [
                cpus for index, cpus in enumerate(left) if index < place or (index > place and not may_move_others)
            ]
            free = usable[place]
            for cpus in others:
                free -= cpus
            assigned = choose_exclusive_cpus(
                topology, free, claim.count, node.cpus.options, reserved=node.cpus.reserved
            )
            if isinstance(assigned, Refusal):
                if assigned.reasons[0].code == "smt-alignment":
                    return assigned
                break
            left[place] = assigned
        else:
            return tuple(tuple(sorted(map(cpu_name, cpus))) for cpus in left)
    return chosen


def _cpus(names: Iterable[str]) -> CpuSet:
    return CpuSet.of(cpu for name in names if (cpu := cpu_of_name(name)) is not None)
