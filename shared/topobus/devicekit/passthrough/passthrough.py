"""Gives PCI functions to virtual machines: for a claim a function moves from its own kernel driver
to VFIO, and back afterwards.

The claim's configuration asks for it, and the operator's settings allow it. The result is VFIO's
nodes for a container, or a refusal with the exact reason, in which case the function is with its
own driver. The previous driver is recorded in the journal before the first act, so the next start
undoes a kill at any step. `PassthroughDriver` replaces the class's driver for these devices.
`prepare` is long work, `unprepare` brings the function back, and its driver cleans it as after any
owner. A function of a card that is cut on demand is made first, and a card that is wanted whole
loses its functions first, as for any other claim. They are checked after that.

KubeVirt's launcher finds the functions of a resource in PCI_RESOURCE_<RESOURCE>, separated by
commas. QEMU under any other name reads `TOPOBUS_<CLASS>_PCI_ADDRESSES`.
Source: kubevirt pkg/util (ResourceNameToEnvVar), pkg/virt-launcher/virtwrap/device/hostdevice;
Documentation/userspace-api/iommufd.rst.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import Capabilities, DeviceDriver, Discovery, LongWork, PrepareContext
from topobus.devicekit.edits_text import gone, own_variable
from topobus.devicekit.journal.journal_values import PASSTHROUGH
from topobus.devicekit.partitioning.function_cuts import CUT_LIMIT_S
from topobus.devicekit.passthrough import iommu_groups
from topobus.devicekit.passthrough.function_switch import FunctionDriver, FunctionSwitch
from topobus.devicekit.passthrough.function_users import function_uses, openers
from topobus.devicekit.passthrough.passthrough_request import Passthrough, read_passthrough
from topobus.devicekit.pci import function_role, is_vfio
from topobus.devicekit.settings import PassthroughRule, PassthroughSettings
from topobus.process.logging import get_logger
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree
from topobus.values.device import Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.machine import Machine
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.request import OwnerKind
from topobus.values.resource_names import RESOURCE_PREFIX

__all__ = ["PassthroughDriver"]

_LOOK_S = 0.2
# To release, to bind, and both once more when the function must go back; and the look for users.
_SWITCHES = 4
_COMMON = {"vfio": "vfio/vfio", "iommufd": "iommu"}


class PassthroughDriver(DeviceDriver):
    """Replaces a class's driver for the devices that a claim wants for a virtual machine."""

    def __init__(
        self,
        driver: DeviceDriver,
        settings: PassthroughSettings,
        own: Callable[[], frozenset[PciAddress]] = frozenset,
    ) -> None:
        """Wrap the class's driver.

        `own` returns the functions that the owner already has in passthrough. It is called in the
        driver's thread.
        """
        self.name = driver.name
        self.device_class = driver.device_class
        self._driver = driver
        self._settings = settings
        self._own = own

    @property
    def capabilities(self) -> Capabilities:
        """It cleans if its driver does, once that has the device again."""
        return Capabilities(checks=True, cleans=self._driver.capabilities.cleans)

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """Find nothing: the class's driver finds the devices."""
        return Discovery()

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe nothing: the class's driver does, when it has the device again."""
        return {}

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse malformed requests, what the operator does not allow, and a function whose IOMMU
        group is not the claim's alone. Nothing is changed yet.
        """
        passthrough = _read_alike(devices, context)
        if isinstance(passthrough, Refusal):
            return passthrough
        if context.owner.kind is not OwnerKind.CLAIM:
            return refuse("passthrough-malformed", "devices go to virtual machines by claims alone")
        there = [device for device in devices if not self._is_cut_on_demand(device)]
        refusal = gone(tree, there)
        for device in devices:
            refusal = refusal or self._refuse_device(tree, device, is_there=device in there)
        if refusal is not None:
            return refusal
        if passthrough.backend == "iommufd" and not tree.exists("dev/iommu"):
            return refuse(
                "passthrough-unsupported",
                "the node has no /dev/iommu: its kernel has no iommufd, or has not loaded it",
                what="iommufd",
            )
        return self._refuse_group(tree, there)

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Return the nodes of functions that VFIO has, else begin to switch them."""
        passthrough = _read_alike(devices, context)
        if isinstance(passthrough, Refusal):
            return passthrough
        switch = self._switch(tree)
        is_given = all(is_vfio(switch.present(_address(device)).name) for device in devices)
        if is_given and not _missing_nodes(tree, devices, passthrough):
            return _passthrough_edits(tree, devices, passthrough, self._driver)
        names = ", ".join(device.name for device in devices)
        return LongWork(
            limit_s=self._settings.idle_s
            + _SWITCHES * len(devices) * self._settings.switch_s
            + CUT_LIMIT_S * (1 + len(devices)),
            what=f"giving {names} to {passthrough.backend}",
            work=lambda: self._work_on_whole(tree, devices, context, passthrough),
        )

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Bring functions back to the drivers that had them before.

        Errors: raises HardwareError when one cannot be brought back, after all others were tried.
        """
        faults: list[str] = []
        for device in devices:
            if fault := self._bring_back(tree, device, context.records[device.name]):
                faults.append(fault)
            elif self._driver.on_demand_functions is not None:
                self._driver.on_demand_functions.undo(tree, device, context)
        if faults:
            raise HardwareError("; ".join(faults), next_step="it is tried again until its driver has it")

    def clean(self, tree: Tree, device: Device, record: DeviceRecord) -> Refusal | None:
        """Clean it by the class's driver."""
        return self._driver.clean(tree, device, record)

    def _is_cut_on_demand(self, device: Device) -> bool:
        functions = self._driver.on_demand_functions
        return functions is not None and functions.has_any([device])

    def _refuse_device(self, tree: Tree, device: Device, *, is_there: bool = True) -> Refusal | None:
        """Refuse a device that may not be given.

        `is_there`: whether the function is already as it will be when it is given.
        """
        address = device.pci
        # A virtual function is a part of its card, and a function with a group of its own.
        if (
            address is None
            or device.allows_multiple
            or any(whole.endswith(_name_part(address)) for whole in (device.parent, device.partition_of))
        ):
            return refuse(
                "passthrough-unsupported",
                f"{device.name} is no PCI function as a whole, so no machine can have it",
                device=device.name,
            )
        # Read the tree first: the journal has each switch before the tree shows it.
        role, why = function_role(tree, address) if is_there else (device.role, "")
        if address in self._own():
            return None
        if role is DeviceRole.PASSTHROUGH and role is device.role:
            return None
        if role is not DeviceRole.COMPUTE or role is not device.role:
            text = f"{device.name}: {why or f'it was offered for {device.role}, and is for {role} now'}"
            return refuse("device-not-offered", text, device=device.name)
        rule = self._rule(device)
        if rule is None:
            text = f"{device.name} may not be given to a virtual machine: no rule of passthrough.allow is true of it"
            return refuse("passthrough-forbidden", text, device=device.name)
        if not self._switch(tree).has_driver(rule.kernel_driver):
            text = (
                f"kernel driver {rule.kernel_driver} is not loaded on the node, so {device.name} cannot be given "
                "to a virtual machine"
            )
            return refuse("passthrough-unsupported", text, device=device.name, what=rule.kernel_driver)
        return None

    def _refuse_group(self, tree: Tree, devices: Sequence[Device]) -> Refusal | None:
        own = {*self._own(), *(_address(device) for device in devices)}
        for device in devices:
            group = iommu_groups.read_group(tree, _address(device))
            if group is None:
                text = f"{device.name} has no IOMMU group: the node's IOMMU is off, or the kernel does not use it"
                return refuse("passthrough-unsupported", text, device=device.name, what="iommu")
            others = iommu_groups.others(tree, group, own)
            if others:
                named = ", ".join(f"{address} ({driver or 'no driver'})" for address, driver in others.items())
                text = (
                    f"{device.name} is in IOMMU group {group.number} with {named}, which the claim does not pass "
                    "through: a machine gets a group whole"
                )
                return refuse(
                    "passthrough-group", text, device=device.name, group=group.number, others=tuple(map(str, others))
                )
        return None

    def _work_on_whole(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext, passthrough: Passthrough
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Make the functions of cards that are cut on demand, or the whole card, and give them."""
        functions = self._driver.on_demand_functions
        if functions is None or not any(map(self._is_cut_on_demand, devices)):
            return self._work(tree, devices, context, passthrough)

        def give() -> Mapping[str, ContainerEdits] | Refusal:
            refusal = gone(tree, devices)
            for device in devices:
                refusal = refusal or self._refuse_device(tree, device)
            return refusal or self._refuse_group(tree, devices) or self._work(tree, devices, context, passthrough)

        answer = functions.prepare(tree, devices, context, give)
        return answer.work() if isinstance(answer, LongWork) else answer

    def _work(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext, passthrough: Passthrough
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Wait until the functions are idle, switch them, and wait for their nodes.

        If that fails for one function, all are undone.
        """
        switch = self._switch(tree)
        for device in devices:
            before = switch.present(_address(device))
            if not is_vfio(before.name):
                facts = {"address": str(device.pci), "driver": before.name, "override": before.override}
                context.records[device.name].intend(PASSTHROUGH, facts)
        try:
            for device in devices:
                if context.records[device.name].step(PASSTHROUGH) is not None:
                    self._driver.let_go(tree, device)
            refusal = self._wait_idle(tree, devices)
            if refusal is None:
                for device in devices:
                    self._take(switch, device)
                switch.until(lambda: not _missing_nodes(tree, devices, passthrough), "VFIO having made its nodes")
        except HardwareError as err:
            refusal = refuse(
                "passthrough-failed", f"{', '.join(device.name for device in devices)}: {err}", error=err.message
            )
        if refusal is not None:
            return self._give_up(tree, devices, context, refusal)
        for device in devices:
            if context.records[device.name].step(PASSTHROUGH) is not None:
                context.records[device.name].done(PASSTHROUGH)
        return _passthrough_edits(tree, devices, passthrough, self._driver)

    def _take(self, switch: FunctionSwitch, device: Device) -> None:
        rule = self._rule(device)
        if not is_vfio(switch.present(_address(device)).name):
            # A claim that is prepared again after a reboot was allowed when it came.
            switch.give(_address(device), rule.kernel_driver if rule is not None else PassthroughRule.kernel_driver)
            get_logger().info("function.passed", device=device.name, address=str(device.pci))

    def _give_up(self, tree: Tree, devices: Sequence[Device], context: PrepareContext, refusal: Refusal) -> Refusal:
        faults = [
            fault
            for device in reversed(devices)
            if (fault := self._bring_back(tree, device, context.records[device.name]))
        ]
        if not faults:
            return refusal
        text = f"it cannot be given back yet, and is tried again: {'; '.join(faults)}"
        return Refusal(
            reasons=(*refusal.reasons, Reason(code="undo-failed", message=text, facts={"device": devices[0].name}))
        )

    def _bring_back(self, tree: Tree, device: Device, record: DeviceRecord) -> str:
        """Bring one function back. Return why it failed, or nothing.

        A device without the step was never switched.
        """
        step = record.step(PASSTHROUGH)
        if step is None:
            return ""
        address = PciAddress.parse(step.before["address"])
        before = FunctionDriver(name=step.before["driver"], override=step.before["override"])
        switch = self._switch(tree)
        try:
            now = switch.present(address)
            if is_vfio(now.name):
                # The kernel waits in `unbind`, without limit, until no process has the function
                # open.
                busy = openers(tree, iommu_groups.vfio_nodes(tree, address))
                if busy.users:
                    return f"{device.name} is still open: {'; '.join(busy.users)}"
            switch.restore(address, before)
        except HardwareError as err:
            return f"{device.name}: {err}"
        self._driver.take_back(tree, device)
        record.undone(PASSTHROUGH)
        get_logger().info("function.returned", device=device.name, address=str(address), driver=before.name)
        return ""

    def _wait_idle(self, tree: Tree, devices: Sequence[Device]) -> Refusal | None:
        deadline = time.monotonic() + self._settings.idle_s
        while True:
            uses, unseen = self._uses(tree, devices)
            if not uses and not unseen:
                return None
            if time.monotonic() >= deadline or not uses:
                break
            time.sleep(_LOOK_S)
        if uses:
            text = f"still in use after {self._settings.idle_s:g} s: {'; '.join(uses)}"
            return refuse("passthrough-busy", text, devices=tuple(device.name for device in devices))
        text = (
            f"the open files of {unseen} processes cannot be seen, so the device may be in use: "
            "give the service CAP_SYS_PTRACE"
        )
        return refuse("passthrough-blind", text, processes=unseen)

    def _uses(self, tree: Tree, devices: Sequence[Device]) -> tuple[list[str], int]:
        uses: list[str] = []
        unseen = 0
        for device in devices:
            busy = function_uses(tree, _address(device), self._driver.own_nodes(tree, device))
            uses += [f"{device.name}: {use}" for use in busy.users]
            unseen = max(unseen, busy.unseen)
        return uses, unseen

    def _rule(self, device: Device) -> PassthroughRule | None:
        return next(
            (rule for rule in self._settings.allow if all(condition.holds(device) for condition in rule.where)), None
        )

    def _switch(self, tree: Tree) -> FunctionSwitch:
        return FunctionSwitch(tree, limit_s=self._settings.switch_s)


def _read_alike(devices: Sequence[Device], context: PrepareContext) -> Passthrough | Refusal:
    """Read the request of all devices. One machine has one backend."""
    wishes = {device.name: read_passthrough(context.config_of(device.name)) for device in devices}
    refusal = next((wish for wish in wishes.values() if isinstance(wish, Refusal)), None)
    if refusal is not None:
        return refusal
    backends = {name: wish.backend for name, wish in wishes.items() if not isinstance(wish, Refusal)}
    if len(set(backends.values())) > 1:
        named = ", ".join(f"{name}: {backend}" for name, backend in sorted(backends.items()))
        return refuse(
            "passthrough-malformed", f"devices of one claim go to virtual machines in different ways: {named}"
        )
    return next(wish for wish in wishes.values() if not isinstance(wish, Refusal))


def _address(device: Device) -> PciAddress:
    if device.pci is None:
        raise HardwareError(f"{device.name} is no PCI function", device=device.name)
    return device.pci


def _name_part(address: PciAddress) -> str:
    """Return the end of the name of the device that is this function as a whole: a part of it names
    that device as its parent.
    """
    return "-" + str(address).replace(":", "-").replace(".", "-")


def _missing_nodes(tree: Tree, devices: Sequence[Device], passthrough: Passthrough) -> tuple[str, ...]:
    """Name the nodes that do not exist yet."""
    tree = Tree(tree.settings)
    nodes = [_COMMON[passthrough.backend], *(_own_node(tree, device, passthrough) for device in devices)]
    return tuple(node for node in nodes if not node or not tree.exists(f"dev/{node}"))


def _passthrough_edits(
    tree: Tree, devices: Sequence[Device], passthrough: Passthrough, driver: DeviceDriver
) -> Mapping[str, ContainerEdits]:
    """Return the nodes of functions that VFIO has, and the variables.

    The key "" holds what is common to all.
    """
    tree = Tree(tree.settings)
    device_class = driver.device_class.upper().replace("-", "_")
    addresses = ",".join(str(address) for address in sorted(device.pci for device in devices if device.pci is not None))
    # A resource's name in capitals, `/` and `.` as `_`; a pool's has a
    # `-`, which no variable can have.
    resource = f"{RESOURCE_PREFIX}{driver.device_class}".upper().replace("/", "_").replace(".", "_").replace("-", "_")
    env = {
        f"PCI_RESOURCE_{resource}": addresses,
        f"TOPOBUS_{device_class}_PCI_ADDRESSES": addresses,
        f"TOPOBUS_{device_class}_PASSTHROUGH": passthrough.backend,
        **driver.passthrough_variables,
    }
    edits = {
        device.name: ContainerEdits(
            env={own_variable(device): str(device.pci)},
            device_nodes=(device_node(_own_node(tree, device, passthrough)),),
        )
        for device in devices
    }
    return {**edits, "": ContainerEdits(env=env, device_nodes=(device_node(_COMMON[passthrough.backend]),))}


def _own_node(tree: Tree, device: Device, passthrough: Passthrough) -> str:
    """Name the node of a device. Empty when VFIO has made none."""
    if device.pci is None:
        return ""
    if passthrough.backend == "iommufd":
        number = iommu_groups.function_number(tree, device.pci)
        return f"vfio/devices/{number}" if number else ""
    group = iommu_groups.read_group(tree, device.pci)
    return f"vfio/{group.number}" if group is not None else ""
