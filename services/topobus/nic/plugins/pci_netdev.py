"""Network cards on PCI: any function with a network class, an interface or an RDMA device. Physical
and virtual functions.

Containers get the RDMA device nodes, and pods the interface in their network namespace by
`interface_hands`. A function that is bound to vfio-pci has no interface: its role is passthrough,
and its containers get its nodes alone.

These functions are not offered, and the inventory's warnings name them:
- a card that carries the machine's default route, directly or below a bond, bridge or VLAN: the
  node would lose its network;
- a physical function with virtual functions enabled: it is shared through them, each of which is
  offered instead and names it as its parent. With `partitions.parents: counted` it is offered
  beside them, but never held beside one of them. With `partitions.virtual_functions` it is also
  offered while they are off, and cut when a claim gets one;
- a function that pci-stub or the like holds, for no user or for a program without VFIO.

Health is that of every PCI function (topobus.devicekit.pci) and of the link (link_health). An
interface that is not visible (moved into a pod's network namespace) or switched off is no fault:
allocated and idle cards look like that. A virtual function is as healthy as its physical one
(topobus.devicekit.function_health) and that one's link.

Source: Documentation/ABI/testing/sysfs-class-net, stable/sysfs-class-infiniband; the SR-IOV device
plugin for which functions to leave out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from topobus.devicekit.counter_rises import CounterRises
from topobus.devicekit.device_record import DeviceRecord
from topobus.devicekit.driver import Discovery, HostServices, LongWork, PrepareContext
from topobus.devicekit.edits_text import gone, own_variable
from topobus.devicekit.function_health import FunctionHealth, is_gone, physical_function
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.partitioning.function_cuts import FunctionCuts
from topobus.devicekit.partitioning.on_demand_functions import OnDemandFunctions
from topobus.devicekit.passthrough.function_users import host_uses
from topobus.devicekit.pci import (
    awaits_driver,
    function_role,
    is_passthrough_driver,
    is_vfio,
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    select_functions,
)
from topobus.nic.host_services import NicServices
from topobus.nic.host_use import function_users, lacks_interface
from topobus.nic.interfaces.interface_hands import read_config
from topobus.nic.interfaces.rules.interface_config import InterfaceConfig, interface_of
from topobus.nic.netlink.vf_settings import VfPlace
from topobus.nic.plugins.attaching import AttachesInterfaces
from topobus.nic.plugins.link_health import (
    BestSpeeds,
    Settling,
    judge_carrier,
    judge_duplex,
    judge_errors,
    judge_parent,
    judge_rdma_ports,
    rdma_links,
)
from topobus.nic.plugins.link_readings import link_readings
from topobus.nic.plugins.vendors import model_name, vendor_name
from topobus.sysfs.boot import read_boot_id
from topobus.sysfs.net import (
    FunctionPorts,
    NetInterface,
    default_route_interfaces,
    function_interfaces,
    function_ports,
    read_interface,
)
from topobus.sysfs.netdevs import interface_path
from topobus.sysfs.nodes import device_node
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.rdma import RdmaPort, function_rdma_devices, function_rdma_ports
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Reason, Refusal, refuse
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading
from topobus.values.request import OwnerKind

__all__ = ["PciNetdevDriver"]

# The upper byte of the class code: network controllers (Ethernet 0x0200, InfiniBand 0x0207,
# wireless 0x0280 …).
_NETWORK_CLASS = 0x02
# The connection manager's node: one for the machine, needed beside any verbs device
# (Documentation/infiniband).
_RDMA_CM = "infiniband/rdma_cm"
# A step in a device's record: its RDMA devices as they were before they moved into a pod.
_RDMA_NODES = "rdma-nodes"


class PciNetdevDriver(AttachesInterfaces):
    """Finds and watches PCI network functions.

    It keeps the error counters and best link speeds that it saw, and nothing else.
    """

    name = "pci-netdev"
    device_class = "nic"

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Make a driver.

        Shapes: now — the time; tests give their own.
        """
        super().__init__()
        self._health = FunctionHealth(is_speed_steady=True)
        self._best_speeds = BestSpeeds()
        self._settling = Settling(now)
        self._function_counts: dict[PciAddress, int | None] = {}
        """By physical function: how many virtual ones it had at the last look."""
        self._counters = CounterRises()
        self._counted: frozenset[PciAddress] = frozenset()
        self._on_demand = OnDemandFunctions("nic", FunctionCuts(function_users, lacks_interface))

    @property
    def on_demand_functions(self) -> OnDemandFunctions:
        """Makes virtual functions by the operator's rules."""
        return self._on_demand

    def configure(self, host: HostServices) -> None:
        """Take the service's settings."""
        super().configure(host)
        self._counted = host.counted if isinstance(host, NicServices) else frozenset()

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the network functions that may be allocated, by address."""
        tree = tree.for_scan()
        routed = default_route_interfaces(tree)
        functions = select_functions(tree, machine, accept=lambda device: _is_network(tree, device))
        left_out = LeftOut()
        devices = self._on_demand.look(
            tree,
            machine,
            functions,
            left_out,
            uses=partial(self._uses, tree),
            describe=lambda function: self._device(function, {}),
            offer=lambda function: self._discover_one(tree, function, routed, left_out),
        )
        return Discovery(devices=devices, warnings=tuple(left_out), kept=left_out.kept, uncut=self._on_demand.uncut)

    def _uses(self, tree: Tree, address: PciAddress) -> tuple[str, ...]:
        interfaces = function_interfaces(tree, address, only_link=True)
        shared = (f"pods share {each.name}" for each in interfaces if self._settings.shared(each.name))
        counted = ["the setting virtual_functions keeps its number"] if address in self._counted else []
        return (*host_uses(tree, address), *shared, *counted)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe presence, PCIe errors and link of each function.

        An unreadable function does not affect the others.
        """
        tree = tree.for_scan()
        addresses = self._on_demand.present(tree, devices)
        self._settling.begin_look()
        restarting = self._restarting(tree, addresses.values())
        seen = self._health.observe(
            tree, addresses.values(), lambda address: self._observe_one(tree, address, restarting)
        )
        self._settling.end_look()
        for address, observations in seen.items():
            if is_gone(observations):
                self._best_speeds.forget(str(address))
        return {name: seen[address] for name, address in addresses.items()}

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read the counters of each function's interfaces and RDMA ports."""
        tree = tree.for_scan()
        return {device.name: _readings(tree, device.pci) for device in devices if device.pci is not None}

    def _restarting(self, tree: Tree, addresses: Iterable[PciAddress]) -> frozenset[PciAddress]:
        """Name the physical functions, and with them their virtual ones, whose links are coming up
        again: a change of the number of virtual functions takes them down.
        """
        parents: dict[PciAddress, PciAddress] = {}
        counts: dict[PciAddress, int | None] = {}
        for address in addresses:
            try:
                parent = parents[address] = physical_function(tree, address) or address
                if parent not in counts:
                    counts[parent] = tree.read_int(f"{pci_folder(parent)}/sriov_numvfs")
            except HardwareError:
                # `_observe_one` reports the unreadable file.
                parents[address] = address
        before, self._function_counts = self._function_counts, counts
        changing = {parent for parent in set(parents.values()) if self._on_demand.cuts.locks.is_changing(parent)}
        changing |= {parent for parent, count in counts.items() if parent in before and before[parent] != count}
        return frozenset(changing | {address for address, parent in parents.items() if parent in changing})

    def check(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Refusal | None:
        """Refuse a configuration that these devices cannot have.

        A virtual function that is yet to be made is checked once it exists.
        """
        there = [device for device in devices if device.pci is None or not self._on_demand.is_absent(tree, device.pci)]
        return super().check(tree, there, context) if there else None

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Give each function's nodes and variables.

        Virtual functions that are cut on demand are made first.
        """
        return self._on_demand.prepare(tree, devices, context, partial(self._edits, tree, devices, context))

    def only_reads(self, devices: Sequence[Device]) -> bool:
        """Return whether preparing changes nothing: none of the devices is of a card that is cut on
        demand.
        """
        return not self._on_demand.has_any(devices)

    def _edits(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal:
        """Give RDMA nodes (or the VFIO group), and variables with addresses, interfaces and RDMA
        devices.

        The kit adds `TOPOBUS_NIC_DEVICES`.
        """
        edits: dict[str, ContainerEdits] = {}
        interfaces: list[str] = []
        rdma: list[str] = []
        shared_nodes: set[str] = set()
        functions = sorted(
            ((device, device.pci) for device in devices if device.pci is not None), key=lambda pair: pair[1]
        )
        refusal = gone(tree, devices)
        refusal = (
            refusal or _refuse_other_roles(tree, devices) or self._refuse_without_interface(tree, devices, context)
        )
        if refusal is not None:
            return refusal
        for device, address in functions:
            names, nodes = self._rdma_of(tree, device, address, context)
            if names:
                rdma.extend(names)
                shared_nodes.add(_RDMA_CM)
            if device.role is DeviceRole.PASSTHROUGH and (group := _vfio_group(tree, address)) is not None:
                nodes.append(f"vfio/{group}")
                shared_nodes.add("vfio/vfio")
            interfaces.extend(
                self.names_in_container(device, context)
                or (interface.name for interface in function_ports(tree, address).interfaces)
            )
            edits[device.name] = ContainerEdits(
                env={own_variable(device): str(address)}, device_nodes=tuple(map(device_node, nodes))
            )
        env = {"TOPOBUS_NIC_PCI_ADDRESSES": ",".join(str(address) for _, address in functions)}
        if interfaces:
            env["TOPOBUS_NIC_INTERFACES"] = ",".join(interfaces)
        if rdma:
            env["TOPOBUS_NIC_RDMA_DEVICES"] = ",".join(rdma)
        return {**edits, "": ContainerEdits(env=env, device_nodes=tuple(map(device_node, sorted(shared_nodes))))}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Forget what was noted.

        With the last owner of a card that is cut on demand, the virtual functions may be removed.
        """
        for device in devices:
            context.records.get(device.name, DeviceRecord()).undone(_RDMA_NODES)
            self._on_demand.undo(tree, device, context)

    def _refuse_without_interface(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Refusal | None:
        """Refuse claims whose pods would start without the interface that they want: the inventory
        has none, or another one.
        """
        reasons: list[Reason] = []
        for device in devices if self._hands is not None and context.owner.kind is OwnerKind.CLAIM else ():
            config = read_config(device, context)
            # A configuration that cannot be read was refused by `check`.
            if (
                device.pci is None
                or device.name in context.attached
                or isinstance(config, Refusal)
                or config.stays_on_host
            ):
                continue
            reasons += _lacking_interface(tree, device, device.pci, is_asked=config != InterfaceConfig())
        return Refusal(reasons=tuple(reasons)) if reasons else None

    def _rdma_of(
        self, tree: Tree, device: Device, address: PciAddress, context: PrepareContext
    ) -> tuple[list[str], list[str]]:
        """Return names and nodes of a function's RDMA devices.

        For those that move into the pod with the interface, they are those from before the move.
        """
        record = context.records.get(device.name)
        noted = record.step(_RDMA_NODES) if record is not None else None
        boot = read_boot_id(tree)
        if noted is not None and noted.before["boot"] == boot:
            return list(noted.before["names"]), list(noted.before["nodes"])
        rdma_devices = function_rdma_devices(tree, address)
        names = [rdma_device.name for rdma_device in rdma_devices]
        nodes = [node for rdma_device in rdma_devices for node in rdma_device.nodes]
        if record is not None and noted is not None:
            # It is of another boot, in which the nodes had other numbers.
            record.undone(_RDMA_NODES)
        if record is not None and names and self.takes_rdma_along(device, context):
            # In a pod's namespace they are invisible, and kubelet asks again for pods that run.
            record.intend(_RDMA_NODES, {"boot": boot, "names": names, "nodes": nodes})
            record.done(_RDMA_NODES)
        return names, nodes

    def _find_vf(self, tree: Tree, device: Device) -> VfPlace | Refusal | None:
        link = tree.link_name(f"{pci_folder(device.pci)}/physfn") if device.pci is not None else ""
        if device.pci is None or not link:
            return None
        folder = pci_folder(link)
        indexes = [
            name
            for name in tree.names(folder)
            if name.startswith("virtfn") and tree.link_name(f"{folder}/{name}") == str(device.pci)
        ]
        physical, own = (
            function_ports(tree, address, only_link=True) for address in (PciAddress.parse(link), device.pci)
        )
        port = _port_of(tree, physical, own)
        if not indexes or isinstance(port, str):
            why = port if isinstance(port, str) else f"{link} does not list it"
            text = f"vf: its physical function {link} cannot configure it: {why}"
            return refuse("vf-gone", text, device=device.name, physical=link)
        return VfPlace(physical=port.name, index=int(indexes[0].removeprefix("virtfn")))

    def _find_rdma(self, tree: Tree, device: Device) -> Sequence[str]:
        if device.pci is None:
            return ()
        return tuple(rdma_device.name for rdma_device in function_rdma_devices(tree, device.pci))

    def _discover_one(
        self, tree: Tree, function: PciDevice, routed: frozenset[str], left_out: LeftOut
    ) -> Device | None:
        try:
            interfaces = function_interfaces(tree, function.address)
            total = tree.read_int(f"{pci_folder(function.address)}/sriov_totalvfs")
            rdma = function_rdma_devices(tree, function.address)
            role, why = function_role(tree, function.address)
            group = _vfio_group(tree, function.address) if role is DeviceRole.PASSTHROUGH else None
        except HardwareError:
            # The device is listed all the same: `observe` reports the unreadable file, and other
            # devices are not affected.
            return self._device(function, {})
        shared = [interface.name for interface in interfaces if self._settings.shared(interface.name)]
        if shared:
            left_out.append(
                f"{function.address} is not offered as a whole: pods share its interface {', '.join(shared)}"
            )
            return None
        if any(interface.name in routed for interface in interfaces):
            left_out.keep(function.address, DeviceRole.MANAGEMENT, "the default route of this node goes over it")
            return None
        if role is DeviceRole.PARTITION_PARENT and self._on_demand.is_cut(function):
            role = DeviceRole.COMPUTE
        is_hidden = role is DeviceRole.PARTITION_PARENT and not self.host.offers_parents
        if is_hidden or (role is DeviceRole.PASSTHROUGH and not group):
            left_out.keep(function.address, role, why)
            return None
        facts: dict[str, AttributeValue] = {"rdma": bool(rdma), "sriovVf": function.physfn is not None}
        if total is not None:
            facts["totalVfs"] = total
        ports = function_ports(tree, function.address)
        if ports.unclear:
            left_out.append(f"{function.address} is offered without its interface: {ports.unclear}")
        facts.update(_interface_facts(ports))
        physical = function_ports(tree, function.physfn, only_link=True).first if function.physfn is not None else None
        if physical is not None:
            facts["physicalInterface"] = physical.name
        if rdma:
            facts["rdmaDevice"] = ",".join(rdma_device.name for rdma_device in rdma)[:64]
            layers = {port.link_layer for rdma_device in rdma for port in rdma_device.ports if port.link_layer}
            if len(layers) == 1:
                facts["linkLayer"] = layers.pop()
        return self._device(function, facts, role)

    def _device(
        self, function: PciDevice, facts: dict[str, AttributeValue], role: DeviceRole = DeviceRole.COMPUTE
    ) -> Device:
        parent = "" if function.physfn is None else pci_device_name(self.device_class, function.physfn)
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor=vendor_name(function.vendor),
            model=model_name(function.vendor, function.device),
            parent=parent,
            partition_of=parent if self.host.offers_parents or self._on_demand.is_cut(function) else "",
            role=role,
            attributes=facts,
        )

    def _observe_one(
        self, tree: Tree, address: PciAddress, restarting: Collection[PciAddress]
    ) -> tuple[Observation | None, ...]:
        driverless = observe_kernel_driver(tree, address)
        own = function_ports(tree, address, only_link=True)
        interfaces = own.interfaces
        ports = [port for port in function_rdma_ports(tree, address) if not _is_of_others(tree, port, own)]
        parent = self._observe_parent_link(tree, address, restarting)
        errors = judge_errors(tree, interfaces, self._counters)
        # The driver of a new function binds a moment later, as a link comes up later.
        driver_path = f"{pci_folder(address)}/driver"
        links = (
            (driver_path, not driverless),
            *((interface.path, interface.carrier) for interface in interfaces),
            *rdma_links(interfaces, ports),
        )
        lost = self._settling.lost(links, is_restarting=address in restarting)
        return (
            *(driverless if driver_path in lost else ()),
            judge_carrier(interfaces, lost),
            judge_rdma_ports(interfaces, ports, lost),
            self._best_speeds.judge(str(address), interfaces, ports),
            judge_duplex(interfaces),
            errors,
            parent,
        )

    def _observe_parent_link(
        self, tree: Tree, address: PciAddress, restarting: Collection[PciAddress]
    ) -> Observation | None:
        """Observe the carrier of a virtual function's physical one.

        None for a function that is no virtual one.
        """
        parent = physical_function(tree, address)
        if parent is None:
            return None
        interfaces = _with_aggregated(tree, function_ports(tree, parent, only_link=True).interfaces)
        lost = self._settling.lost(
            ((interface.path, interface.carrier) for interface in interfaces), is_restarting=parent in restarting
        )
        return judge_parent(parent, interfaces, lost)


def _refuse_other_roles(tree: Tree, devices: Sequence[Device]) -> Refusal | None:
    """Refuse functions whose role has changed since they were offered: a claim for an interface
    must not get a VFIO group, and the reverse.
    """
    changed: dict[str, str] = {}
    for device in devices:
        if device.pci is not None:
            role, why = function_role(tree, device.pci)
            if role is not device.role or (role is DeviceRole.PASSTHROUGH and _vfio_group(tree, device.pci) is None):
                changed[device.name] = why or f"it was offered for {device.role}, and is for {role} now"
    if not changed:
        return None
    text = "; ".join(f"{name}: {why}" for name, why in sorted(changed.items()))
    return refuse("device-not-offered", text, devices=tuple(sorted(changed)))


def _lacking_interface(tree: Tree, device: Device, address: PciAddress, *, is_asked: bool) -> tuple[Reason, ...]:
    """Return why a function has no interface to hand over, or not the one in the inventory.

    Empty for a function without an interface when the claim asks for none.
    """
    interface = interface_of(device)
    ports = function_ports(tree, address, only_link=True)
    facts: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "device": device.name,
        "interface": ports.first.name if ports.first else "",
    }
    if ports.first is not None:
        if any(port.name == interface for port in ports.interfaces):
            return ()
        text = f"{device.name}: its interface {ports.first.name} is new; ask again when the inventory shows it"
        return (Reason(code="interface-changed", message=text, facts=facts),)
    folder = pci_folder(address)
    driver = tree.link_name(f"{folder}/driver")
    is_away = tree.exists(f"{folder}/net") and not ports.interfaces
    makes_none = is_passthrough_driver(driver) or (tree.exists(f"{folder}/infiniband") and not is_away)
    if interface or (makes_none and not is_asked and not ports.unclear):
        return ()
    if ports.unclear:
        why, next_step = f"it is unclear which is the interface of {address}: {ports.unclear}", "choose another device"
    elif awaits := awaits_driver(tree, address):
        why, next_step = f"{address} has no interface: {awaits}", "ask again in a moment"
    elif not driver:
        if not is_asked:
            return ()
        why, next_step = f"{address} has no interface: no kernel driver is bound to it", "have one bound"
    elif is_passthrough_driver(driver):
        why, next_step = (
            f"{address} has no interface: kernel driver {driver} holds it for passthrough",
            "leave the configuration out",
        )
    elif is_away:
        why, next_step = (
            f"the interface of {address} is not on the host, but in another network namespace",
            "choose another device",
        )
    else:
        why, next_step = (
            f"{address} has no interface yet: kernel driver {driver} has made none",
            "ask again in a moment",
        )
    text = f"{device.name}: {why}; {next_step}, or claim it with mode host, which hands no interface over"
    return (Reason(code="interface-missing", message=text, facts=facts),)


