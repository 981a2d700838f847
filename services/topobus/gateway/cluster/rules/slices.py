"""Plans the writes that make the API server show this node's devices: two pools, cut into slices,
written only where something differs.

The plan is deletes, updates and creates, in that order. The pool's generation follows Kubernetes'
helper library: it stays while a single update is enough, else all slices get the next one, so that
a scheduler never mixes two states of a pool.
Source: k8s.io/dynamic-resource-allocation resourceslice controller (syncPool), 1.37.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from topobus.engine.health.silence import SERVICE_SILENT
from topobus.formats.kubernetes.pool_slices import COUNTERS_INDEX, name_prefix, newest_of_pool, pool_slices
from topobus.formats.kubernetes.resource import (
    API_VERSION,
    CounterSet,
    SliceDevice,
    SliceSpec,
    Taint,
)
from topobus.formats.kubernetes.shape import read_as
from topobus.formats.kubernetes.slices import (
    HEALTH_TAINT,
    in_seconds,
    slice_device,
    slice_order,
)
from topobus.formats.messages.messages import ApiObject
from topobus.gateway.cluster.rules.pod_shares import amounts_of_pods, beside_pods
from topobus.gateway.device_plugins.rules.replicas import ShareHolders
from topobus.values.device import Inventory
from topobus.values.dra_names import CPU_CLASS, DRIVER, class_of_device, node_of_pool, pool_of_class
from topobus.values.errors import ContractError
from topobus.values.health import HealthState
from topobus.values.partitions import Partitions
from topobus.values.request import Owner, OwnerKind

__all__ = [
    "LIST_FIELDS",
    "OCCUPIED_TAINT",
    "Deletion",
    "SlicePlan",
    "SlicePool",
    "deletion_of",
    "dropped_fields",
    "has_gated_fields",
    "has_lists",
    "kept_devices",
    "pool_devices",
    "pool_of_slice",
    "read_slice",
    "shows_class",
    "shows_silence",
    "silence_taint",
    "slice_plan",
    "without_fields",
]

OCCUPIED_TAINT = "topobus.dev/occupied"
"""On a device that a pod holds other than by a claim: the scheduler must not allocate it again."""
LIST_FIELDS = tuple(f"spec.devices.*.attributes.*.{name}" for name in ("ints", "bools", "strings", "versions"))
"""Attributes with a list as value. A server that does not support them refuses the slice instead
of dropping the field."""

# Of a device, beside what it consumes.
_GATED = frozenset({"allowMultipleAllocations"})

# Generations are signed numbers of 64 bits.
# Where somebody else published one near their end there is none above it: it is not counted, only
# deleted. Ours grow by one a change, so that this is some 10^11 years of a change a second away.
_LARGEST_GENERATION = 2**62
_INDEX = re.compile(r"([0-9a-f]{3})-")


class Deletion(Struct, frozen=True, kw_only=True):
    """A slice to delete, if it is still exactly this one."""

    name: str
    uid: str
    resource_version: str


class SlicePlan(Struct, frozen=True, kw_only=True):
    """What has to be written, in this order."""

    generation: int
    deletes: tuple[Deletion, ...] = ()
    updates: tuple[ApiObject, ...] = ()
    """Complete objects with the resource version that they replace."""
    creates: tuple[ApiObject, ...] = ()
    foreign: tuple[str, ...] = ()
    """Names of those to delete that no gateway of ours made: another program published in this
    pool."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to write."""
        return not (self.deletes or self.updates or self.creates)


def pool_of_slice(resource_slice: ApiObject, node: str) -> str:
    """Return which pool of this node a slice of ours belongs to. Empty for any other slice.

    One that names no pool of the node is filed under the first, whose plan deletes it.
    """
    spec = resource_slice.spec
    if spec.get("driver") != DRIVER or spec.get("nodeName") != node:
        return ""
    pool, cpus = spec.get("pool"), pool_of_class(node, CPU_CLASS)
    return cpus if isinstance(pool, Mapping) and pool.get("name") == cpus else node


def kept_devices(
    device_class: str, specs: Iterable[SliceSpec]
) -> tuple[tuple[SliceDevice, ...], tuple[CounterSet, ...]]:
    """Return the devices of a class and their counters as slices show them."""
    devices, counter_sets = newest_of_pool(specs)
    return (
        tuple(
            # What it takes from the counters of shapes is added with the shapes.
            msgspec.structs.replace(
                device,
                consumes_counters=tuple(
                    each
                    for each in device.consumes_counters
                    if class_of_device(DRIVER, each.counter_set) == device_class
                ),
            )
            for device in devices
            if class_of_device(DRIVER, device.name) == device_class
        ),
        tuple(each for each in counter_sets if class_of_device(DRIVER, each.name) == device_class),
    )


