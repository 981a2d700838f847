"""Checks of kubelet's recorded answers: merged hints, hints of devices, of CPUs and of memory.

Each check takes a recorded case and returns kubelet's answer and ours, both in the shape of the
file. Equal means passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.engine.alignment.cpus.cpu_assignment import assign_cpus
from topobus.engine.alignment.cpus.cpu_hints import cpu_hints
from topobus.engine.alignment.cpus.cpu_topology import CpuPlace, CpuTopology
from topobus.engine.alignment.devices.device_choice import split_by_affinity
from topobus.engine.alignment.devices.device_hints import device_hints
from topobus.engine.alignment.memory.memory_allocation import MemoryAmount, MemoryNode, memory_hints
from topobus.engine.alignment.merge.dispatch import merge_hints
from topobus.values.device import Device
from topobus.values.hint import Hint
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.request import Policy
from topobus.values.view import CpuOptions

__all__ = ["check_cpus", "check_device_hints", "check_memory", "check_merge"]


def check_merge(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `topology-merge`: the merged hint and the admission."""
    lists: list[list[Hint] | None] = []
    for provider in case["providers"]:
        if not provider:
            # A nil map and an empty map are both "don't care".
            lists.append(None)
            continue
        lists += [None if hints is None else [_hint(each_hint) for each_hint in hints] for hints in provider.values()]
    nodes = NodeSet.of(case["nodes"])
    merged = merge_hints(
        lists,
        nodes,
        Policy(case["policy"]),
        distances=[case["distances"][str(node)] for node in nodes],
        prefer_closest=case["preferClosest"],
    )
    hint = merged.hint
    got = {
        "nodes": None if hint.nodes is None else list(hint.nodes),
        "preferred": hint.preferred,
        "admit": merged.is_admitted,
    }
    return case["expect"], got


def check_device_hints(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `device-hints`: the hints and the three buckets.

    A nil list reads as an empty one in these files.
    """
    devices = [
        Device(
            name=device["id"],
            device_class="device",
            numa_nodes=None if device["numa"] is None else NodeSet.of(device["numa"]),
        )
        for device in case["devices"]
    ]
    hints = device_hints(
        devices, case["available"], case["request"], NodeSet.of(case["nodes"]), reusable=case["reusable"]
    )
    free = [device for device in devices if device.name in set(case["available"])]
    split = split_by_affinity(free, None if case["affinity"] is None else NodeSet.of(case["affinity"]))
    expected = {key: case["expect"][key] or [] for key in ("hints", "aligned", "unaligned", "noAffinity")}
    got = {
        "hints": [_plain(hint) for hint in hints or ()],
        "aligned": list(split.aligned),
        "unaligned": list(split.unaligned),
        "noAffinity": list(split.no_affinity),
    }
    return {key: value if key == "hints" else sorted(value) for key, value in expected.items()}, got


def check_cpus(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `cpu-static-policy`: the hints, and the very CPUs taken. None where kubelet fails, as
    its error text is not compared.
    """
    topology = CpuTopology(
        CpuPlace(cpu["cpu"], cpu["core"], cpu["socket"], cpu["numa"], cpu["l3"]) for cpu in case["cpus"]
    )
    options = CpuOptions(**{name.replace("-", "_"): True for name, value in case["options"].items() if value == "true"})
    available, reusable = CpuSet.parse(case["available"]), CpuSet.parse(case["reusable"])
    hints = cpu_hints(
        topology.cpus_by_node(),
        available,
        case["request"],
        reusable=reusable,
        sockets=topology.sockets_by_node() if options.align_by_socket else None,
    )
    affinity = None if case["affinity"] is None else NodeSet.of(case["affinity"])
    assigned = assign_cpus(topology, available | reusable, case["request"], affinity, options)
    expected = {"hints": case["expect"]["hints"] or [], "assigned": case["expect"]["assigned"]}
    return expected, {
        "hints": [_plain(hint) for hint in hints or ()],
        "assigned": None if assigned is None else str(assigned),
    }


def check_memory(case: dict[str, Any]) -> tuple[Any, Any]:
    """Kind `memory-hints`: resource to hints, empty when nothing survives."""
    nodes = [
        MemoryNode(
            id=node["id"],
            assignments=node["assignments"],
            group=NodeSet.of(node["cells"]),
            amounts={
                name: MemoryAmount(allocatable=amount["allocatable"], free=amount["free"])
                for name, amount in node["memory"].items()
            },
        )
        for node in case["nodes"]
    ]
    hints = memory_hints(nodes, case["request"])
    return case["expect"]["hints"], {
        resource: [_plain(hint) for hint in found_hints] for resource, found_hints in hints.items()
    }


def _hint(raw: Mapping[str, Any]) -> Hint:
    return Hint(None if raw["nodes"] is None else NodeSet.of(raw["nodes"]), raw["preferred"])


def _plain(hint: Hint) -> dict[str, Any]:
    return {"nodes": None if hint.nodes is None else list(hint.nodes), "preferred": hint.preferred}
