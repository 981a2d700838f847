"""Xilinx (AMD) FPGA cards: the functions of one slot are one card, named by the slot's function 0.

On a card that has several user functions, each of them is a device. An Alveo has a management
function (driver xclmgmt: loads shells, resets) and a user function (driver xocl: runs kernels). The
driver's marker file or name distinguishes them, else the device id. In a virtual machine the user
function may be the only one. A card that has its management function but not its user function
cannot compute and is Unhealthy.

The user function shows the uuid of the xclbin that was loaded through it. It shows what the
management function has loaded only after a user has opened the card (XRT, icap.c: the driver asks
the peer for the uuid when a user loads). A card has one region for all of its user functions, so a
card with several is never programmed for one of them.

Source: XRT's drivers (xocl and xclmgmt: user_pf, mgmt_pf, ready, dev_offline, instance (node
/dev/xclmgmt<instance>), rom VBNV and timestamp, firewall, xclbinuuid, interface_uuids); Xilinx'
Kubernetes device plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from topobus.devicekit.driver import Discovery, LongWork, PrepareContext
from topobus.devicekit.edits_text import (
    is_offered,
    own_variable,
    unusable,
)
from topobus.devicekit.function_health import FunctionHealth
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.pci import (
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    select_functions,
)
from topobus.fpga.bitstreams.values import Bitstream, BitstreamForm, normal_id, normal_platform
from topobus.fpga.function_hands import FunctionHands, LoadsFunctions
from topobus.fpga.programmer import KernelXrtProgrammer, XrtProgrammer
from topobus.fpga.region import Region
from topobus.sysfs.nodes import device_node
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, Observation
from topobus.values.health_reasons import sign
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress

__all__ = ["XilinxDriver"]

_XILINX = 0x10EE
# Other makers' cards with Xilinx' drivers, by exact id: their vendors make other things too.
# Source: XRT's list of PCI ids.
_OTHERS = {
    (0x13FE, 0x0065): "user",
    (0x13FE, 0x006C): "management",
    (0x13FE, 0x0077): "user",
    (0x13FE, 0x0078): "management",
    (0x1D0F, 0x1042): "user",
    (0x1D0F, 0xF000): "user",
    (0x1D0F, 0xF001): "user",
    (0x1D0F, 0xF010): "user",
    (0x1D0F, 0xF011): "user",
    (0x1D0F, 0xF040): "management",
}
_MAKERS = {0x13FE: "Advantech", 0x1D0F: "Amazon"}
# Products by the device id of their management function; the user function has the next id.
_MODELS = {
    0x5000: "Alveo U200",
    0x5004: "Alveo U250",
    0x5008: "Alveo U280",
    0x500C: "Alveo U280",
    0x5020: "Alveo U50",
    0x503C: "Alveo U30",
    0x5044: "VCK5000",
    0x5048: "VCK5000",
    0x504E: "Alveo U26z",
    0x5050: "Alveo U25",
    0x5058: "Alveo U55N",
    0x505C: "Alveo U55C",
    0x5060: "Alveo U50LV",
    0x506C: "Alveo U50C",
    0x5078: "V65",
    0x5094: "Alveo V70",
    0x513C: "Alveo U30",
}
_NETWORK_CLASS = 0x02
_DRIVERS = {"xocl": "user", "xuser": "user", "xclmgmt": "management", "xmgmt": "management"}


@dataclass(frozen=True)
class _Card:
    """The functions of one slot, in order, as one of its user functions sees it.

    `user` and `management` are None when the slot has no such function.
    """

    functions: tuple[PciDevice, ...]
    user: PciDevice | None
    management: PciDevice | None
    users: int
    """How many user functions the slot has."""

    @property
    def main(self) -> PciDevice:
        return self.user or self.functions[0]


class XilinxDriver(LoadsFunctions):
    """Finds and watches Xilinx cards.

    It keeps the PCIe error counters, and which slots had a management function or several user
    functions.
    """

    name = "xilinx"
    device_class = "fpga"

    def __init__(self, programmer: XrtProgrammer | None = None) -> None:
        """Program cards by XRT's drivers, unless a test gives its own programmer."""
        self._health = FunctionHealth()
        self._management: dict[str, PciAddress] = {}
        self._several: set[str] = set()
        self._programmer: XrtProgrammer = programmer or KernelXrtProgrammer()
        self._functions = FunctionHands(lambda tree, device: _xilinx_region(tree, device, self._programmer))

    def remember(self, devices: Sequence[Device]) -> None:
        """Learn from an earlier inventory what cannot be seen while a function of a slot is
        missing: the names of devices must not change with it.
        """
        for device in devices:
            whole = device.partition_of or device.name
            if device.partition_of:
                self._several.add(whole)
            management = device.attributes.get("managementPciBusID")
            if isinstance(management, str):
                self._management[whole] = PciAddress.parse(management)

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the cards by slot, and the user functions of the cards that have several."""
        functions = select_functions(tree, machine, vendors=(_XILINX, *_MAKERS), accept=_is_ours)
        slots: dict[tuple[int, int, int], list[PciDevice]] = {}
        for function in functions:
            slots.setdefault(function.address.key[:3], []).append(function)
        left_out = LeftOut()
        cards = [card for slot in sorted(slots) for card in _cards(tree, tuple(slots[slot]))]
        devices = tuple(self._device(tree, card) for card in cards if is_offered(tree, card.main.address, left_out))
        for card in cards:
            if card.user is not None and card.management is not None:
                left_out.keep(
                    card.management.address,
                    DeviceRole.MANAGEMENT,
                    "it loads shells and resets the card",
                    has_warning=False,
                )
        self._functions.loader.forget_absent({device.name for device in devices})
        return Discovery(
            devices=tuple(self._with_functions(tree, device) for device in devices),
            warnings=(*left_out, *self._functions.loader.left_out),
            kept=left_out.kept,
        )

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Read both functions of each card: presence, PCIe errors, shell, firewall.

        An unreadable card does not affect the others.
        """
        tree = tree.for_scan()
        # Each function is read once: several devices may share a management function, and a rise of
        # its error counters is seen only at the first reading.
        mains = {device.pci for device in devices}
        addresses = {address for device in devices for address in _functions_of(device)}
        turns = {device.name: self._functions.loader.turn(device.name) for device in devices}
        seen = self._health.observe(tree, addresses, lambda address: _look(tree, address, is_main=address in mains))
        return {
            device.name: self._observe_one(device, seen, turns[device.name])
            for device in devices
            if device.pci is not None
        }

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Give the render node of the user function, where the driver made one, once the card has
        the function that the claim asks for.

        The management node is never given: through it a container could re-flash or reset the card
        for the next user. Each card's variable holds its PCI address, for XRT's tools. The kit adds
        `TOPOBUS_FPGA_DEVICES`.
        """
        refusal = unusable(tree, devices)
        if refusal is not None:
            return refusal
        return self._functions.prepare(
            tree, devices, context, lambda: {device.name: self._edits(tree, device) for device in devices}
        )

    def _with_functions(self, tree: Tree, device: Device) -> Device:
        return msgspec.structs.replace(
            device, attributes={**device.attributes, **self._functions.attributes(tree, device, id_name="xclbinUuid")}
        )

    def _edits(self, tree: Tree, device: Device) -> ContainerEdits:
        # Only nodes of the user function are given, although the management function may have some.
        is_user = device.pci is not None and device.attributes.get("managementPciBusID") != str(device.pci)
        names = tree.names(f"{pci_folder(device.pci)}/drm") if device.pci is not None and is_user else ()
        nodes = [f"dri/{name}" for name in names if name.startswith("renderD")]
        return ContainerEdits(
            env={own_variable(device): str(device.pci)}, device_nodes=tuple(device_node(node) for node in nodes)
        )

    def _device(self, tree: Tree, card: _Card) -> Device:
        # Function 0 names the slot even when it is missing: the name must not move to the remaining
        # function.
        whole = pci_device_name(self.device_class, PciAddress(*card.main.address.key[:3], 0))
        if card.users > 1:
            self._several.add(whole)
        # Keep the parent when one of them has gone since: the name of the other must not change.
        parent = whole if whole in self._several and card.user is not None else ""
        if card.management is not None:
            self._management[whole] = card.management.address
        facts: dict[str, AttributeValue] = {"function": card.main.address.function} if parent else {}
        if whole in self._management:
            # Keep it when the function has gone since, so that `observe` still reports it as
            # missing.
            facts["managementPciBusID"] = str(self._management[whole])
        try:
            # The own shell comes first: the user functions of one card may have different shells.
            functions = sorted(card.functions, key=lambda function: function != card.main)
            shell = next((text for function in functions if (text := _rom(tree, function.address, "VBNV"))), "")
            stamp = _rom(tree, card.main.address, "timestamp")
            serial = next((text for function in card.functions if (text := _serial(tree, function.address))), "")
            if shell:
                facts["shell"] = shell[:64]
            if serial and parent:
                facts["serial"] = serial[:64]
            if stamp:
                facts["shellTimestamp"] = stamp[:64]
        except HardwareError:
            # The card is listed all the same: `observe` reports the unreadable file.
            serial = ""
        return pci_device(
            card.main,
            device_class=self.device_class,
            driver=self.name,
            vendor=_MAKERS.get(card.main.vendor, "Xilinx"),
            model=_model(card),
            uuid="" if parent else serial,
            name=f"{whole}-user-{card.main.address.function}" if parent else whole,
            parent=parent,
            partition_of=parent,
            attributes=facts,
        )

    def _observe_one(
        self, device: Device, by_function: Mapping[PciAddress, list[Observation]], turn: int
    ) -> list[Observation]:
        seen = [observation for address in _functions_of(device) for observation in by_function[address]]
        if not self._functions.loader.was_quiet(device.name, turn):
            # The driver takes the card offline while it is programmed, so only a card that left the
            # bus, and its link, are reported.
            seen = [
                observation for observation in seen if observation.dimension in (Dimension.PRESENCE, Dimension.LINK)
            ]
        if device.attributes.get("managementPciBusID") == str(device.pci) and not seen:
            seen.append(_without_user(device))
        return seen


def _is_ours(function: PciDevice) -> bool:
    if function.is_bridge:
        return False
    if function.vendor == _XILINX:
        # Xilinx makes network cards (SN1000, X3) as well: those are NICs unless XRT's driver has
        # them.
        return function.class_code >> 16 != _NETWORK_CLASS or function.driver in _DRIVERS
    return (function.vendor, function.device) in _OTHERS


def _cards(tree: Tree, functions: tuple[PciDevice, ...]) -> list[_Card]:
    """Make one card for a slot, or one for each of its user functions."""
    roles = {function.address: _role(tree, function) for function in functions}
    users: list[PciDevice | None] = [function for function in functions if roles[function.address] == "user"]
    management = next((function for function in functions if roles[function.address] == "management"), None)
    return [_Card(functions=functions, user=user, management=management, users=len(users)) for user in users or [None]]


def _role(tree: Tree, function: PciDevice) -> str:
    """Return a function's role, or "" when nothing shows it (an FPGA design of the user's own)."""
    folder = pci_folder(function.address)
    if tree.exists(f"{folder}/user_pf"):
        return "user"
    if tree.exists(f"{folder}/mgmt_pf"):
        return "management"
    if function.driver in _DRIVERS:
        return _DRIVERS[function.driver]
    if function.vendor == _XILINX:
        return "management" if function.device in _MODELS else "user" if function.device - 1 in _MODELS else ""
    return _OTHERS.get((function.vendor, function.device), "")


def _model(card: _Card) -> str:
    for function in card.functions:
        if function.vendor == _XILINX:
            model = _MODELS.get(function.device) or _MODELS.get(function.device - 1)
            if model:
                return model
    return "F1" if card.main.vendor == 0x1D0F else ""


def _functions_of(device: Device) -> list[PciAddress]:
    """List the functions that a card needs, the user function first."""
    pci_addresses = [device.pci] if device.pci is not None else []
    management = device.attributes.get("managementPciBusID")
    if isinstance(management, str) and management != str(device.pci):
        pci_addresses.append(PciAddress.parse(management))
    return pci_addresses


def _rom(tree: Tree, address: PciAddress, file: str) -> str:
    return _below(tree, address, "rom.", file)


def _serial(tree: Tree, address: PciAddress) -> str:
    return _below(tree, address, "xmc.", "serial_num")


def _below(tree: Tree, address: PciAddress, prefix: str, file: str) -> str:
    """Read a file of the first part whose name begins with `prefix`. The driver numbers its parts
    (`rom.u.22529`).
    """
    folder = pci_folder(address)
    texts = (tree.read(f"{folder}/{name}/{file}") for name in tree.names(folder) if name.startswith(prefix))
    return next((text for text in texts if text), "")


def _look(tree: Tree, address: PciAddress, *, is_main: bool) -> tuple[Observation | None, ...]:
    unbound = observe_kernel_driver(tree, address) if is_main else ()
    return (*unbound, _offline(tree, address), _not_ready(tree, address), _firewall(tree, address))


def _offline(tree: Tree, address: PciAddress) -> Observation | None:
    path = f"{pci_folder(address)}/dev_offline"
    value = tree.read_int(path, 0)
    if not value:
        return None
    return sign(
        "device-offline",
        f"the driver has taken {address} offline (a reset that did not end, or a firewall trip)",
        path,
        value,
    )


def _not_ready(tree: Tree, address: PciAddress) -> Observation | None:
    path = f"{pci_folder(address)}/ready"
    value = tree.read_int(path, 0)
    if value is None or value != 0:
        return None
    return sign(
        "shell-not-ready", f"the shell of {address} is not ready: loading, or it does not fit the driver", path, value
    )


def _firewall(tree: Tree, address: PciAddress) -> Observation | None:
    """Report an AXI firewall that cut the user's logic off after an illegal access."""
    folder = pci_folder(address)
    for name in tree.names(folder):
        if not name.startswith("firewall."):
            continue
        path = f"{folder}/{name}/detected_level"
        level = tree.read_int(path, 0)
        if level:
            return sign("firewall-tripped", f"AXI firewall {level} of {address} has tripped", path, level)
    return None