def pool_devices(
    inventory: Inventory,
    holders: Mapping[str, Owner],
    silence: Taint | None = None,
    *,
    shown: Iterable[SliceDevice] | None = None,
    sharers: ShareHolders = MappingProxyType({}),
) -> tuple[SliceDevice, ...]:
    """Return the slice devices of an inventory.

    A device that a pod holds outside of DRA is tainted, and so are devices that do not fit beside
    it. While the device service is silent (`silence`), all devices are tainted. An unhealthy device
    keeps its own taint even when its service is silent, and so do one under maintenance and a
    spare. A device that an operator excludes is shown as long as it is held. What pods have of a
    shared device (`sharers`) is subtracted from its capacity, as long as a share is left.

    Shapes: shown — what `slice_device` returns for the inventory's devices, for a caller that has
    it already: it is the expensive part, and holders change far more often.
    """
    sick = (
        {device.name for device in inventory.devices if device.health.state is HealthState.UNHEALTHY}
        if silence is not None
        else set()
    )
    devices = []
    occupied = {name: holder for name, holder in holders.items() if holder.kind is not OwnerKind.CLAIM}
    # The scheduler counts what claims hold. What other owners hold uses the same counters, which
    # the scheduler does not know.
    blocked = Partitions(inventory.devices, inventory.counter_sets).blocked(occupied) if inventory.counter_sets else {}
    excluded = {
        device.name
        for device in inventory.devices
        if device.is_excluded and device.name not in holders and device.name not in sharers
    }
    for device in map(slice_device, slice_order(inventory.devices)) if shown is None else shown:
        if device.name in excluded:
            continue
        taints = device.taints
        if silence is not None and device.name not in sick:
            taints = (silence, *(taint for taint in taints if taint.key != HEALTH_TAINT))
        shortage = blocked.get(device.name)
        holder = occupied.get(device.name) or (
            occupied[shortage.devices[0]] if shortage is not None and shortage.devices else None
        )
        beside = (
            beside_pods(device, amounts_of_pods(sharers[device.name]))
            if holder is not None and device.name in sharers
            else None
        )
        device = beside or device
        if holder is not None and beside is None:
            taints = (*taints, Taint(key=OCCUPIED_TAINT, value=holder.kind.value, effect="NoSchedule"))
        devices.append(device if taints is device.taints else msgspec.structs.replace(device, taints=taints))
    return tuple(devices)


def shows_class(device_class: str, spec: SliceSpec) -> bool:
    """Return whether a slice has devices of a class, single CPUs among shapes included."""
    shown = (device.attributes.get("class") for device in spec.devices)
    return any(attribute is not None and attribute.string == device_class for attribute in shown)


def silence_taint(since: str, effect: str, present: Iterable[ApiObject]) -> Taint | None:
    """Return the taint of a silent service's devices. None without an effect.

    The time of a taint that is already there is kept, because a toleration with a limit must not
    begin again when the silence is noticed again.
    """
    if effect not in ("NoSchedule", "NoExecute"):
        return None
    kept = next((taint for taint in _taints_of(present) if _is_silence(taint) and taint.time_added), None)
    time_added = kept.time_added if kept is not None else in_seconds(since) or None
    return Taint(key=HEALTH_TAINT, value=SERVICE_SILENT, effect=effect, time_added=time_added)


def shows_silence(present: Iterable[ApiObject]) -> bool:
    """Return whether slices have the taint of a silent service."""
    return any(_is_silence(taint) for taint in _taints_of(present))


class SlicePool(Struct, frozen=True):
    """A pool of a node, whose Node object owns its slices."""

    name: str
    node_uid: str


