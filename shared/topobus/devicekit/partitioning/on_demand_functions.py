"""Physical functions that a driver offers whole and in virtual functions at the same time, by an
operator's rules.

It keeps, between the looks of a driver, the virtual functions to offer beside each physical one,
existing or not. `function_cuts` makes the functions of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, structs

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.partitioning.function_cuts import FunctionCuts, FunctionWish, planned_functions
from topobus.devicekit.pci import function_role, pci_device_name
from topobus.devicekit.prepare_context import LongWork, PrepareContext
from topobus.devicekit.settings import FunctionRule
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["OnDemandFunctions"]


class _Plan(Struct, frozen=True, kw_only=True):
    name: str
    parts: tuple[tuple[PciAddress, str], ...]
    removes: bool


class OnDemandFunctions:
    """The physical functions of one driver that are cut on demand."""

    def __init__(self, device_class: str, cuts: FunctionCuts) -> None:
        self.rules: tuple[FunctionRule, ...] = ()
        self.cuts = cuts
        self._class = device_class
        # Replaced, never changed: long work reads it beside a look.
        self._plans: Mapping[PciAddress, _Plan] = {}
        self._next: dict[PciAddress, _Plan] = {}
        self._parts: set[PciAddress] = set()
        """All virtual functions that were ever on offer in this life."""
        self._changed: set[PciAddress] = set()
        self._next_uncut: set[str] = set()
        self.uncut: frozenset[str] = frozenset()
        """Cards that a rule names and that cannot be cut as the last look found them: virtual
        functions of theirs that are not there are not on offer."""
        self._seen: Mapping[PciAddress, tuple[Device, ...]] = {}
        self._has_looked = False

    def look(
        self,
        tree: Tree,
        machine: Machine,
        functions: Sequence[PciDevice],
        left_out: LeftOut,
        *,
        uses: Callable[[PciAddress], Sequence[str]],
        describe: Callable[[PciDevice], Device],
        offer: Callable[[PciDevice], Device | None],
    ) -> tuple[Device, ...]:
        """Return the devices of a driver's functions, and of virtual functions that a claim would make,
        by address.

        Shapes: uses — how the host uses a physical function, for people, which is not cut then;
        describe — the device by which rules know a physical function; offer — a function's device, None
        where it is not offered.
        """
        self._next, self._changed, self._next_uncut = {}, set(), set()
        listed = {function.address: function for function in functions}
        for physical in functions if self.rules else ():
            if physical.physfn is None and self._changing(physical) is None:
                parts = self._plan(tree, machine, describe(physical), physical, uses, left_out)
                listed |= {part.address: part for part in parts}
        devices: list[Device] = []
        for _, function in sorted(listed.items()):
            changing = self._changing(function)
            device = offer(function) if changing is None else None
            devices += changing or ([device] if device is not None else [])
        self._plans, self.uncut, self._has_looked = self._next, frozenset(self._next_uncut), True
        by_name = {device.name: device for device in devices}
        self._seen = {
            address: tuple(by_name[name] for name in (plan.name, *(name for _, name in plan.parts)) if name in by_name)
            for address, plan in self._plans.items()
        }
        return tuple(devices)

    def is_cut(self, function: PciDevice) -> bool:
        """Return, during a look, whether a function belongs to a card that is cut on demand: as the
        physical one, or as an offered virtual one.
        """
        plan = self._next.get(function.physfn or function.address)
        return plan is not None and (function.physfn is None or any(function.address == part for part, _ in plan.parts))

    def _changing(self, function: PciDevice) -> Sequence[Device] | None:
        """Return the last seen devices of a card that is changing, for its physical function.

        Empty for its virtual ones, None for every other function. A card that changed at any moment
        of a look is skipped until its end, and keeps its plan, because half of it was seen before
        the change.
        """
        address = function.physfn or function.address
        if self.cuts.locks.is_changing(address) and address in self._plans:
            self._changed.add(address)
            self._next[address] = self._plans[address]
        if address not in self._changed:
            return None
        return self._seen.get(address, ()) if function.physfn is None else ()

    def is_absent(self, tree: Tree, address: PciAddress) -> bool:
        """Return whether a virtual function is or was offered and does not exist, so that nothing
        can be wrong with it.

        Devices of an earlier look are observed also when the last one found that their card cannot
        be cut now.
        """
        return address in self._parts and not tree.exists(pci_folder(address))

    def present(self, tree: Tree, devices: Sequence[Device]) -> dict[str, PciAddress]:
        """Return the addresses of the devices that exist, by name."""
        return {
            device.name: device.pci
            for device in devices
            if device.pci is not None and not self.is_absent(tree, device.pci)
        }

    def prepare(
        self,
        tree: Tree,
        devices: Sequence[Device],
        context: PrepareContext,
        edits: Callable[[], Mapping[str, ContainerEdits] | Refusal],
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Return edits, after the functions of a request exist.

        At once for devices of no card that is cut on demand.
        """
        if self.rules and not self._has_looked:
            return _refuse(
                "the service has just started and does not know yet which cards are cut on demand; ask again", devices
            )
        wishes: dict[PciAddress, FunctionWish] = {}
        for device in sorted(devices, key=lambda device: device.name):
            wish = self._wish(device)
            if wish is not None:
                address, own = wish
                before = wishes.get(address)
                if before is not None and before.is_whole is not own.is_whole:
                    return _refuse(f"{device.name} and {before.devices[0]} cannot be had at once", devices)
                names = (*(before.devices if before is not None else ()), device.name)
                wishes[address] = structs.replace(own, devices=names)
        return self.cuts.prepare(tree, wishes, context, edits) if wishes else edits()

    def undo(self, tree: Tree, device: Device, context: PrepareContext) -> None:
        """Remove the owner of a device.

        Errors: raises HardwareError while the card is being changed for another owner.
        """
        wish = self._wish(device)
        record = context.records.get(device.name, DeviceRecord())
        if wish is None:
            self.cuts.forget(record)
        else:
            self.cuts.undo(tree, wish[0], wish[1], record, context.in_use)

    def has_any(self, devices: Sequence[Device]) -> bool:
        """Return whether a device is of a card that is cut on demand, or may be, until the first
        look.
        """
        return (bool(self.rules) and not self._has_looked) or any(self._wish(device) is not None for device in devices)

    def _wish(self, device: Device) -> tuple[PciAddress, FunctionWish] | None:
        for address, plan in self._plans.items():
            is_whole = device.name == plan.name
            if is_whole or any(device.name == name for _, name in plan.parts):
                return address, FunctionWish(
                    name=plan.name, parts=plan.parts, is_whole=is_whole, devices=(device.name,), removes=plan.removes
                )
        return None

    def _plan(
        self,
        tree: Tree,
        machine: Machine,
        device: Device,
        physical: PciDevice,
        uses: Callable[[PciAddress], Sequence[str]],
        left_out: LeftOut,
    ) -> tuple[PciDevice, ...]:
        """Return the virtual functions to offer beside a physical one.

        Empty where no rule fits, and with the reason where one does: the host uses the physical
        function, or the kernel does not show the addresses.
        """
        rule = next((rule for rule in self.rules if all(condition.holds(device) for condition in rule.where)), None)
        if rule is None:
            return ()
        functions: tuple[PciDevice, ...] = ()
        if why_not := _use_of(tree, physical.address, uses):
            self._next_uncut.add(device.name)
        else:
            try:
                total = tree.read_int(f"{pci_folder(physical.address)}/sriov_totalvfs")
                functions = planned_functions(tree, machine, physical, min(rule.count, total)) if total else ()
                why_not = "the kernel does not show its virtual functions (sriov_totalvfs, sriov_offset, sriov_stride)"
            except HardwareError as err:
                why_not = err.message
        if not functions:
            left_out.append(f"{physical.address} is not cut on demand: {why_not}")
            return ()
        self._parts.update(function.address for function in functions)
        parts = tuple((function.address, pci_device_name(self._class, function.address)) for function in functions)
        self._next[physical.address] = _Plan(name=device.name, parts=parts, removes=rule.when_idle == "remove")
        return functions


def _use_of(tree: Tree, address: PciAddress, uses: Callable[[PciAddress], Sequence[str]]) -> str:
    try:
        is_passed = function_role(tree, address)[0] is DeviceRole.PASSTHROUGH
        return "; ".join((*uses(address), *(["it is held for passthrough"] if is_passed else [])))
    except HardwareError as err:
        return err.message


def _refuse(message: str, devices: Sequence[Device]) -> Refusal:
    names = tuple(sorted(device.name for device in devices))
    return refuse("device-not-offered", message, devices=names)
