"""Merges what the drivers report into the list of a class's devices: what is listed, each device's health, and what is removed. Pure.

Flows in: the devices of the previous poll, one `DriverView` for each driver, who holds what, the time. Flows out: the devices to publish, and those removed. A device
is never removed because its driver stopped answering, nor while somebody holds it: a vanished device stays listed as Unhealthy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from topobus.devicekit.health import HealthSettings, next_health, silence
from topobus.domain.device import Device
from topobus.domain.health import Condition, Dimension, HealthState, Observation, RecoveryAction
from topobus.domain.machine import Machine
from topobus.domain.names import is_dns_label
from topobus.domain.pci import PciAddress

__all__ = ["DriverView", "Roster", "advance_roster"]

# Presence reasons that end in forgetting the device.
_GONE_REASONS = frozenset({"fell-off-bus", "device-gone"})


@dataclass(frozen=True, kw_only=True)
class DriverView:
    """What one driver said last.

    `devices` is None until its first answer. `silence` is set while it says nothing; what it found before still stands then.
    """

    devices: tuple[Device, ...] | None = None
    observations: Mapping[str, Sequence[Observation]] = field(default_factory=dict)
    silence: Observation | None = None
    warnings: tuple[str, ...] = ()
    off_bus: frozenset[PciAddress] = frozenset()
    """Functions of known devices that the tree lacked when the driver looked: news that our copy of the machine may not have yet."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """All devices of the class, sorted by name, and those that left at this step."""

    devices: tuple[Device, ...] = ()
    removed: tuple[Device, ...] = ()
    warnings: tuple[str, ...] = ()


def advance_roster(
    devices: Sequence[Device],
    views: Mapping[str, DriverView],
    *,
    device_class: str,
    machine: Machine,
    held: Collection[str] | None,
    now: datetime,
    settings: HealthSettings,
) -> Roster:
    """Take one step: merge what the drivers see into what is known.

    Shapes:  views — driver name to its view, one for every driver that is loaded; held — device names in the ledger, None while it is unknown
             (then nothing leaves).
    Order:   independent of the order of drivers and devices; of two drivers that claim one name the one that sorts first gets it.
    """
    before = {each_device.name: each_device for each_device in devices}
    warnings: list[str] = []
    found_devices: dict[str, Device] = {}
    for driver in sorted(views):
        view = views[driver]
        warnings += [f"{driver}: {warning}" for warning in view.warnings]
        if view.silence is not None:
            warnings.append(view.silence.message)
        for device in view.devices or ():
            misfit = _misfit(device, device_class)
            if misfit:
                warnings.append(f"{driver}: device {device.name!r} is left out: {misfit}")
            elif device.name in found_devices:
                warnings.append(f"{driver}: device {device.name!r} is left out: {found_devices[device.name].driver} has found it already")
            else:
                found_devices[device.name] = msgspec.structs.replace(device, driver=driver)
    listed: list[Device] = []
    removed: list[Device] = []
    for name in sorted({*before, *found_devices}):
        was = before.get(name)
        device = found_devices.get(name) or before[name]
        view = views.get(device.driver, DriverView(silence=_not_loaded(device.driver)))
        if view.devices is None and view.silence is None and name not in found_devices:
            # The driver has not looked yet: what is known stands.
            listed.append(device)
            continue
        health = next_health(
            was.health if was else None,
            _observations(device, view, is_found=name in found_devices, machine=machine),
            now=now,
            settings=settings,
        )
        device = msgspec.structs.replace(device, health=health)
        if (
            held is not None
            and name not in held
            and _is_forgotten(device, view, is_found=name in found_devices, now=now, settings=settings)
        ):
            removed.append(device)
        else:
            listed.append(device)
    return Roster(devices=tuple(listed), removed=tuple(removed), warnings=tuple(warnings))


def _observations(device: Device, view: DriverView, *, is_found: bool, machine: Machine) -> list[Observation]:
    if view.silence is not None:
        return [view.silence]
    if is_found:
        return list(view.observations.get(device.name, ()))
    is_on_bus = device.pci not in view.off_bus and any(pci_device.address == device.pci for pci_device in machine.pci_devices)
    reason, text = ("fell-off-bus", f"PCI function {device.pci} is no longer on the bus")
    if device.pci is None or is_on_bus:
        reason, text = ("device-gone", f"driver {device.driver} does not find {device.name} any more")
    return [
        Observation(
            dimension=Dimension.PRESENCE,
            state=HealthState.UNHEALTHY,
            reason=reason,
            message=text,
            evidence={"driver": device.driver, "value": "absent"},
            action=RecoveryAction.REBOOT_NODE if reason == "fell-off-bus" else RecoveryAction.NONE,
        )
    ]


def _not_loaded(driver: str) -> Observation:
    return silence("driver-not-loaded", f"driver {driver} is not loaded: nobody looks at its devices")


def _is_forgotten(device: Device, view: DriverView, *, is_found: bool, now: datetime, settings: HealthSettings) -> bool:
    if is_found:
        return False
    ends = [condition for condition in device.health.conditions if _is_end(condition, view)]
    return any((now - datetime.fromisoformat(end.since)).total_seconds() >= settings.forget_s for end in ends)


def _is_end(condition: Condition, view: DriverView) -> bool:
    if condition.dimension is Dimension.PRESENCE and condition.state is HealthState.UNHEALTHY and condition.reason in _GONE_REASONS:
        return view.silence is None
    return condition.dimension is Dimension.DRIVER and condition.reason == "driver-not-loaded"


def _misfit(device: Device, device_class: str) -> str:
    if not is_dns_label(device.name):
        return "its name is no DNS label"
    if device.device_class != device_class:
        return f"its class is {device.device_class!r}, wanted {device_class!r}"
    return ""
