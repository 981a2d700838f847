"""`topobus slices`: prints the ResourceSlices that a node will publish before the node exists, for an
autoscaler that has to know what a new node brings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import yaml
from cyclopts import Parameter

from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import MachineSource, one_of_classes
from topobus.cli.render.output import Output
from topobus.cli.simulation.node import open_machine
from topobus.formats.kubernetes.pool_slices import name_prefix, pool_slices, publishable
from topobus.formats.kubernetes.resource import API_VERSION, SliceDevice, SliceSpec
from topobus.formats.kubernetes.slices import HEALTH_REASON, shared_counters, slice_device, slice_order
from topobus.values.device import Inventory, driver_name
from topobus.values.names import is_dns_subdomain

__all__ = ["slices"]

_OF_ONE_MACHINE = frozenset({"uuid", "mac", HEALTH_REASON})
"""Attributes that another machine of the same type does not have."""
_TEMPLATE_FIELDS = ("name", "attributes", "capacity", "consumesCounters", "allowMultipleAllocations")


def slices(
    *,
    machine: MachineSource,
    device_class: Annotated[
        tuple[str, ...],
        Parameter(name="--class", help="Only this class: those that the gateway's `exposure` offers by DRA."),
    ] = (),
    node: Annotated[str | None, Parameter(help="The node's name; default: the machine's.")] = None,
    template: Annotated[
        bool,
        Parameter(
            negative="",
            help="Print a DynamicResourceTemplate, as Karpenter proposes it, without what differs from card to card.",
        ),
    ] = False,
    output: Annotated[Literal["yaml", "json"], Parameter(name=("--output", "-o"), help="How to print.")] = "yaml",
) -> int:
    """Print the ResourceSlices that a node of a recorded machine will publish, without any server."""
    out = Output(is_json=output == "json")
    if node is not None and not is_dns_subdomain(node):
        raise UsageError(f"--node is {node!r}", next_step="give a name that a Node may have: a-z, 0-9, - and .")
    with open_machine(machine) as opened:
        inventories = opened.snapshot.inventories
        for warning in opened.warnings:
            out.note(f"warning: {warning}")
        name = node or opened.snapshot.machine.node
    for word in device_class:
        one_of_classes(word, [inventory.device_class for inventory in inventories])
    specs: list[tuple[str, SliceSpec]] = []
    for inventory in sorted(inventories, key=lambda inventory: inventory.device_class):
        if not device_class or inventory.device_class in device_class:
            of_class, left_out = _published_slices(inventory, name)
            specs += [(name_prefix(index, spec).removesuffix("-"), spec) for index, spec in of_class.items()]
            for device, why in left_out.items():
                out.note(f"warning: {device} is left out: {why}")
    document = _template(name, [spec for _, spec in specs]) if template else _list(specs)
    if out.is_json:
        out.document(document)
    else:
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1 << 20))
    return ExitCode.OK


def _published_slices(inventory: Inventory, node: str) -> tuple[dict[int, SliceSpec], dict[str, str]]:
    """Cut an inventory into slices as the gateway does on a node that has just started.

    Shapes: result — the slices by index, and name to why of each device that a server would refuse.
    A taint has no time: that is when the node's own services see the fault.
    """
    devices, left_out = publishable(map(_timeless, map(slice_device, slice_order(inventory.devices))))
    counter_sets = shared_counters(inventory.counter_sets)
    return pool_slices(driver_name(inventory.device_class), node, devices, counter_sets), left_out


def _timeless(device: SliceDevice) -> SliceDevice:
    taints = tuple(msgspec.structs.replace(taint, time_added=None) for taint in device.taints)
    return msgspec.structs.replace(device, taints=taints)


def _list(specs: Iterable[tuple[str, SliceSpec]]) -> dict[str, Any]:
    items = [
        {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": name},
            "spec": msgspec.to_builtins(spec),
        }
        for name, spec in specs
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _template(name: str, specs: Iterable[SliceSpec]) -> dict[str, Any]:
    """Name a pool for its driver: node names are not known yet."""
    templates: list[dict[str, Any]] = []
    for spec in specs:
        if spec.devices or spec.shared_counters:
            plain = msgspec.to_builtins(spec)
            content = (
                {"sharedCounters": plain["sharedCounters"]}
                if spec.shared_counters
                else {"devices": [_template_device(device) for device in spec.devices]}
            )
            templates.append({"driver": spec.driver, "poolName": spec.driver, **content})
    return {
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "DynamicResourceTemplate",
        "metadata": {"name": name},
        "spec": {"resourceSliceTemplates": templates},
    }


def _template_device(device: SliceDevice) -> dict[str, Any]:
    kept = {name: value for name, value in device.attributes.items() if name not in _OF_ONE_MACHINE}
    plain = msgspec.to_builtins(msgspec.structs.replace(device, attributes=kept))
    return {field: plain[field] for field in _TEMPLATE_FIELDS if field in plain}