def _readings(tree: Tree, address: PciAddress) -> list[Reading]:
    try:
        own = function_ports(tree, address, only_link=True)
        ports = [port for port in function_rdma_ports(tree, address) if not _is_of_others(tree, port, own)]
    except HardwareError:
        # `observe` reports what cannot be read.
        return []
    return link_readings(tree, [interface.path for interface in own.interfaces], [port.path for port in ports])


def _is_of_others(tree: Tree, port: RdmaPort, own: FunctionPorts) -> bool:
    """Return whether an RDMA port is a representor's: in switchdev mode the physical function's
    device has a port for each.
    """
    return bool(own.others) and tree.read(f"{port.path}/gid_attrs/ndevs/0") in own.others


def _with_aggregated(tree: Tree, ports: Sequence[NetInterface]) -> tuple[NetInterface, ...]:
    """Return a card's ports, and with one in a bond the bond's other ports of the same switch: in
    switchdev mode they carry each other's virtual functions.

    Source: Documentation/networking/switchdev.rst (phys_switch_id); sysfs-class-net (master),
    Documentation/networking/bonding.rst (bonding/slaves).
    """
    by_name = {port.name: port for port in ports}
    for port in ports:
        switch = tree.read(f"{port.path}/phys_switch_id")
        for name in (tree.read(f"{port.path}/master/bonding/slaves") or "").split() if switch else ():
            path = interface_path(name)
            if name not in by_name and tree.read(f"{path}/phys_switch_id") == switch:
                by_name[name] = read_interface(tree, path, name, only_link=True)
    return tuple(by_name.values())


