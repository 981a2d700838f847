"""Writes the topology values that an alignment matched into the allocation, from where they reach
the node's prepare call.

Each allocation that was aligned gets one configuration of kind AlignmentResult: the NUMA nodes, PCIe
roots and PCIe switches of the devices of all claims that were aligned together. A device service
that prepares one of them (to pin memory or choose CPUs) reads there where the
other devices are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from topobus.engine.alignment.planning.node_view import cpu_of_name
from topobus.engine.shapes.shape_parts import Parts, without_shapes
from topobus.formats.kubernetes.alignment_request import PARAMETERS_VERSION, RESULT_KIND, AlignmentRequest
from topobus.formats.kubernetes.limit_rules import MAX_GRANTED_CONFIGURATIONS
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    GrantedConfiguration,
    OpaqueConfiguration,
)
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, is_of_node
from topobus.values.idset import NodeSet
from topobus.values.view import NodeView

__all__ = ["with_matches"]


def with_matches(
    view: NodeView,
    results: Sequence[AllocationResult],
    groups: Sequence[frozenset[int]],
    wishes: Sequence[AlignmentRequest | None],
    parts: Parts,
) -> tuple[AllocationResult, ...]:
    """Write into each aligned allocation where the devices are that it was aligned with.

    The others stay as they are. A shape is where its parts are.

    Shapes: groups — positions of claims that a pod wants together; wishes — one per claim, its own;
            parts — of the shapes that the allocations may have.
    """
    made = list(results)
    for index, result in enumerate(results):
        mates = frozenset().union(*(group for group in groups if index in group)) or frozenset(
            {index} if wishes[index] is not None else ()
        )
        is_prepared_here = any(
            is_of_node(granted_device.driver, granted_device.pool, view.node)
            for granted_device in result.devices.results
        )
        if not mates or not is_prepared_here or len(result.devices.config) >= MAX_GRANTED_CONFIGURATIONS:
            continue
        parameters = _match(view, [without_shapes(results[mate], parts) for mate in sorted(mates)])
        configuration = GrantedConfiguration(
            source="FromClaim", opaque=OpaqueConfiguration(driver=DRIVER, parameters=parameters)
        )
        made[index] = structs.replace(
            result, devices=structs.replace(result.devices, config=(*result.devices.config, configuration))
        )
    return tuple(made)


def _match(view: NodeView, results: Sequence[AllocationResult]) -> dict[str, Any]:
    """Collect the places of the devices. Places that are unknown are left out."""
    devices = {(name, device.name): device for name, found_devices in view.devices.items() for device in found_devices}
    homes = {cpu: core.numa_node for core in view.cores for cpu in core.cpus}
    nodes, roots, switches = NodeSet(), set(), set()
    for granted in (granted_device for result in results for granted_device in result.devices.results):
        device_class = class_of_device(granted.driver, granted.device)
        cpu = cpu_of_name(granted.device) if device_class == CPU_CLASS else None
        home = homes.get(cpu) if cpu is not None else None
        found_device = (
            devices.get((device_class or "", granted.device))
            if is_of_node(granted.driver, granted.pool, view.node)
            else None
        )
        if home is not None:
            nodes |= NodeSet(home)
        if found_device is not None:
            nodes |= found_device.numa_nodes or NodeSet()
            roots |= {found_device.pcie_root} - {""}
            switches |= {str(found_device.pcie_switch)} if found_device.pcie_switch is not None else set()
    parameters: dict[str, Any] = {"apiVersion": PARAMETERS_VERSION, "kind": RESULT_KIND, "numaNodes": str(nodes)}
    return parameters | {
        key: sorted(places) for key, places in (("pcieRoots", roots), ("pcieSwitches", switches)) if places
    }
