"""Devices in a ResourceSlice: attributes, capacities and taints, the same for a cluster's scheduler
and for the stand-alone controller.

The result keeps the limits of resource.k8s.io/v1. Attributes of the driver are in its domain. The
standard ones (`resource.kubernetes.io/...`) come from the device's fields. A value that is unknown
is absent, never 0. An unhealthy device is a tainted one.
Source: docs/knowledge/dynamic-resource-allocation.md#standard-attributes; KEP-5055 (taints).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from topobus.formats.kubernetes.limit_rules import MAX_COUNTER_SETS
from topobus.formats.kubernetes.limits import MAX_ATTRIBUTES, MAX_DEVICES, MAX_TEXT
from topobus.formats.kubernetes.resource import (
    Attribute,
    Capacity,
    Counter,
    CounterConsumption,
    RequestPolicy,
    SliceDevice,
    Taint,
    ValidRange,
)
from topobus.formats.kubernetes.resource import CounterSet as SharedCounters
from topobus.formats.kubernetes.slice_limits import check_device, is_version
from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.health import HealthState
from topobus.values.quantity import Quantity, QuantityForm
from topobus.values.timestamps import in_whole_seconds, moment_of

__all__ = [
    "COUNTER_SETS_PER_SLICE",
    "DEVICES_PER_SLICE",
    "HEALTH_REASON",
    "HEALTH_TAINT",
    "MAINTENANCE_TAINT",
    "SICK_TAINT",
    "SPARE_TAINT",
    "STANDARD_DOMAIN",
    "consumption",
    "fault_of_shares",
    "health_reason",
    "in_seconds",
    "shared_counters",
    "slice_device",
    "slice_order",
]

STANDARD_DOMAIN = "resource.kubernetes.io"
HEALTH_REASON = "healthReason"
"""Attribute of a device that may not be handed out for its health: the reason's code (`dirty`,
`xid`), which a taint has no room for."""
HEALTH_TAINT = "topobus.dev/health"
MAINTENANCE_TAINT = "topobus.dev/maintenance"
"""On a device that an operator withholds; its value is `maintain` or `exclude`."""
SICK_TAINT = Taint(key=HEALTH_TAINT, value=str(HealthState.UNHEALTHY), effect="NoExecute")
"""What a device has of which there is evidence that it is sick."""
SPARE_TAINT = Taint(key="topobus.dev/spare", value="true", effect="NoSchedule")
"""What a device has that its service withholds as a spare. A taint, because a device that came and
went would renumber its slices and end the shapes that it is a part of."""
# 128 devices fit into a slice, 64 when one has a taint or a list; sickness comes and
# goes, so slices are always cut for the worse case: a fault then changes one slice and
# not the cut of the whole pool.
DEVICES_PER_SLICE = MAX_DEVICES // 2
# A slice has devices or counters, never both.
COUNTER_SETS_PER_SLICE = MAX_COUNTER_SETS

# A device has 48 values in its attributes at most, lists counted by their elements; a processor
# of today has some twenty roots.
_ROOTS = 24

# What gives way where a device has more attributes than a slice has room for, the last of them
# first: facts that hardly anybody selects by, or that another attribute tells too (`model` is the
# product's name). Without this order a MIG instance, which has more than the limit, would lose its
# profile.
_DISPENSABLE = (
    *("productName", "pciID", "kernelDriver", "cudaDriverVersion", "brand", "migEnabled", "migCapable"),
    *("pcieMaxWidth", "pciSubsystemID", "gpuInstance", "computeInstance"),
)
# Versions whose names do not end in `Version`: NVIDIA's DRA driver publishes it as one.
_VERSIONS = ("gpu.nvidia.com/cudaComputeCapability",)

_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]+")
_INT64 = 1 << 63


def slice_device(device: Device) -> SliceDevice:
    """Convert a device to the device of a slice.

    Order: where a slice has no room for all attributes, the standard ones and our own are kept
            first, then those with a domain (a vendor's names) as the device lists them, then our
            dispensable ones. One place is kept free for the reason of a fault, so that a fault takes
            away no attribute that a claim may select by.

    >>> slice_device(Device(name="gpu-0", device_class="gpu", model="T4")).attributes["model"].string
    'T4'
    """
    attributes = _standard_attributes(device) | _own_attributes(device)
    room = max(MAX_ATTRIBUTES - len(device.capacity) - 1, 0)
    kept = sorted(attributes, key=_rank)[:room]
    return SliceDevice(
        name=device.name,
        attributes={name: attributes[name] for name in kept} | _health_attributes(device),
        capacity={
            _identifier(name): Capacity(
                value=_quantity(amount), request_policy=_policy(device.capacity_policies.get(name))
            )
            for name, amount in sorted(device.capacity.items())
            if amount >= 0
        },
        consumes_counters=consumption(device.consumes),
        taints=_taints(device),
        # False is the default, and a server without the field would seem to drop it.
        allow_multiple_allocations=True if device.allows_multiple else None,
    )


def health_reason(device: SliceDevice, taint: Taint) -> str:
    """Return the code of what is wrong with a device whose taint reports a fault.

    Empty where its slice does not give one.
    """
    reason = device.attributes.get(HEALTH_REASON) if taint.key == HEALTH_TAINT else None
    return reason.string or "" if reason is not None else ""


def shared_counters(counter_sets: Iterable[CounterSet]) -> tuple[SharedCounters, ...]:
    """Convert counter sets to those of a slice. Order: by name."""
    return tuple(
        SharedCounters(
            name=counter_set.name,
            counters={name: Counter(value=_quantity(total)) for name, total in sorted(counter_set.counters.items())},
        )
        for counter_set in sorted(counter_sets, key=lambda counter_set: counter_set.name)
    )


def consumption(uses: Iterable[CounterUse]) -> tuple[CounterConsumption, ...]:
    """Convert what a device takes from counters. Order: by set."""
    by_set: dict[str, dict[str, Counter]] = {}
    for use in uses:
        by_set.setdefault(use.counter_set, {})[use.counter] = Counter(value=_quantity(use.amount))
    return tuple(
        CounterConsumption(counter_set=name, counters=dict(sorted(counters.items())))
        for name, counters in sorted(by_set.items())
    )


def fault_of_shares(device: Device) -> str:
    """Explain why a device cannot be shared as its driver declares. Empty when it can, or need not.

    >>> fault_of_shares(Device(name="nic-0", device_class="nic", capacity={"slots": 4}, capacity_policies={"slots": CapacityPolicy(default=9)}))
    'capacity.slots.requestPolicy: wanted none without allowMultipleAllocations: true'
    """  # noqa: E501
    if not device.allows_multiple and not device.capacity_policies:
        return ""
    for name in sorted(device.capacity_policies):
        if device.capacity.get(name, -1) < 0:
            return f"capacity_policies.{name}: there is no such capacity"
    return "; ".join(str(problem) for problem in check_device(slice_device(device)))


def slice_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Order devices as slices list them: a scheduler takes the first that fit.

    CPUs are ordered by socket, NUMA node, core and number, so that the first of them are those that
    kubelet's static policy takes on a node where nothing is held. A device that is no single CPU
    comes first, in its own order.

    >>> [device.name for device in slice_order(Device(name=f"cpu-{cpu}", device_class="cpu", cpu=cpu, core=cpu % 2) for cpu in (0, 1, 2, 3))]
    ['cpu-0', 'cpu-2', 'cpu-1', 'cpu-3']
    """  # noqa: E501
    return tuple(sorted(devices, key=_place))


def in_seconds(moment: str) -> str:
    """Write a time as the API server does: UTC, whole seconds. Empty for a text that is no time.

    >>> in_seconds("2026-01-02T03:04:05.678+00:00")
    '2026-01-02T03:04:05Z'
    """
    read = moment_of(moment)
    return in_whole_seconds(read) if read is not None else ""


def _place(device: Device) -> tuple[int, ...]:
    if device.cpu is None:
        return (-1,)
    node = device.numa_nodes.lowest if device.numa_nodes else -1
    return (
        device.socket if device.socket is not None else -1,
        node,
        device.core if device.core is not None else device.cpu,
        device.cpu,
    )


def _standard_attributes(device: Device) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {}
    if device.pcie_root:
        attributes[f"{STANDARD_DOMAIN}/pcieRoot"] = Attribute(string=device.pcie_root)
    elif device.pcie_roots:
        # A list where there are several (KEP-5491). For a server without lists the publisher leaves
        # the attribute out.
        is_single = len(device.pcie_roots) == 1
        attributes[f"{STANDARD_DOMAIN}/pcieRoot"] = (
            Attribute(string=device.pcie_roots[0]) if is_single else Attribute(strings=device.pcie_roots[:_ROOTS])
        )
    if device.pci is not None:
        attributes[f"{STANDARD_DOMAIN}/pciBusID"] = Attribute(string=str(device.pci))
    if device.numa_nodes is not None and len(device.numa_nodes) == 1:
        attributes[f"{STANDARD_DOMAIN}/numaNode"] = Attribute(int_=device.numa_nodes.lowest)
    elif device.numa_nodes:
        attributes[f"{STANDARD_DOMAIN}/numaNode"] = Attribute(ints=device.numa_nodes.ids)
    return attributes


def _own_attributes(device: Device) -> dict[str, Attribute]:
    """Collect the fields that a selector may want, then the driver's own attributes.

    The driver's attribute wins over a field, but not over `class`, by which DeviceClasses select.
    """
    texts = {
        "class": device.device_class,
        "vendor": device.vendor,
        "model": device.model,
        "uuid": device.uuid,
        "parent": device.parent,
        "pcieSwitch": str(device.pcie_switch) if device.pcie_switch is not None else "",
        # Said of the exception alone: most devices are for what their class is for.
        "role": str(device.role) if device.role is not DeviceRole.COMPUTE else "",
    }
    numbers = {"cpu": device.cpu, "core": device.core, "socket": device.socket, "l3": device.l3}
    fields: dict[str, AttributeValue] = {name: text for name, text in texts.items() if text}
    fields |= {name: number for name, number in numbers.items() if number is not None}
    own = sorted(name for name in device.attributes if "/" not in name)
    qualified = [name for name in device.attributes if "/" in name]
    fields |= {_identifier(name): device.attributes[name] for name in (*own, *qualified)}
    fields["class"] = device.device_class
    return {
        name: _attribute(name, value)
        for name, value in fields.items()
        if not isinstance(value, int) or -_INT64 <= value < _INT64
    }


def _rank(name: str) -> int:
    """Rank an attribute: the lowest is kept first."""
    if "/" in name:
        return 0 if name.startswith(f"{STANDARD_DOMAIN}/") else 1
    return 2 + _DISPENSABLE.index(name) if name in _DISPENSABLE else 0


def _health_attributes(device: Device) -> dict[str, Attribute]:
    worst = device.health.worst if not device.health.is_allocatable else None
    return {HEALTH_REASON: _attribute(HEALTH_REASON, worst.reason)} if worst is not None and worst.reason else {}


def _attribute(name: str, value: AttributeValue) -> Attribute:
    """Type an attribute: a text under a name that ends in `Version`, or is known as one, is a
    version when it can be one, as DRA drivers publish it.
    """
    if isinstance(value, bool):
        return Attribute(bool_=value)
    if isinstance(value, int):
        return Attribute(int_=value)
    if (name.lower().endswith("version") or name in _VERSIONS) and is_version(value) and len(value) <= MAX_TEXT:
        return Attribute(version=value)
    # The limit is one of bytes; a character cut in two is left out.
    return Attribute(string=value.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore"))


def _identifier(name: str) -> str:
    """Make a legal name: a C identifier of at most 32 characters, after a domain where there is
    one.
    """
    domain, slash, last = name.rpartition("/")
    cleaned = _IDENTIFIER.sub("_", last)[:32]
    return domain + slash + (f"_{cleaned}"[:32] if not cleaned or cleaned[0].isdigit() else cleaned)


def _quantity(amount: int) -> str:
    # Parsing and writing it again gives the API server's own form: any other form would look like a
    # change at every comparison.
    return str(Quantity.parse(str(Quantity.of(amount, QuantityForm.BINARY))))


def _policy(policy: CapacityPolicy | None) -> RequestPolicy | None:
    if policy is None:
        return None
    bounds = {name: getattr(policy, name) for name in ("minimum", "maximum", "step")}
    amounts = {name: _quantity(amount) if amount is not None else None for name, amount in bounds.items()}
    return RequestPolicy(
        default=_quantity(policy.default) if policy.default is not None else None,
        valid_values=tuple(map(_quantity, policy.valid_values)),
        valid_range=ValidRange(min=amounts["minimum"], max=amounts["maximum"], step=amounts["step"])
        if any(amounts.values())
        else None,
    )


def _taints(device: Device) -> tuple[Taint, ...]:
    """Taint the devices that may not be allocated: evidence of a fault also evicts, mere silence
    does not.

    For maintenance, the operator decides which of the two applies.
    """
    spare = (SPARE_TAINT,) if device.is_spare else ()
    return (*_taints_of_health(device), *_taints_of_maintenance(device), *spare)


def _taints_of_maintenance(device: Device) -> tuple[Taint, ...]:
    maintenance = device.maintenance
    if maintenance is None:
        return ()
    effect = "NoExecute" if maintenance.is_draining else "NoSchedule"
    return (
        Taint(
            key=MAINTENANCE_TAINT,
            value=str(maintenance.verb),
            effect=effect,
            time_added=in_seconds(maintenance.since) or None,
        ),
    )


def _taints_of_health(device: Device) -> tuple[Taint, ...]:
    if device.health.is_allocatable:
        return ()
    effect = SICK_TAINT.effect if device.health.state is HealthState.UNHEALTHY else "NoSchedule"
    worst = device.health.worst
    since = in_seconds(worst.since if worst is not None and worst.since else device.health.since)
    return (Taint(key=HEALTH_TAINT, value=str(device.health.state), effect=effect, time_added=since or None),)
