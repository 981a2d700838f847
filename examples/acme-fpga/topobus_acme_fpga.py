"""Topobus driver for the Acme A1 FPGA card: all that a vendor writes, in one file.

The card is made up. Its kernel driver `acme` shows, in the card's PCI folder: acme/serial (text),
acme/minor (the N of /dev/acmeN), acme/state (`ready`, or what is wrong), acme/temperature_c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topobus.devicekit.driver import DeviceDriver, Discovery, PrepareContext
from topobus.devicekit.edits_text import gone, own_variable, unreadable
from topobus.devicekit.pci import (
    PciHealth,
    observe_kernel_driver,
    pci_device,
    select_functions,
)
from topobus.sysfs.nodes import device_node
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState, Observation, RecoveryAction
from topobus.values.machine import Machine
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress

__all__ = ["AcmeDriver"]

_VENDOR = 0xACE1
# Processing accelerator.
_CLASS = 0x1200
# The card's data sheet: it lowers its clock above this, in degrees Celsius.
_HOT_C = 95


class AcmeDriver(DeviceDriver):
    """Finds, watches and hands out Acme cards."""

    name = "acme"
    device_class = "fpga"

    def __init__(self) -> None:
        self._pci_health = PciHealth(is_speed_steady=True)

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Pick our functions out of the machine.

        The kit fills in NUMA node, root, switch and name.
        """
        devices = []
        for function in select_functions(tree, machine, vendors=(_VENDOR,), base_classes=(_CLASS,)):
            try:
                serial = tree.read(f"{pci_folder(function.address)}/acme/serial") or ""
            except HardwareError:
                # The card is listed all the same: `observe` reports the unreadable file.
                serial = ""
            devices.append(
                pci_device(
                    function,
                    device_class=self.device_class,
                    driver=self.name,
                    vendor="acme",
                    model="Acme A1",
                    uuid=serial,
                    attributes={"family": "a1"},
                    capacity={"logicElements": 1_100_000},
                )
            )
        return Discovery(devices=devices)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe what every PCI card shows, and our own two files."""
        return {device.name: self._observe_one(tree, device.pci) for device in devices if device.pci is not None}

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Give each card's node. Its number is read each time, because it may change with a
        reboot.
        """
        if (refusal := gone(tree, devices)) is not None:
            return refusal
        edits = {}
        for device in devices:
            minor = tree.read_int(f"{pci_folder(device.pci)}/acme/minor") if device.pci else None
            nodes = () if minor is None else (device_node(f"acme{minor}"),)
            edits[device.name] = ContainerEdits(env={own_variable(device): str(device.pci)}, device_nodes=nodes)
        return edits

    def _observe_one(self, tree: Tree, address: PciAddress) -> list[Observation]:
        folder = pci_folder(address)
        try:
            seen = self._pci_health.observe(tree, address)
            if any(observation.dimension is Dimension.PRESENCE for observation in seen):
                return seen
            seen += observe_kernel_driver(tree, address)
            state = tree.read(f"{folder}/acme/state")
            temperature_c = tree.read_int(f"{folder}/acme/temperature_c")
        except HardwareError as err:
            return [unreadable(err)]
        if state is not None and state != "ready":
            seen.append(
                Observation(
                    dimension=Dimension.FIRMWARE,
                    state=HealthState.UNHEALTHY,
                    reason="not-ready",
                    message=f"the card says {state[:60]!r}",
                    evidence={"path": f"{folder}/acme/state", "value": state[:60]},
                    action=RecoveryAction.RESET_DEVICE,
                )
            )
        if temperature_c is not None and temperature_c > _HOT_C:
            seen.append(
                Observation(
                    dimension=Dimension.THERMAL,
                    state=HealthState.DEGRADED,
                    reason="too-hot",
                    message=f"{temperature_c} degrees Celsius, the card lowers its clock above {_HOT_C}",
                    evidence={"path": f"{folder}/acme/temperature_c", "value": str(temperature_c)},
                    action=RecoveryAction.WAIT,
                )
            )
        return seen