def _without_user(device: Device) -> Observation:
    return sign(
        "user-function-missing",
        f"slot {device.pci} shows its management function alone: nothing can compute there",
        pci_folder(device.pci) if device.pci else "",
        "management only",
    )


def _xilinx_region(tree: Tree, device: Device, programmer: XrtProgrammer) -> Region:
    """Read a card's region.

    Errors: raises HardwareError when the card is gone, or a file of it cannot be read.
    """
    if device.pci is None or not tree.exists(pci_folder(device.pci)):
        raise HardwareError(f"{device.name} is no longer on the bus", path=pci_folder(device.pci) if device.pci else "")
    management = _management(device)
    instance = tree.read_int(f"{pci_folder(management)}/instance", 0) if management is not None else None
    obstacle = ""
    if device.partition_of:
        obstacle = "its region is that of several user functions, whose users would lose theirs"
    elif management is None or instance is None:
        obstacle = "the card's management function is not on this node, or its driver (xclmgmt) is not loaded"
    folders = [pci_folder(address) for address in (device.pci, management) if address is not None]
    interfaces = {
        normal_id(line) for folder in folders for line in (tree.read(f"{folder}/interface_uuids") or "").split()
    }
    platform = normal_platform(str(device.attributes.get("shell", "")))
    built = _number(str(device.attributes.get("shellTimestamp", "")))
    shown = normal_id(tree.read(f"{pci_folder(device.pci)}/xclbinuuid") or "")

    def fits(bitstream: Bitstream) -> str:
        if bitstream.form is not BitstreamForm.XCLBIN:
            return "it is for Intel's cards"
        if bitstream.interface and interfaces:
            return (
                ""
                if bitstream.interface in interfaces
                else f"its interface uuid is {bitstream.interface}, the shell's {_listed(interfaces)}"
            )
        if not platform or normal_platform(bitstream.platform) != platform:
            return f"its platform is {bitstream.platform or 'unknown'}, the card's shell {platform or 'unknown'}"
        if bitstream.platform_timestamp and built and bitstream.platform_timestamp != built:
            return (
                f"it was built for the shell of {bitstream.platform_timestamp:#x}, the card has the one of {built:#x}"
            )
        return ""

    return Region(
        device=device.name,
        shown=shown if shown.strip("0") else "",
        shows_at_once=False,
        obstacle=obstacle,
        fits=fits,
        program=lambda image: programmer.program(str(tree.path(f"dev/xclmgmt{instance}")), image),
    )


def _management(device: Device) -> PciAddress | None:
    text = device.attributes.get("managementPciBusID")
    return PciAddress.parse(text) if isinstance(text, str) and text != str(device.pci) else None


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _listed(interfaces: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(interfaces))
