"""Merges the drivers' reports into the list of a class's devices: which devices are listed, each
device's health, and which are removed. Pure.

A device is never removed because its driver stopped answering, nor while an owner holds it: a
vanished device stays listed as Unhealthy.

A device that was moved into a pod's sandbox (its record shows it) is invisible to the driver,
wholly or in part. It keeps the attributes that it had before, so that a hand-over changes no slice,
and its absence is no fault. The same applies to the parts of a card that a virtual machine has.
Virtual functions that could have been made, and cannot any more (the host uses their card), are
removed from the list: they never existed, so nothing is wrong with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import msgspec

from topobus.engine.health.health_machine import HealthSettings, next_health, silence
from topobus.formats.kubernetes.slices import fault_of_shares
from topobus.values.counters import CounterSet
from topobus.values.device import Device, Inventory, KeptFunction
from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.health import Condition, DeviceHealth, Dimension, HealthState, Observation
from topobus.values.health_reasons import sign
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine
from topobus.values.names import is_dns_label
from topobus.values.node_text import first_of
from topobus.values.partitions import PARTS, partitioned
from topobus.values.pci import PciAddress

__all__ = ["DriverView", "MergedInventory", "advance_inventory"]

# Presence reasons that end in forgetting the device.
_GONE_REASONS = frozenset({"fell-off-bus", "device-gone"})

# Devices named in a warning about their NUMA nodes.
_SHOWN_LOST = 4


@dataclass(frozen=True, kw_only=True)
class DriverView:
    """The last answer of one driver.

    `devices` is None until its first answer. `silence` is set while it does not answer. Its earlier
    devices then stay listed.
    """

    devices: tuple[Device, ...] | None = None
    counter_sets: tuple[CounterSet, ...] = ()
    observations: Mapping[str, Sequence[Observation]] = field(default_factory=dict)
    silence: Observation | None = None
    warnings: tuple[str, ...] = ()
    kept: tuple[KeptFunction, ...] = ()
    """Functions that it knows and does not offer, with what they are for."""
    away: Mapping[str, Device] = field(default_factory=dict)
    """Devices that sat in a sandbox when the driver looked, as they were before; taken in the
    driver's own thread, in which they also leave and return."""
    uncut: frozenset[str] = frozenset()
    """Cards that it would cut on demand and cannot now: their virtual functions that are not there
    are not on offer."""
    seen: frozenset[PciAddress] = frozenset()
    """Functions of the devices that it found, also of those that are away: our copy of the machine
    learns of new ones later."""
    off_bus: frozenset[PciAddress] = frozenset()
    """Functions of known devices that the tree, or the machine that the driver was given, lacked
    when it looked: our copy of the machine may be older, or newer."""