def slice_plan(
    of: SlicePool,
    devices: Sequence[SliceDevice],
    present: Iterable[ApiObject],
    *,
    counter_sets: Sequence[CounterSet] = (),
    dropped: Iterable[str] = (),
    last_generation: int = 0,
    read: Callable[[ApiObject], SliceSpec | None] | None = None,
) -> SlicePlan:
    """Plan the writes after which a pool shows these devices.

    Shapes: present — our slices of the pool; counter_sets — what the devices
    consume from, in slices of their own, as the API requires it since 1.35; dropped — fields that
    the server does not keep, so their absence is no difference; last_generation — of what was
    written before, in case all of it was deleted; read — returns what `read_slice` returns,
    possibly from memory.
    Order: deletes, updates, creates, counters before devices, so that a server which does not keep
    counters is detected before the pool is complete. A pool without devices keeps one empty slice,
    which shows that there are none; without a slice this would be unknown.
    """
    fields = tuple(dropped)
    layout = pool_slices(of.name, devices, counter_sets)
    api_objects = sorted(present, key=lambda api_object: str(api_object.metadata.get("name", "")))
    specs = {str(api_object.metadata.get("name", "")): (read or read_slice)(api_object) for api_object in api_objects}
    # A slice's pool cannot be renamed. A slice of another pool can only be replaced, and its
    # generation does not count.
    specs = {name: spec if spec is not None and spec.pool.name == of.name else None for name, spec in specs.items()}
    generation = _newest_generation(filter(None, specs.values()), last_generation)
    matched, obsolete = _matched(api_objects, specs, layout, generation)
    owner = {"apiVersion": "v1", "kind": "Node", "name": node_of_pool(of.name), "uid": of.node_uid, "controller": True}

    def wanted(index: int, generation: int) -> SliceSpec:
        spec = layout[index]
        pool = msgspec.structs.replace(spec.pool, generation=generation)
        shown = _with_times(spec.devices, matched[index][1].devices) if index in matched else spec.devices
        return without_fields(msgspec.structs.replace(spec, pool=pool, devices=shown), fields)

    changed = {
        index
        for index, (api_object, spec) in matched.items()
        if spec != wanted(index, generation) or api_object.metadata.get("ownerReferences") != [owner]
    }
    missing = sorted(
        (index for index in layout if index not in matched), key=lambda index: (index < COUNTERS_INDEX, index)
    )
    is_bumped = bool(missing) or len(changed) > 1
    generation += is_bumped
    updates = [
        _updated(matched[index][0], wanted(index, generation), owner)
        for index in sorted(matched)
        if index in changed or is_bumped
    ]
    creates = [_created(index, wanted(index, generation), owner) for index in missing]
    return SlicePlan(
        generation=generation,
        deletes=tuple(map(deletion_of, obsolete)),
        updates=tuple(updates),
        creates=tuple(creates),
        foreign=_foreign(obsolete, specs),
    )


def _matched(
    api_objects: Iterable[ApiObject],
    specs: Mapping[str, SliceSpec | None],
    layout: Collection[int],
    generation: int,
) -> tuple[dict[int, tuple[ApiObject, SliceSpec]], list[ApiObject]]:
    """Sort the slices of a pool into those that are updated, by index, and those that are deleted."""
    matched: dict[int, tuple[ApiObject, SliceSpec]] = {}
    obsolete: list[ApiObject] = []
    for api_object in api_objects:
        spec = specs[str(api_object.metadata.get("name", ""))]
        index = _index_of(api_object)
        if spec is None or spec.pool.generation != generation or index not in layout or index in matched:
            obsolete.append(api_object)
        else:
            matched[index] = (api_object, spec)
    return matched, obsolete


def _foreign(obsolete: Sequence[ApiObject], specs: Mapping[str, SliceSpec | None]) -> tuple[str, ...]:
    """Name the slices that none of our gateways wrote, first those that cannot be read as ours."""
    names = [(str(api_object.metadata.get("name", "")), _index_of(api_object) < 0) for api_object in obsolete]
    strange = [name for name, has_no_index in names if has_no_index or specs[name] is None]
    return (*strange, *(name for name, _ in names if name not in strange and _is_beyond(specs[name])))


def _is_beyond(spec: SliceSpec | None) -> bool:
    return spec is not None and spec.pool.generation > _LARGEST_GENERATION


def read_slice(resource_slice: ApiObject) -> SliceSpec | None:
    """Read a slice's spec. None when it cannot be read."""
    try:
        return read_as(resource_slice.spec, SliceSpec, where="slice")
    except ContractError:
        # An unreadable slice is not what we want to have there, so it is replaced.
        return None


def dropped_fields(sent: ApiObject, stored: ApiObject) -> tuple[str, ...]:
    """Return the fields that were sent and not stored: an older server drops what it does not know
    without an error.

    >>> base = ApiObject(api_version="v1", kind="X", metadata={}, spec={"devices": [{"name": "a"}]})
    >>> dropped_fields(ApiObject(api_version="v1", kind="X", metadata={}, spec={"devices": [{"name": "a", "taints": [1]}]}), base)
    ('spec.devices.*.taints',)
    """  # noqa: E501
    return tuple(sorted(set(_missing(sent.spec, stored.spec, "spec"))))


def has_gated_fields(api_object: ApiObject) -> bool:
    """Return whether a slice has a field that a server stores only while a feature is on.

    Devices consume counters only where another slice of the pool has them.
    """
    return (
        "sharedCounters" in api_object.spec
        or has_lists(api_object)
        or any(not _GATED.isdisjoint(device) for device in api_object.spec.get("devices", ()))
    )


