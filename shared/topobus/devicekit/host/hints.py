"""Answers a request for topology hints of one class, in its device service.

The same pure function that topology uses computes them. A driver with hints of its own is asked
instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.devicekit.driver import DeviceDriver
from topobus.engine.alignment.devices.device_hints import device_hints
from topobus.values.device import Device
from topobus.values.hint import Hint
from topobus.values.machine import Machine

__all__ = ["hinting_driver", "hints_of"]


def hints_of(
    machine: Machine, devices: Sequence[Device], available: Sequence[str], count: int
) -> tuple[Hint, ...] | None:
    """Compute hints by kubelet's rules for `count` of `available`.

    Names that are not devices are ignored.
    """
    names = {device.name for device in devices}
    return device_hints(devices, [name for name in available if name in names], count, machine.node_set)


def hinting_driver(drivers: Sequence[DeviceDriver], devices: Sequence[Device]) -> DeviceDriver | None:
    """Find the driver whose own hints count for the class: the only one that has devices, when it
    has hints.

    Two drivers with devices of one class cannot both be asked for one resource. The common rules
    then apply.
    """
    owners = {device.driver for device in devices}
    if len(owners) != 1:
        return None
    driver = next((device_driver for device_driver in drivers if device_driver.name in owners), None)
    return driver if driver is not None and driver.capabilities.hints else None
