"""Network interfaces that are no PCI function of their own: veth, bridges and their ports, bonds,
VLANs, tun and tap, scalable functions.

The operator lists those that may be offered (`interfaces.offer`, by default none).

A device is named after its interface (`nic-tenant-0`): the operator listed that name, and it is as
stable over reboots as the interface's own name. When the name is no DNS label, digits of a digest
are appended, so that `br0.5` and `br0-5` are two devices. The MAC address is an attribute, for
selectors.

These are never offered, and the inventory's warnings name them where a rule includes them:
- the loopback;
- an interface of a PCI function, which plugin `pci-netdev` offers;
- an interface below the node's default route;
- an interface over which the node has an address or a route, or a port of a bridge or bond (as the
  ends of the node's other pods are), unless a rule names it exactly.

An interface that the operator shares (`interfaces.share`) is a device that several claims may have
at once, with one share each (capacity `shares`). Each pod gets a child of it, whose link is the
parent's. A shared interface may be a PCI function's, and the one below the default route, because
it stays on the host.

An interface that an OCI hook has put into a container (`topobus oci`) stays in the list, by the hook's
record on this host: it is not gone.

The NUMA node is unknown, except for an interface of a PCI function, so alignment ignores the
device.

Source: Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from topobus.devicekit.driver import Discovery, PrepareContext
from topobus.devicekit.edits_text import own_variable, unreadable
from topobus.devicekit.pci import pci_device_name
from topobus.nic.config import InterfaceSettings, SharedInterface
from topobus.nic.interfaces.interface_hands import SHARE_MODE, SHARE_SUBMODE
from topobus.nic.interfaces.rules.interface_config import interface_of
from topobus.nic.oci_hook import handed_over
from topobus.nic.plugins.attaching import AttachesInterfaces
from topobus.nic.plugins.link_health import BestSpeeds, Settling, judge_carrier, judge_duplex
from topobus.nic.plugins.link_readings import link_readings
from topobus.nic.plugins.vendors import model_name, vendor_name
from topobus.sysfs.net import NetInterface, default_route_interfaces, read_interface
from topobus.sysfs.netdevs import NetDevice, addressed_interfaces, interface_path, list_net_devices, read_net_device
from topobus.sysfs.tree import Tree
from topobus.values.counters import CapacityPolicy
from topobus.values.device import AttributeValue, Device
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.health_reasons import sign
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine, PciDevice
from topobus.values.names import is_dns_label, to_dns_label
from topobus.values.outcome import Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading

__all__ = ["LinuxNetdevDriver", "device_name"]

# Hexadecimal digits appended to a name that had to be changed: 2^24 names, of which a node has
# tens.
_DIGEST_DIGITS = 6
# A DRA attribute's longest text (KEP-4381).
_TEXT_LIMIT = 64
# The capacity of a shared interface: children that pods may have.
_SHARES = "shares"


class LinuxNetdevDriver(AttachesInterfaces):
    """Finds and watches interfaces that the operator lists."""

    name = "linux-netdev"
    device_class = "nic"

    def __init__(self, settings: InterfaceSettings | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """Make a driver.

        Shapes: now — the time; tests give their own.
        """
        super().__init__(settings)
        self._best_speeds = BestSpeeds()
        self._settling = Settling(now)

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the interfaces that the operator's rules include, by name."""
        if not self._settings.offer and not self._settings.share:
            return Discovery()
        tree = tree.for_scan()
        routed, addressed = default_route_interfaces(tree), addressed_interfaces(tree)
        functions = {function.address: function for function in machine.pci_devices}
        left_out: list[str] = []
        devices: list[Device] = []
        for name in list_net_devices(tree):
            try:
                net_device = read_net_device(tree, name)
            except HardwareError as err:
                if self._settings.shared(name) or any(
                    rule.is_exact and rule.name == name for rule in self._settings.offer
                ):
                    left_out.append(f"{name} is not offered: {err.message}")
                continue
            if net_device is None or name == "lo":
                continue
            shared = self._settings.shared(name)
            why = None if shared is not None else self._why_not(tree, net_device, routed=routed, addressed=addressed)
            if why is None:
                device = self._device(net_device, functions)
                devices.append(device if shared is None else _with_shares(device, shared))
            elif why:
                left_out.append(f"{name} is not offered: {why}")
        there = {interface_of(device) for device in devices}
        devices += [self._device(lent, functions) for lent in self._lent() if lent.interface.name not in there]
        left_out += [
            f"{shared.name} is not shared: the node has no such interface"
            for shared in self._settings.share
            if shared.name not in there
        ]
        return Discovery(devices=tuple(sorted(devices, key=lambda device: device.name)), warnings=tuple(left_out))

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe presence and link of each interface.

        An unreadable interface does not affect the others.
        """
        tree = tree.for_scan()
        self._settling.begin_look()
        seen = {device.name: self._observe_one(tree, device) for device in devices}
        self._settling.end_look()
        return seen

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read the counters of each interface."""
        tree = tree.for_scan()
        return {device.name: _readings(tree, device) for device in devices}

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Set each device's own variable to its interface.

        An interface that is missing is refused, unless this owner's pod has it.
        """
        names = [
            device.name for device in devices if not _is_there(tree, device) and device.name not in context.attached
        ]
        if names:
            text = f"no such interface on the node any more: {', '.join(sorted(names))}"
            return refuse("device-gone", text, devices=tuple(sorted(names)))
        return {
            device.name: ContainerEdits(env={own_variable(device): self._name(device, context)}) for device in devices
        }

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return True: nothing changes on an interface before it is attached."""
        return True

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Do nothing: preparing changes nothing on the interface."""

    def _name(self, device: Device, context: PrepareContext) -> str:
        return next(iter(self.names_in_container(device, context)), interface_of(device))

    def _lent(self) -> list[NetDevice]:
        """List the interfaces of our rules that OCI hooks put into containers: they are away and not
        gone.
        """
        if self._hands is None:
            return []
        return [
            NetDevice(
                interface=NetInterface(path=interface_path(name), name=name, mac=state.mac, mtu=state.mtu),
                kind=state.kind,
            )
            for name, state in handed_over().items()
            if any(rule.fits(name, state.kind) for rule in self._settings.offer)
        ]

    def _why_not(
        self, tree: Tree, net_device: NetDevice, *, routed: frozenset[str], addressed: frozenset[str]
    ) -> str | None:
        """Return why an interface is not offered: None when it is, "" when no rule includes it."""
        name = net_device.interface.name
        rules = [rule for rule in self._settings.offer if rule.fits(name, net_device.kind)]
        if not rules:
            return ""
        is_exact = any(rule.is_exact for rule in rules)
        if net_device.kind == "pci":
            # Patterns include many interfaces, so only a rule with the exact name gets a warning.
            return (
                f"it belongs to PCI function {net_device.function}, which plugin pci-netdev offers" if is_exact else ""
            )
        if name in routed:
            return "the default route of this node goes over it"
        if name in addressed and not is_exact:
            return "the node has an address or a route over it, and no rule names it exactly"
        master = tree.link_name(f"{interface_path(name)}/master")
        if master and not is_exact:
            # The ends of the node's other pods look like this: ports of their network's bridge.
            return f"it is a port of {master}, and no rule names it exactly"
        return None

    def _device(self, net_device: NetDevice, functions: Mapping[PciAddress, PciDevice]) -> Device:
        interface = net_device.interface
        function = None if net_device.function is None else functions.get(net_device.function)
        attributes: dict[str, AttributeValue] = {"interface": interface.name, "kind": net_device.kind[:_TEXT_LIMIT]}
        if interface.mac:
            attributes["mac"] = interface.mac[:_TEXT_LIMIT]
        if interface.mtu is not None:
            attributes["mtu"] = interface.mtu
        if interface.speed_mbps is not None:
            attributes["linkSpeed"] = interface.speed_mbps
        if net_device.driver:
            attributes["kernelDriver"] = net_device.driver[:_TEXT_LIMIT]
        return Device(
            name=device_name(interface.name),
            device_class=self.device_class,
            driver=self.name,
            vendor="" if function is None else vendor_name(function.vendor),
            model=_model(net_device, function),
            numa_nodes=None if function is None or function.numa_node is None else NodeSet(function.numa_node),
            pci=net_device.function if net_device.kind == "pci" and function is not None else None,
            pcie_root="" if function is None else function.root,
            pcie_path=() if function is None else function.path,
            pcie_switch=None if function is None else function.switch,
            parent=""
            if function is None or net_device.kind == "pci"
            else pci_device_name(self.device_class, function.address),
            attributes=attributes,
        )

    def _observe_one(self, tree: Tree, device: Device) -> list[Observation]:
        path = interface_path(interface_of(device))
        try:
            if not _is_there(tree, device):
                self._best_speeds.forget(device.name)
                is_lent = any(lent.interface.name == interface_of(device) for lent in self._lent())
                return [] if is_lent else [_gone(device, path)]
            interfaces = (read_interface(tree, path, interface_of(device), only_link=True),)
        except HardwareError as err:
            return [unreadable(err)]
        lost = self._settling.lost((interface.path, interface.carrier) for interface in interfaces)
        link = (
            judge_carrier(interfaces, lost),
            self._best_speeds.judge(device.name, interfaces),
            judge_duplex(interfaces),
        )
        return [observation for observation in link if observation is not None]


def device_name(interface: str) -> str:
    """Name the device of an interface.

    >>> device_name("tenant-0"), device_name("br0.5"), device_name("a--b")
    ('nic-tenant-0', 'nic-br0-5-cf44cf', 'nic-a-b-90827a')
    """
    name = f"nic-{interface}"
    # `--` in a name marks the devices of other vendors' plugins.
    if is_dns_label(name) and "--" not in name:
        return name
    return f"{to_dns_label(name)}-{hashlib.sha256(interface.encode()).hexdigest()[:_DIGEST_DIGITS]}"


def _model(net_device: NetDevice, function: PciDevice | None) -> str:
    """Return the model of an interface. A card's own interface, which may be shared, has the card's
    model.
    """
    name = "" if function is None else model_name(function.vendor, function.device)
    return name or ("" if function is not None and net_device.kind == "pci" else net_device.kind[:_TEXT_LIMIT])


def _with_shares(device: Device, shared: SharedInterface) -> Device:
    """Make a device shareable: several claims may have it, and each takes one share."""
    attributes: dict[str, AttributeValue] = {**device.attributes, SHARE_MODE: shared.mode}
    if shared.submode:
        attributes[SHARE_SUBMODE] = shared.submode
    return structs.replace(
        device,
        attributes=attributes,
        capacity={_SHARES: shared.shares},
        capacity_policies={_SHARES: CapacityPolicy(default=1, valid_values=(1,))},
        allows_multiple=True,
    )


def _readings(tree: Tree, device: Device) -> list[Reading]:
    try:
        is_there = _is_there(tree, device)
    except HardwareError:
        # `observe` reports what cannot be read.
        return []
    return link_readings(tree, [interface_path(interface_of(device))]) if is_there else []


def _is_there(tree: Tree, device: Device) -> bool:
    interface = interface_of(device)
    return bool(interface) and "/" not in interface and tree.exists(f"{interface_path(interface)}/ifindex")


def _gone(device: Device, path: str) -> Observation:
    return sign("device-gone", f"the node has no interface {interface_of(device)} any more", path, "absent")
