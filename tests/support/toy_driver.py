"""A driver for a made-up card whose devices a test sets by hand, for tests of the device host."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits, DeviceNode
from topobus.values.health import Observation
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal

__all__ = ["ToyDriver"]


class ToyDriver(DeviceDriver):
    """Finds the devices that a test sets. It can be made to fail, and to hang until it
    is released.
    """

    def __init__(self, name: str = "toy", device_class: str = "gpu", *, count: int = 0) -> None:
        self.name = name
        self.device_class = device_class
        self.names: tuple[str, ...] = tuple(f"{device_class}-{name}-{index}" for index in range(count))
        self.faults: dict[str, tuple[Observation, ...]] = {}
        self.nodes: tuple[DeviceNode, ...] = ()
        """What each device gives to its container."""
        self.error: Exception | None = None
        self.go = threading.Event()
        """Cleared: every call hangs until it is set."""
        self.go.set()
        self.held = threading.Event()
        """Set as soon as a call hangs."""
        self.common: dict[str, str] = {}
        """More variables for all of its devices together."""
        self.prepared: list[tuple[str, ...]] = []
        self.config: dict[str, tuple[dict[str, Any], ...]] = {}
        """What each device was configured with when it was last prepared."""
        self.unprepared: list[tuple[str, ...]] = []

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Find the present devices."""
        self._enter()
        devices = [
            Device(name=name, device_class=self.device_class, driver=self.name, numa_nodes=NodeSet(0))
            for name in self.names
        ]
        return Discovery(devices=devices)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Report the present faults."""
        self._enter()
        return {device.name: self.faults.get(device.name, ()) for device in devices}

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Return one variable for each device, and one in common."""
        self._enter()
        names = tuple(device.name for device in devices)
        self.prepared.append(names)
        self.config |= {name: context.config_of(name) for name in names}
        edits = {
            name: ContainerEdits(env={f"TOY_{name.upper().replace('-', '_')}": "1"}, device_nodes=self.nodes)
            for name in names
        }
        common = {f"TOY_{self.name.upper().replace('-', '_')}": ",".join(names), **self.common}
        return {**edits, "": ContainerEdits(env=common)}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Record the call."""
        self._enter()
        self.unprepared.append(tuple(device.name for device in devices))

    def _enter(self) -> None:
        if not self.go.is_set():
            self.held.set()
        self.go.wait()
        if self.error is not None:
            raise self.error