def _port_of(tree: Tree, physical: FunctionPorts, own: FunctionPorts) -> NetInterface | str:
    """Find the port of a physical function that a virtual one belongs to, or return why it is not
    known.

    Of several ports it is the one with the same port id or number.

    Source: phys_port_id, dev_port in Documentation/ABI/testing/sysfs-class-net.
    """
    if len(physical.interfaces) == 1:
        return physical.interfaces[0]
    if not physical.interfaces:
        others = f", but {', '.join(physical.others)} of other functions" if physical.others else ""
        return f"it shows no interface of its own on the host{others}"
    listed = ", ".join(port.name for port in physical.interfaces)
    for file in ("phys_port_id", "dev_port") if own.first is not None else ():
        mark = tree.read(f"{own.first.path}/{file}") if own.first is not None else None
        same = [port for port in physical.interfaces if mark and tree.read(f"{port.path}/{file}") == mark]
        if len(same) == 1:
            return same[0]
    return f"it has {listed}, and neither phys_port_id nor dev_port shows which of them has the virtual function"


def _is_network(tree: Tree, function: PciDevice) -> bool:
    if function.is_bridge:
        return False
    folder = pci_folder(function.address)
    return (
        function.class_code >> 16 == _NETWORK_CLASS
        or tree.exists(f"{folder}/net")
        or tree.exists(f"{folder}/infiniband")
    )


def _interface_facts(ports: FunctionPorts) -> dict[str, AttributeValue]:
    """Return the interface's name, address and speed as attributes.

    A function with several ports (rare) has those of its first.
    """
    first = ports.first
    if first is None:
        return {}
    facts: dict[str, AttributeValue] = {"interface": first.name}
    if first.mac:
        facts["mac"] = first.mac[:64]
    if first.speed_mbps is not None:
        facts["linkSpeed"] = first.speed_mbps
    return facts


def _vfio_group(tree: Tree, address: PciAddress) -> str | None:
    """Name the IOMMU group of a function that vfio-pci or a maker's variant of it holds.

    It is read each time, because the number changes over reboots.
    """
    folder = pci_folder(address)
    group = tree.link_name(f"{folder}/iommu_group")
    return group or None if is_vfio(tree.link_name(f"{folder}/driver")) else None