@dataclass(frozen=True, kw_only=True)
class MergedInventory:
    """All devices of the class, sorted by name, and those that this step removed."""

    devices: tuple[Device, ...] = ()
    removed: tuple[Device, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()
    """What the devices use, by name."""
    warnings: tuple[str, ...] = ()
    kept: tuple[KeptFunction, ...] = ()
    """Functions that are for something else than their class, by address; of two drivers that name
    one, the one that sorts first counts."""
    has_looked: bool = False
    """Whether every driver has looked, or failed to, since the service was started."""


def advance_inventory(
    before: MergedInventory,
    views: Mapping[str, DriverView],
    *,
    inventory_before: Inventory | None = None,
    device_class: str,
    machine: Machine,
    held: Collection[str] | None,
    now: datetime,
    settings: HealthSettings,
    reported: Callable[[Device], Sequence[Observation]] = lambda _: (),
) -> MergedInventory:
    """Take one step: merge the drivers' views into what is known.

    Shapes: before — devices and counter sets of the previous step; inventory_before — the inventory
            that the service published before it was restarted, for drivers that have not polled yet;
            views — driver name to its view, one for every driver that is loaded; held — device names
            in the ledger, None while it is unknown (then nothing is removed); reported — what
            sources of verdicts say of a device, which counts also while its driver cannot see it.
    Order: independent of the order of drivers and devices. Of two drivers that claim one name the
            one that sorts first gets it.
    """
    devices_before = {device.name: device for device in before.devices}
    found_devices, away, warnings = _read_views(
        views, inventory_before=inventory_before, device_class=device_class, machine=machine
    )
    present = {**away, **devices_before}
    cut = _cut_cards(present, found_devices, views, held, away)
    present.update({name: msgspec.structs.replace(present[name], consumes=()) for name in cut})
    counter_sets = _count(
        present, found_devices, views, before.counter_sets, warnings, device_class=device_class, uncounted=cut
    )
    listed: list[Device] = []
    removed: list[Device] = []
    for name in sorted({*present, *found_devices}):
        was = devices_before.get(name)
        device = found_devices.get(name) or present[name]
        view = views.get(device.driver, DriverView(silence=_not_loaded(device.driver)))
        advance = partial(next_health, now=now, settings=settings)
        verdicts = reported(device)
        if _has_not_looked(view) and name not in found_devices:
            # The driver has not polled yet: keep what is known.
            listed.append(_with_verdicts(device, verdicts, advance))
            continue
        is_found = name in found_devices
        whole = device if name in away else away.get(device.partition_of)
        is_away = whole is not None and not is_found and view.silence is None and _has_place(whole, view, machine)
        if is_away and not view.observations.get(name):
            # It cannot be observed inside the sandbox: keep what was known of its health.
            listed.append(_with_verdicts(device, verdicts, advance))
            continue
        is_uncut = device.partition_of in view.uncut and not is_found and whole is None and view.silence is None
        if is_uncut and held is not None and name not in held:
            removed.append(device)
            continue
        # The host's own observations of it (it cannot be brought back) count even then.
        seen = view.observations[name] if is_away else _observations(device, view, is_found=is_found, machine=machine)
        health = advance(was.health if was else None, (*seen, *verdicts))
        device = msgspec.structs.replace(device, health=health)
        if (
            held is not None
            and name not in held
            and _is_expired(device, view, is_found=is_found, now=now, settings=settings)
        ):
            removed.append(device)
        else:
            listed.append(device)
    used = {use.counter_set for device in listed for use in device.consumes}
    return MergedInventory(
        devices=tuple(listed),
        removed=tuple(removed),
        counter_sets=tuple(counter_set for counter_set in counter_sets if counter_set.name in used),
        warnings=tuple(warnings),
        kept=_kept(views, inventory_before),
        has_looked=not any(map(_has_not_looked, views.values())),
    )


def _read_views(
    views: Mapping[str, DriverView], *, inventory_before: Inventory | None, device_class: str, machine: Machine
) -> tuple[dict[str, Device], dict[str, Device], list[str]]:
    """Take from the drivers' views the devices that were found, those that are away, both by name,
    and the warnings.
    """
    warnings: list[str] = []
    found_devices: dict[str, Device] = {}
    away: dict[str, Device] = {}
    for driver in sorted(views):
        view = views[driver]
        away.update({name: device for name, device in view.away.items() if device.driver == driver})
        warnings += [f"{driver}: {warning}" for warning in view.warnings]
        if _has_not_looked(view):
            warnings += _earlier_warnings(driver, inventory_before)
        if view.silence is not None:
            warnings.append(view.silence.message)
        for device in view.devices or ():
            misfit = _misfit(device, device_class)
            if misfit:
                warnings.append(f"{driver}: device {device.name!r} is left out: {misfit}")
            elif device.name in found_devices:
                warnings.append(
                    f"{driver}: device {device.name!r} is left out: {found_devices[device.name].driver} has "
                    "found it already"
                )
            else:
                found_devices[device.name] = _with_absent_parts(
                    msgspec.structs.replace(device, driver=driver), away.get(device.name)
                )
        warnings += _forget_missing_nodes(found_devices, driver, machine.node_set)
    return found_devices, away, warnings


def _has_not_looked(view: DriverView) -> bool:
    return view.devices is None and view.silence is None


def _earlier_warnings(driver: str, before: Inventory | None) -> list[str]:
    """Return the earlier warnings of a driver that has not polled yet, and a warning that it has
    not: its devices are those that were known at the restart, or none.
    """
    waits = f"{driver}: it has not looked for its devices yet since the service was started"
    warnings = [
        warning for warning in (before.warnings if before is not None else ()) if warning.startswith(f"{driver}: ")
    ]
    return [*(warning for warning in warnings if warning != waits), waits]


def _kept(views: Mapping[str, DriverView], inventory_before: Inventory | None) -> tuple[KeptFunction, ...]:
    is_waiting = inventory_before is not None and any(map(_has_not_looked, views.values()))
    functions = (
        {function.pci: function for function in inventory_before.kept}
        if inventory_before is not None and is_waiting
        else {}
    )
    functions.update(
        {function.pci: function for driver in sorted(views, reverse=True) for function in views[driver].kept}
    )
    return tuple(functions[address] for address in sorted(functions))


def _cut_cards(
    before: Mapping[str, Device],
    found_devices: Mapping[str, Device],
    views: Mapping[str, DriverView],
    held: Collection[str] | None,
    away: Collection[str],
) -> frozenset[str]:
    """Find the cards that are gone since they were partitioned, and that have no holder.

    They are unhealthy, so no new owner gets them, and they need not exclude their parts. Otherwise
    kubelet's device plugin, which counts nothing, would offer no part of the card until the card is
    removed from the list. A card that uses counters of its driver still counts.
    """
    if held is None:
        return frozenset()
    parents = {device.partition_of for device in found_devices.values()}
    return frozenset(
        name
        for name, device in before.items()
        if name in parents
        and name not in found_devices
        and name not in held
        and name not in away
        and not device.partition_of
        and all(use.counter == PARTS for use in device.consumes)
        and (view := views.get(device.driver)) is not None
        and view.devices is not None
        and view.silence is None
    )


def _count(
    before: dict[str, Device],
    found_devices: dict[str, Device],
    views: Mapping[str, DriverView],
    sets_before: Sequence[CounterSet],
    warnings: list[str],
    *,
    device_class: str,
    uncounted: Collection[str],
) -> tuple[CounterSet, ...]:
    """Compute what the devices take from each other, in both maps.

    A device whose counters make no sense is dropped, with a warning. A vanished device still
    counts: an owner may hold it, and the devices that it excludes must not be allocated beside it.
    So the sets of the previous step stay as long as a device uses them. `uncounted`: cards that are
    known to exclude nothing.
    """
    by_driver: dict[str, list[Device]] = {}
    for device in {
        name: device for name, device in {**before, **found_devices}.items() if name not in uncounted
    }.values():
        by_driver.setdefault(device.driver, []).append(device)
    counted: dict[str, CounterSet] = {}
    for driver in sorted(by_driver):
        devices = sorted(by_driver[driver], key=lambda device: device.name)
        if not any(device.consumes or device.partition_of for device in devices):
            continue
        given: list[CounterSet] = []
        for counter_set in views[driver].counter_sets if driver in views else ():
            misnomer = _misnomer(counter_set.name, device_class)
            if misnomer:
                warnings.append(f"{driver}: counter set {counter_set.name!r} is left out: {misnomer}")
            else:
                given.append(counter_set)
        taken = [counter_set.name for counter_set in given if counter_set.name in counted]
        warnings += [
            f"{driver}: counter set {name!r} is left out: another driver has one of this name" for name in taken
        ]
        sets = [counter_set for counter_set in given if counter_set.name not in counted]
        names = {counter_set.name for counter_set in given}
        sets += [
            counter_set
            for counter_set in sets_before
            if counter_set.name not in names and counter_set.name not in counted
        ]
        good, used_sets, faults = partitioned(devices, sets)
        for name, fault in faults.items():
            if found_devices.pop(name, None) is not None:
                warnings.append(f"{driver}: device {name!r} is left out: {fault}")
        for device in good:
            (found_devices if device.name in found_devices else before)[device.name] = device
        counted.update((counter_set.name, counter_set) for counter_set in used_sets)
    return tuple(counted[name] for name in sorted(counted))


def _observations(device: Device, view: DriverView, *, is_found: bool, machine: Machine) -> list[Observation]:
    if view.silence is not None:
        return [view.silence]
    if is_found:
        return list(view.observations.get(device.name, ()))
    code, text = "fell-off-bus", f"PCI function {device.pci} is no longer on the bus"
    if _has_place(device, view, machine):
        code, text = "device-gone", f"driver {device.driver} does not find {device.name} any more"
    return [sign(code, text, evidence={"driver": device.driver, "value": "absent"})]


def _with_verdicts(device: Device, verdicts: Sequence[Observation], advance: Callable[..., DeviceHealth]) -> Device:
    """Let verdicts count for a device that its driver cannot see now."""
    if not verdicts and not any(condition.source for condition in device.health.conditions):
        return device
    return msgspec.structs.replace(device, health=advance(device.health, verdicts, is_observed=False))


def _has_place(device: Device, view: DriverView, machine: Machine) -> bool:
    """Say whether a device can still be where it was: it has no PCI function, or the function is on
    the bus.
    """
    if device.pci is None or device.pci in view.seen:
        return True
    return device.pci not in view.off_bus and any(
        pci_device.address == device.pci for pci_device in machine.pci_devices
    )


def _with_absent_parts(device: Device, before: Device | None) -> Device:
    """Give a device that is in a sandbox the attributes that it had before, even while it is still
    visible, or visible again: it is set up for the pod then.

    Attributes that are new (its record was renewed meanwhile) are added. A device that several
    owners may hold stays on the host, and its own attributes count.
    """
    if before is None or device.allows_multiple:
        return device
    return msgspec.structs.replace(device, attributes={**device.attributes, **before.attributes})


def _forget_missing_nodes(found_devices: dict[str, Device], driver: str, nodes: NodeSet) -> list[str]:
    """Drop NUMA nodes that the machine lacks, as discovery does for PCI functions: a device on such
    a node could be near nothing, and would always be refused.

    It is decided again with each machine, so a device on a new node gets its place as soon as
    discovery reports the node. A machine without nodes decides nothing.
    """
    lost: dict[str, list[str]] = {}
    for name, device in found_devices.items() if nodes else ():
        if device.driver == driver and device.numa_nodes and (missing := device.numa_nodes - nodes):
            lost.setdefault(str(missing), []).append(name)
    for names in lost.values():
        for name in names:
            numa_nodes = (found_devices[name].numa_nodes or NodeSet()) & nodes
            found_devices[name] = msgspec.structs.replace(found_devices[name], numa_nodes=numa_nodes or None)
    return [
        f"{driver}: {first_of(names, _SHOWN_LOST)}: "
        f"got NUMA node {missing}, wanted one of the nodes {nodes}; taken as unknown"
        for missing, names in sorted(lost.items())
    ]


def _not_loaded(driver: str) -> Observation:
    return silence("driver-not-loaded", f"driver {driver} is not loaded: its devices are not observed")


def _is_expired(device: Device, view: DriverView, *, is_found: bool, now: datetime, settings: HealthSettings) -> bool:
    if is_found:
        return False
    ends = [condition for condition in device.health.conditions if _is_end(condition, view)]
    return any((now - datetime.fromisoformat(end.since)).total_seconds() >= settings.forget_s for end in ends)


def _is_end(condition: Condition, view: DriverView) -> bool:
    if (
        condition.dimension is Dimension.PRESENCE
        and condition.state is HealthState.UNHEALTHY
        and condition.reason in _GONE_REASONS
    ):
        return view.silence is None
    return condition.dimension is Dimension.DRIVER and condition.reason == "driver-not-loaded"


def _misfit(device: Device, device_class: str) -> str:
    if not is_dns_label(device.name):
        return "its name is no DNS label"
    if device.device_class != device_class:
        return f"its class is {device.device_class!r}, wanted {device_class!r}"
    return _misnomer(device.name, device_class) or fault_of_shares(device)


def _misnomer(name: str, device_class: str) -> str:
    """Explain why a name does not tell the class, as those of all devices and counter sets of a node
    must: Kubernetes knows them by it alone. Empty when it does.
    """
    if name.startswith(f"{device_class}-") and class_of_device(DRIVER, name) == device_class:
        return ""
    return f"wanted a name that begins with '{device_class}-' and has no '--'"
