"""Topobus driver for the Nexa N2 neural processor: a card that is used whole or by halves, belongs
to one pod at a time, and is wiped after it.

The card is made up. Its kernel driver `nexa` shows, in the card's PCI folder, for each half N of 0
and 1: nexa/minor (the M of /dev/nexaM-N), nexa/tenantN (path of the network namespace whose
programs the half obeys; can be written), nexa/used_mibN (memory that was not wiped; to write 0
wipes it), nexa/fault (`none`, or what is wrong with the card).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from topobus.devicekit.driver import DeviceDriver, DeviceRecord, Discovery, PrepareContext
from topobus.devicekit.edits_text import gone, own_variable, unreadable
from topobus.devicekit.pci import (
    PciHealth,
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    select_functions,
)
from topobus.sysfs.nodes import device_node
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.counters import CounterSet, CounterUse
from topobus.values.device import Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState, Observation, RecoveryAction
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Reason, Refusal
from topobus.values.sandbox import AttachedInterface, Sandbox

__all__ = ["NexaDriver"]

_VENDOR = 0x4E58
_CLASS = 0x1200
_HALVES = (0, 1)
_HALF_CORES, _HALF_BYTES = 32, 16 << 30


class NexaDriver(DeviceDriver):
    """Finds, watches, hands over and wipes Nexa cards and their halves."""

    name = "nexa"
    device_class = "npu"

    def __init__(self) -> None:
        self._pci_health = PciHealth()

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List each card and its two halves.

        Their counters keep a half and the whole from two owners.
        """
        functions = select_functions(tree, machine, vendors=(_VENDOR,), base_classes=(_CLASS,))
        cards = [_device(function, _HALVES) for function in functions]
        halves = [_device(function, (half,)) for function in functions for half in _HALVES]
        counter_sets = [CounterSet(name=card.name, counters={"cores": _HALF_CORES * 2}) for card in cards]
        return Discovery(devices=[*cards, *halves], counter_sets=counter_sets)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe what every PCI card shows, and the card's own file. Both halves share the
        faults.
        """
        return {device.name: self._observe_one(tree, device) for device in devices}

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Give the nodes of the halves.

        Their number is read each time, because it may change with a reboot.
        """
        if (refusal := gone(tree, devices)) is not None:
            return refusal
        edits = {}
        for device in devices:
            minor = tree.read_int(f"{pci_folder(device.pci)}/nexa/minor") if device.pci else None
            nodes = () if minor is None else tuple(device_node(f"nexa{minor}-{half}") for half in _halves(device))
            edits[device.name] = ContainerEdits(env={own_variable(device): str(device.pci)}, device_nodes=nodes)
        return edits

    def to_attach(self, devices: Sequence[Device], context: PrepareContext) -> Sequence[str]:
        """Every half must know its pod before a container starts."""
        return [device.name for device in devices]

    def attach(
        self, tree: Tree, device: Device, context: PrepareContext, sandbox: Sandbox, record: DeviceRecord
    ) -> AttachedInterface | Refusal | None:
        """Tell the halves whose programs they obey."""
        for half in _halves(device):
            file = f"tenant{half}"
            record.intend(file, {"was": tree.read(_file(device, file)) or ""})
            _write(tree, device, file, sandbox.network_namespace)
            record.done(file)
        return None

    def detach(self, tree: Tree, device: Device, sandbox: Sandbox | None, record: DeviceRecord) -> None:
        """Give the halves back to whom they obeyed before, in reverse."""
        for step in reversed(record.steps):
            _write(tree, device, step.name, str(step.before["was"]))
            record.undone(step.name)

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Wipe the memory. A card that keeps some is not offered until it is wiped."""
        record.intend("wipe")
        for half in _halves(device):
            _write(tree, device, f"used_mib{half}", "0")
        left = sum(tree.read_int(_file(device, f"used_mib{half}")) or 0 for half in _halves(device))
        if left:
            message = f"{device.name} keeps {left} MiB of its last user"
            return Refusal(reasons=(Reason(code="memory-left", message=message, facts={"mib": left}),))
        record.undone("wipe")
        return None

    def _observe_one(self, tree: Tree, device: Device) -> list[Observation]:
        try:
            seen = self._pci_health.observe(tree, device.pci) if device.pci else []
            if not device.pci or any(observation.dimension is Dimension.PRESENCE for observation in seen):
                return seen
            seen += observe_kernel_driver(tree, device.pci)
            fault = tree.read(_file(device, "fault")) or "none"
        except HardwareError as err:
            return [unreadable(err)]
        if fault != "none":
            sick, reset = HealthState.UNHEALTHY, RecoveryAction.RESET_DEVICE
            seen.append(
                Observation(
                    dimension=Dimension.FIRMWARE, state=sick, reason="card-fault", message=fault[:60], action=reset
                )
            )
        return seen


def _device(function: PciDevice, halves: Sequence[int]) -> Device:
    whole = pci_device_name("npu", function.address)
    # `parent` names the card with which it disappears, `partition_of` the one with which it is
    # never allocated together.
    name, card = (whole, "") if len(halves) == len(_HALVES) else (f"{whole}-half-{halves[0]}", whole)
    device = pci_device(
        function,
        device_class="npu",
        driver="nexa",
        vendor="nexa",
        model="Nexa N2",
        name=name,
        parent=card,
        partition_of=card,
    )
    attributes = {**device.attributes, "type": "npu-half" if card else "npu", "halves": "".join(map(str, halves))}
    uses = (CounterUse(counter_set=whole, counter="cores", amount=_HALF_CORES * len(halves)),)
    return replace(device, attributes=attributes, capacity={"memory": _HALF_BYTES * len(halves)}, consumes=uses)


def _halves(device: Device) -> list[int]:
    return [int(digit) for digit in str(device.attributes["halves"])]


def _file(device: Device, file: str) -> str:
    return f"{pci_folder(device.pci)}/nexa/{file}" if device.pci else ""


def _write(tree: Tree, device: Device, file: str, text: str) -> None:
    try:
        tree.path(_file(device, file)).write_text(f"{text}\n", encoding="utf-8")
    except OSError as err:
        raise HardwareError(
            f"{device.name}: {file} cannot be written: {err.strerror}", path=_file(device, file)
        ) from err