def has_lists(api_object: ApiObject) -> bool:
    """Return whether an attribute of a slice has a list as its value."""
    lists = {path.rpartition(".")[2] for path in LIST_FIELDS}
    return any(
        lists & value.keys()
        for device in api_object.spec.get("devices", ())
        for value in device.get("attributes", {}).values()
    )


def without_fields(spec: SliceSpec, fields: Iterable[str]) -> SliceSpec:
    """Remove fields, given as paths with `*` for every element.

    An attribute that loses its value is removed as a whole.
    """
    paths = tuple(fields)
    if not paths:
        return spec
    plain: dict[str, Any] = {"spec": msgspec.to_builtins(spec)}
    for path in paths:
        _remove(plain, path.split("."))
    for device in plain["spec"].get("devices", ()):
        if "attributes" in device:
            device["attributes"] = {key: value for key, value in device["attributes"].items() if value}
    return read_as(plain["spec"], SliceSpec, where="a slice of ours")


def _taints_of(present: Iterable[ApiObject]) -> Iterator[Taint]:
    for api_object in present:
        spec = read_slice(api_object)
        for device in spec.devices if spec is not None else ():
            yield from device.taints


def _is_silence(taint: Taint) -> bool:
    """Return whether a taint means a silent service."""
    return (taint.key, taint.value) == (HEALTH_TAINT, SERVICE_SILENT)


def _index_of(api_object: ApiObject) -> int:
    match = _INDEX.match(str(api_object.metadata.get("name", "")))
    return int(match[1], 16) if match else -1


def _with_times(devices: Sequence[SliceDevice], present: Sequence[SliceDevice]) -> tuple[SliceDevice, ...]:
    """Keep the time that the server gave to a taint for which we have none."""
    times = {
        (device.name, taint.key, taint.value, taint.effect): taint.time_added
        for device in present
        for taint in device.taints
    }
    return tuple(
        msgspec.structs.replace(
            device,
            taints=tuple(
                msgspec.structs.replace(
                    taint, time_added=taint.time_added or times.get((device.name, taint.key, taint.value, taint.effect))
                )
                for taint in device.taints
            ),
        )
        for device in devices
    )


def _created(index: int, spec: SliceSpec, owner: dict[str, Any]) -> ApiObject:
    metadata = {"generateName": name_prefix(index, spec), "ownerReferences": [owner]}
    return ApiObject(api_version=API_VERSION, kind="ResourceSlice", metadata=metadata, spec=msgspec.to_builtins(spec))


def _updated(api_object: ApiObject, spec: SliceSpec, owner: dict[str, Any]) -> ApiObject:
    metadata = {key: value for key, value in api_object.metadata.items() if key != "managedFields"}
    metadata["ownerReferences"] = [owner]
    return ApiObject(api_version=API_VERSION, kind="ResourceSlice", metadata=metadata, spec=msgspec.to_builtins(spec))


def deletion_of(api_object: ApiObject) -> Deletion:
    """Return the deletion of a slice."""
    return Deletion(
        name=str(api_object.metadata.get("name", "")),
        uid=str(api_object.metadata.get("uid", "")),
        resource_version=str(api_object.metadata.get("resourceVersion", "")),
    )


def _newest_generation(specs: Iterable[SliceSpec], last_generation: int) -> int:
    """Return the generation that the slices have, or the last one written where they have none."""
    shown = [spec.pool.generation for spec in specs if spec.pool.generation <= _LARGEST_GENERATION]
    return max(shown, default=last_generation if last_generation <= _LARGEST_GENERATION else 0)


def _missing(sent: Any, stored: Any, path: str) -> Iterable[str]:
    if isinstance(sent, dict) and isinstance(stored, dict):
        # Names of attributes and capacities are data, not fields.
        is_map = path.endswith((".attributes", ".capacity"))
        for key, value in sent.items():
            place = f"{path}.{'*' if is_map else key}"
            if value in (None, [], {}, ()):
                # An empty value is the same with or without its name.
                continue
            if key not in stored:
                yield place
            else:
                yield from _missing(value, stored[key], place)
    elif isinstance(sent, list | tuple) and isinstance(stored, list | tuple):
        for first, second in zip(sent, stored, strict=False):
            yield from _missing(first, second, f"{path}.*")


def _remove(value: Any, path: Sequence[str]) -> None:
    head, *rest = path
    if head == "*":
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            _remove(inner, rest)
    elif isinstance(value, dict) and head in value:
        if rest:
            _remove(value[head], rest)
        else:
            del value[head]
