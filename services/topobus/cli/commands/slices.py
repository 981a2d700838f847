"""`topobus slices`: prints the ResourceSlices that a node will publish before the node exists, for an
autoscaler that has to know what a new node brings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
import yaml
from cyclopts import Parameter

from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import MachineSource, one_of_classes
from topobus.cli.render.output import Output
from topobus.cli.rules.own_shapes import OwnShapes, read_own_shapes
from topobus.cli.rules.slice_templates import template_device
from topobus.cli.simulation.cpus_offered import CpusOffered, ReservedCpus, read_cpus, read_reserved_cpus
from topobus.cli.simulation.node import open_machine
from topobus.engine.shapes import in_slices
from topobus.engine.shapes.cpu_places import for_claims
from topobus.engine.shapes.in_slices import SliceShapes, slice_shapes
from topobus.engine.shapes.shapes import shapes_of
from topobus.formats.kubernetes.pool_slices import name_prefix, own_part, pool_slices, publishable
from topobus.formats.kubernetes.resource import API_VERSION, SliceDevice, SliceSpec
from topobus.formats.kubernetes.slices import shared_counters, slice_device, slice_order
from topobus.values.device import Inventory
from topobus.values.dra_names import CPU_CLASS, node_of_pool, pool_of_class
from topobus.values.idset import CpuSet
from topobus.values.names import is_dns_subdomain

__all__ = ["slices"]


def slices(
    *,
    machine: MachineSource,
    device_class: Annotated[
        tuple[str, ...],
        Parameter(
            name="--class",
            help="Only this class: those that the gateway's `exposure` offers by DRA. The node's pool is printed "
            "with devices of these classes alone.",
        ),
    ] = (),
    with_shapes: Annotated[
        bool, Parameter(name="--shapes", help="With the shapes of a gateway whose `cluster.shapes` is on.")
    ] = False,
    own_shapes: OwnShapes = "",
    cpus: CpusOffered = "",
    reserved_cpus: ReservedCpus = "",
    node: Annotated[str | None, Parameter(help="The node's name; default: the machine's.")] = None,
    template: Annotated[
        bool,
        Parameter(
            help="Print a DynamicResourceTemplate, as Karpenter proposes it, without what differs from card to card."
        ),
    ] = False,
    output: Annotated[Literal["yaml", "json"], Parameter(name=("--output", "-o"), help="How to print.")] = "yaml",
) -> int:
    """Print the ResourceSlices that a node of a recorded machine will publish, without any server."""
    out = Output(is_json=output == "json")
    if node is not None and not is_dns_subdomain(node):
        raise UsageError(f"--node is {node!r}", next_step="give a name that a Node may have: a-z, 0-9, - and .")
    added, reserved = read_own_shapes(own_shapes), read_reserved_cpus(reserved_cpus)
    if added and not with_shapes:
        raise UsageError("--own-shapes is given without --shapes", next_step="give --shapes as well")
    with open_machine(machine, read_cpus(cpus)) as opened:
        inventories = opened.snapshot.inventories
        for warning in opened.warnings:
            out.note(f"warning: {warning}")
        name = node or opened.snapshot.machine.node
    for word in device_class:
        one_of_classes(word, [inventory.device_class for inventory in inventories])
    specs: list[tuple[str, SliceSpec]] = []
    chosen = [inventory for inventory in inventories if not device_class or inventory.device_class in device_class]
    shapes = SliceShapes()
    if with_shapes:
        # CPUs that are not offered still tell the sockets.
        only_near = [
            for_claims(each, CpuSet(), reserved)
            for each in inventories
            if each.device_class == CPU_CLASS and each not in chosen
        ]
        of_node = shapes_of([*(for_claims(each, None, reserved) for each in chosen), *only_near], added)
        for why in of_node.remarks:
            out.note(f"no shape: {why}")
        shapes = slice_shapes(of_node)
    for pool, of_pool in groupby(
        sorted(chosen, key=lambda inventory: (pool_of_class(name, inventory.device_class), inventory.device_class)),
        lambda inventory: pool_of_class(name, inventory.device_class),
    ):
        cpus_of_node = [each for each in chosen if each.device_class == CPU_CLASS] if pool == name else []
        published, left_out = _published_slices(pool, tuple(of_pool), shapes, cpus_of_node)
        specs += [(name_prefix(index, spec).removesuffix("-"), spec) for index, spec in published.items()]
        for device, why in left_out.items():
            out.note(f"warning: {device} is left out: {why}")
    document = _template(name, [spec for _, spec in specs]) if template else _list(specs)
    if out.is_json:
        out.document(document)
    else:
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1 << 20))
    return ExitCode.OK


def _published_slices(
    pool: str, inventories: Sequence[Inventory], shapes: SliceShapes, cpus: Sequence[Inventory]
) -> tuple[dict[int, SliceSpec], dict[str, str]]:
    """Cut a pool into slices as the gateway does on a node that has just started.

    Shapes: inventories — by class; cpus — that of the CPUs, for the pool with the shapes; result — the
            slices by index, and name to why of each device that is left out.
    A taint has no time: that is when the node's own services see the fault.
    """
    left_out: dict[str, str] = {}
    kept: list[Inventory] = []
    for inventory in inventories:
        own, strange = own_part(inventory)
        kept.append(own)
        left_out |= strange
    ordered = [device for own in kept for device in slice_order(own.devices)]
    devices, refused = publishable(map(_timeless, map(slice_device, ordered)))
    counter_sets = shared_counters(counted for own in kept for counted in own.counter_sets)
    if pool == node_of_pool(pool):
        with_state = [_timeless(slice_device(cpu)) for of_cpus in cpus for cpu in of_cpus.devices]
        devices, counter_sets = in_slices.with_shapes(shapes, devices, counter_sets, cpus=with_state)
    else:
        devices = in_slices.without_groups(devices, shapes.groups)
    return pool_slices(pool, devices, counter_sets), left_out | refused


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
    """Name the pools for the driver in place of the node, whose name is not known yet."""
    templates: list[dict[str, Any]] = []
    for spec in specs:
        if spec.devices or spec.shared_counters:
            plain = msgspec.to_builtins(spec)
            content = (
                {"sharedCounters": plain["sharedCounters"]}
                if spec.shared_counters
                else {"devices": [template_device(device) for device in spec.devices]}
            )
            pool = spec.driver + spec.pool.name.removeprefix(name)
            templates.append({"driver": spec.driver, "poolName": pool, **content})
    return {
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "DynamicResourceTemplate",
        "metadata": {"name": name},
        "spec": {"resourceSliceTemplates": templates},
    }
