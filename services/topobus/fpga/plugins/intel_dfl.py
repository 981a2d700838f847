"""Intel FPGAs of the kernel's Device Feature List (DFL): one device for each port, through which
one function (AFU) is reached.

The port of a card with one port is named after the card. On a card with several ports, each port
has its own function, its own region's interface id and its own node, names the card as its parent,
and shares the card's faults. A card on the processor's own bus has no PCI address and possibly no
NUMA node. It is named by its region, which is stable as long as no card is added before it.
Source: Documentation/fpga/dfl.rst (a bitstream fits a region when its interface id is the region's
compat_id; the port's afu_id is the loaded function's) and the ABI pages of dfl-fme and dfl-port; the
all-ones id of a crashed function: Intel's FPGA plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from topobus.devicekit.driver import Discovery, LongWork, PrepareContext
from topobus.devicekit.edits_text import (
    is_offered,
    own_variable,
    unreadable,
    unusable,
)
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.pci import PciHealth, pci_device
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm, normal_id
from topobus.fpga.function_hands import FunctionHands, LoadsFunctions
from topobus.fpga.programmer import DflProgrammer, KernelDflProgrammer
from topobus.fpga.region import Region
from topobus.sysfs.fpga import DflCard, DflPort, ErrorRegister, dfl_regions, read_dfl_card
from topobus.sysfs.nodes import device_node
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState, Observation
from topobus.values.health_reasons import sign
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine
from topobus.values.names import to_dns_label
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress

__all__ = ["IntelDflDriver"]

# Products by PCI device id. Source: the kernel's dfl-pci driver.
_MODELS = {
    0x09C4: "PAC Arria 10 GX",
    0x09C5: "PAC Arria 10 GX VF",
    0x0B2B: "PAC D5005",
    0x0B2C: "PAC D5005 VF",
    0x0B30: "PAC N3000",
    0x0B31: "PAC N3000 VF",
    0xAF00: "IPU F2000X",
    0xAF01: "IPU F2000X VF",
    0xBCBD: "Xeon with integrated FPGA",
    0xBCC0: "Xeon with integrated FPGA",
    0xBCC1: "Xeon with integrated FPGA VF",
    0xBCCE: "N6000",
    0xBCCF: "N6000 VF",
}
# Registers of the management engine by what they mean. A register that is not listed only degrades
# the card.
_FATAL = {"catfatal_errors"}
_LINK = {"pcie0_errors", "pcie1_errors"}
# Values of dfl-port's power_state: AP1 and AP2 throttle the function, AP6 stops it.
_STOPPED = 6


class IntelDflDriver(LoadsFunctions):
    """Finds and watches DFL cards, and loads functions into them.

    It keeps the PCIe error counters and what it has programmed.
    """

    name = "intel-dfl"
    device_class = "fpga"

    def __init__(self, programmer: DflProgrammer | None = None) -> None:
        """Program cards by the kernel's drivers, unless a test gives its own programmer."""
        self._pci_health = PciHealth()
        self._programmer: DflProgrammer = programmer or KernelDflProgrammer()
        self._functions = FunctionHands(lambda tree, device: _dfl_region(tree, device, self._programmer))

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the ports, by region and number."""
        devices: list[Device] = []
        left_out = LeftOut()
        for region in dfl_regions(tree):
            try:
                card = read_dfl_card(tree, region)
            except HardwareError as err:
                # An unreadable card has no address to name it by. If it was known before, the host
                # reports it as missing.
                left_out.append(f"{region} is left out: {err.message}")
                continue
            if card.pci is None or is_offered(tree, card.pci, left_out):
                if self.host.offers_parents and card.ports and card.port_count > 1:
                    devices.append(self._device(card, None, machine))
                devices += [self._device(card, port, machine) for port in card.ports]
                if not card.ports and card.pci is not None:
                    left_out.keep(
                        card.pci,
                        DeviceRole.MANAGEMENT,
                        "it has no port, and its management engine is given to no container",
                    )
        self._functions.loader.forget_absent({device.name for device in devices})
        return Discovery(
            devices=tuple(
                msgspec.structs.replace(
                    device, attributes={**device.attributes, **self._functions.attributes(tree, device)}
                )
                for device in devices
            ),
            warnings=(*left_out, *self._functions.loader.left_out),
            kept=left_out.kept,
        )

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Read bus, engine and port of each device.

        An unreadable card does not affect the others.
        """
        tree = tree.for_scan()
        # Each function is read once: a rise of its error counters is seen only at the first
        # reading.
        addresses = sorted({device.pci for device in devices if device.pci is not None})
        on_bus = {address: self._observe_function(tree, address) for address in addresses}
        return {
            device.name: self._observe_one(tree, device, on_bus[device.pci] if device.pci is not None else [])
            for device in devices
        }

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Give each port's node, once its region has the function that the claim asks for.

        The kit adds `TOPOBUS_FPGA_DEVICES`. The management engine's node is never given: through it
        a container could re-flash the card, load another region or inject errors for the next user.
        """
        refusal = unusable(tree, devices)
        if refusal is not None:
            return refusal
        edits = self._edits(tree, devices)
        if isinstance(edits, Refusal):
            return edits
        return self._functions.prepare(tree, devices, context, lambda: self._edits(tree, devices))

    def _edits(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, ContainerEdits] | Refusal:
        edits: dict[str, ContainerEdits] = {}
        for device in devices:
            card = read_dfl_card(tree, str(device.attributes["region"]))
            ports = _ports_of(card, device)
            if not ports:
                text = (
                    f"{device.name}: the card has no port {device.attributes.get('port')} any more (it went to a "
                    "virtual function)"
                )
                return refuse("device-not-offered", text, devices=(device.name,))
            where = str(device.pci) if device.pci is not None else card.region
            edits[device.name] = ContainerEdits(
                env={own_variable(device): f"{where}/{ports[0].number}" if device.partition_of else where},
                device_nodes=tuple(device_node(port.name) for port in ports),
            )
        return edits

    def _device(self, card: DflCard, port: DflPort | None, machine: Machine) -> Device:
        """Describe a port, or the card with all of its ports when no port is given."""
        facts: dict[str, AttributeValue] = {
            "region": card.region,
            "ports": card.port_count,
            "hasEngine": bool(card.engine),
        }
        if card.bitstream_id:
            facts["bitstreamId"] = card.bitstream_id[:64]
        if port is not None:
            facts["port"] = port.number
            if interface_id := card.interface_id(port):
                facts["interfaceId"] = interface_id[:64]
            if port.afu_id and not port.has_crashed:
                facts["afuId"] = port.afu_id[:64]
        whole = to_dns_label(f"{self.device_class}-{card.pci or card.region}")
        role = DeviceRole.COMPUTE if port is not None else DeviceRole.PARTITION_PARENT
        parent = whole if port is not None and card.port_count > 1 else ""
        name = f"{whole}-port-{port.number}" if port is not None and parent else whole
        function = next(
            (device for device in machine.pci_devices if card.pci is not None and device.address == card.pci), None
        )
        if function is None:
            return Device(
                name=name,
                device_class=self.device_class,
                driver=self.name,
                vendor="Intel",
                numa_nodes=None if card.numa_node is None else NodeSet(card.numa_node),
                pci=card.pci,
                parent=parent,
                partition_of=parent,
                role=role,
                attributes={"vendor": "Intel", **facts},
            )
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="Intel",
            model=_MODELS.get(function.device, ""),
            name=name,
            parent=parent,
            partition_of=parent,
            role=role,
            attributes=facts,
        )

    def _observe_function(self, tree: Tree, address: PciAddress) -> list[Observation]:
        try:
            return self._pci_health.observe(tree, address)
        except HardwareError as err:
            return [unreadable(err)]

    def _observe_one(self, tree: Tree, device: Device, on_bus: list[Observation]) -> list[Observation]:
        if any(
            observation.dimension is Dimension.PRESENCE or observation.state is HealthState.UNKNOWN
            for observation in on_bus
        ):
            return on_bus
        turn = self._functions.loader.turn(device.name)
        try:
            card = read_dfl_card(tree, str(device.attributes["region"]))
        except HardwareError as err:
            return [unreadable(err)]
        # A port that is being programmed or reset reads as a crashed one.
        ports = _ports_of(card, device) if self._functions.loader.was_quiet(device.name, turn) else ()
        observations = [
            *(_engine_error(error) for error in card.errors if error.value),
            *(_alarm(alarm) for alarm in card.alarms if alarm.value),
            *(observation for port in ports for observation in _port(port)),
        ]
        return [*on_bus, *observations]


def _engine_error(register: ErrorRegister) -> Observation:
    return sign(
        "engine-fatal-error" if register.name in _FATAL else "engine-error",
        f"the management engine holds {register.name} {register.value:#x}",
        register.path,
        f"{register.value:#x}",
        dimension=Dimension.LINK if register.name in _LINK else None,
    )


def _alarm(register: ErrorRegister) -> Observation:
    # At the critical temperature the hardware throttles by 100 %: the function stops until it is
    # cooler.
    is_critical = register.name.startswith("temp") and register.name.endswith("crit_alarm")
    return sign(
        "too-hot" if register.name.startswith("temp") else "power-limited",
        f"alarm {register.name} is on",
        register.path,
        register.value,
        state=HealthState.UNHEALTHY if is_critical else HealthState.DEGRADED,
    )


def _port(port: DflPort) -> list[Observation]:
    observations: list[Observation] = []
    if port.has_crashed:
        observations.append(
            sign(
                "function-crashed",
                f"{port.name}: the accelerator function's id reads as all ones: it does not answer",
                f"{port.path}/afu_id",
                port.afu_id,
            )
        )
    if port.errors is not None and port.errors.value:
        # The port blocks the function's traffic from its first error until it is cleared.
        observations.append(
            sign(
                "port-error",
                f"{port.name} holds error {port.errors.value:#x}",
                port.errors.path,
                f"{port.errors.value:#x}",
            )
        )
    if port.power_state:
        code = "power-stopped" if port.power_state == _STOPPED else "power-throttled"
        message = f"{port.name} is in power state AP{port.power_state}"
        observations.append(sign(code, message, f"{port.path}/power_state", port.power_state))
    return observations


def _ports_of(card: DflCard, device: Device) -> tuple[DflPort, ...]:
    """Find a device's ports.

    Empty for a device that is gone, or whose card has another number of ports now: then its name
    means another device.
    """
    is_parent = device.role is DeviceRole.PARTITION_PARENT
    if (bool(device.partition_of) or is_parent) != (card.port_count > 1):
        return ()
    return tuple(port for port in card.ports if is_parent or port.number == device.attributes.get("port"))


def _dfl_region(tree: Tree, device: Device, programmer: DflProgrammer) -> Region:
    """Read the region of a port.

    The device of a card with all of its ports can be reset, but not programmed.

    Errors: raises HardwareError when the port is gone, or a file of it cannot be read.
    """
    card = read_dfl_card(tree, str(device.attributes["region"]))
    ports = _ports_of(card, device)
    if not ports:
        raise HardwareError(
            f"{device.name}: the card has no port {device.attributes.get('port')} any more", path=card.path
        )
    port, is_one = ports[0], len(ports) == 1
    nodes = [str(tree.path(f"dev/{each_port.name}")) for each_port in ports]
    interface = normal_id(card.interface_id(port)) if is_one else ""
    obstacle = "" if is_one else "it is a card with several regions: ask for one of its ports"
    if is_one and not card.engine:
        obstacle = "the card's management engine is not on this node"

    def fits(bitstream: Bitstream) -> str:
        if bitstream.form not in (BitstreamForm.GBS, BitstreamForm.AOCX):
            return "it is for Xilinx cards"
        if not is_one:
            return obstacle
        return (
            ""
            if bitstream.interface == interface
            else f"its interface id is {bitstream.interface}, the region's {interface or 'unknown'}"
        )

    def reset() -> None:
        for node in nodes:
            programmer.reset(node)

    shown = normal_id(port.afu_id) if is_one and not port.has_crashed else ""
    return Region(
        device=device.name,
        shown=shown if shown.strip("0") else "",
        fault=next((fault for fault in map(_fault, ports) if fault), ""),
        obstacle=obstacle,
        fits=fits,
        program=lambda image: programmer.program(str(tree.path(f"dev/{card.engine}")), nodes[0], port.number, image),
        reset=reset,
    )


def _fault(port: DflPort) -> str:
    if port.has_crashed:
        return f"{port.name}: the function's id reads as all ones"
    return f"{port.name} holds error {port.errors.value:#x}" if port.errors is not None and port.errors.value else ""
