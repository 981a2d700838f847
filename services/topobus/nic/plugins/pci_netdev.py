"""Network cards on PCI: any function with a network class, an interface or an RDMA device; physical and virtual functions.

Flows in: the machine's PCI functions, their interfaces and RDMA ports from the tree. Flows out: devices, link health, and what a container
needs to open the RDMA device. It moves no interface and makes no virtual function: the first is the CNI plugin's work, the second the operator's.

What is not offered, and named in the inventory's warnings instead:
- a card that the machine's default route goes over, directly or below a bond, bridge or VLAN: the node would lose its network;
- a physical function with virtual functions on: it is shared through them, each of which is offered instead and names it as its parent.

What is a fault and what is none:
- no carrier on an interface that is switched on is Unhealthy, not Degraded: a pod that gets this card reaches nobody, and another card would do;
- an RDMA port that is not active is Unhealthy for the same reason, unless its interface is switched off or out of sight;
- an interface out of sight (moved into a pod's network namespace) or switched off is no fault: that is how handed-out and idle cards look;
- a link slower than this process has seen it is Degraded: sysfs tells no rated speed, so the best seen is the measure.

Source: Documentation/ABI/testing/sysfs-class-net, stable/sysfs-class-infiniband; the SR-IOV device plugin for which functions to leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.edits_text import gone, own_variable, unreadable
from topobus.devicekit.pci import PciHealth, observe_kernel_driver, pci_device, pci_device_name, pci_folder, select_functions
from topobus.domain.device import AttributeValue, Device
from topobus.domain.edits import ContainerEdits
from topobus.domain.errors import HardwareError
from topobus.domain.health import Dimension, HealthState, Observation
from topobus.domain.machine import Machine, PciDevice
from topobus.domain.outcome import Refusal
from topobus.domain.pci import PciAddress
from topobus.nic.plugins.vendors import model_name, vendor_name
from topobus.sysfs.net import NetInterface, default_route_interfaces, function_interfaces, read_sriov
from topobus.sysfs.nodes import device_node
from topobus.sysfs.rdma import RdmaPort, function_rdma_devices
from topobus.sysfs.tree import Tree

__all__ = ["PciNetdevDriver"]

# The upper byte of the class code: network controllers (Ethernet 0x0200, InfiniBand 0x0207, wireless 0x0280 …).
_NETWORK_CLASS = 0x02
# The connection manager's node: one for the machine, needed beside any verbs device (Documentation/infiniband).
_RDMA_CM = "infiniband/rdma_cm"


class PciNetdevDriver:
    """Finds and watches PCI network functions. Keeps the error counters and best link speeds that it saw, and nothing else."""

    name = "pci-netdev"
    device_class = "nic"

    def __init__(self) -> None:
        self._pci_health = PciHealth(is_speed_steady=True)
        self._best_mbps: dict[PciAddress, int] = {}
        self.warnings: tuple[str, ...] = ()
        """What the last `discover` left out, and why; the inventory shows it."""

    def discover(self, tree: Tree, machine: Machine) -> Sequence[Device]:
        """List the network functions that may be handed out, by address."""
        tree = tree.for_scan()
        routed = default_route_interfaces(tree)
        functions = select_functions(tree, machine, accept=lambda device: _is_network(tree, device))
        left_out: list[str] = []
        devices = [self._discover_one(tree, function, routed, left_out) for function in functions]
        self.warnings = tuple(left_out)
        return tuple(device for device in devices if device is not None)

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Look at presence, PCIe errors and link of each function; one that cannot be read leaves the others alone."""
        tree = tree.for_scan()
        return {device.name: self._observe_one(tree, device.pci) for device in devices if device.pci is not None}

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits] | Refusal:
        """Give RDMA nodes (or the VFIO group) and tell addresses, interfaces and RDMA devices in variables; the kit adds `TOPOBUS_NIC_DEVICES`."""
        edits: dict[str, ContainerEdits] = {}
        interfaces: list[str] = []
        rdma: list[str] = []
        shared_nodes: set[str] = set()
        functions = sorted(((device, device.pci) for device in devices if device.pci is not None), key=lambda pair: pair[1])
        refusal = gone(tree, devices)
        if refusal is not None:
            return refusal
        for device, address in functions:
            nodes: list[str] = []
            for function_rdma_device in function_rdma_devices(tree, address):
                rdma.append(function_rdma_device.name)
                nodes.extend(function_rdma_device.nodes)
                shared_nodes.add(_RDMA_CM)
            if (group := _vfio_group(tree, address)) is not None:
                nodes.append(f"vfio/{group}")
                shared_nodes.add("vfio/vfio")
            interfaces.extend(interface.name for interface in function_interfaces(tree, address))
            edits[device.name] = ContainerEdits(env={own_variable(device): str(address)}, device_nodes=tuple(map(device_node, nodes)))
        env = {"TOPOBUS_NIC_PCI_ADDRESSES": ",".join(str(address) for _, address in functions)}
        if interfaces:
            env["TOPOBUS_NIC_INTERFACES"] = ",".join(interfaces)
        if rdma:
            env["TOPOBUS_NIC_RDMA_DEVICES"] = ",".join(rdma)
        return {**edits, "": ContainerEdits(env=env, device_nodes=tuple(map(device_node, sorted(shared_nodes))))}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Undo nothing: preparing changes nothing on the card."""

    def _discover_one(self, tree: Tree, function: PciDevice, routed: frozenset[str], left_out: list[str]) -> Device | None:
        try:
            interfaces = function_interfaces(tree, function.address)
            sriov = read_sriov(tree, function.address)
            rdma = function_rdma_devices(tree, function.address)
        except HardwareError:
            # Still a device: `observe` tells which file is unreadable, and its neighbours are not touched.
            return self._device(function, {})
        if any(interface.name in routed for interface in interfaces):
            left_out.append(f"{function.address} is not offered: the default route of this node goes over it")
            return None
        if sriov is not None and sriov.enabled:
            left_out.append(f"{function.address} is not offered: it has {sriov.enabled} virtual functions on, which are offered instead")
            return None
        facts: dict[str, AttributeValue] = {"rdma": bool(rdma), "sriovVf": function.physfn is not None}
        if sriov is not None:
            facts["totalVfs"] = sriov.total
        facts.update(_interface_facts(interfaces))
        if rdma:
            facts["rdmaDevice"] = ",".join(rdma_device.name for rdma_device in rdma)[:64]
            layers = {port.link_layer for rdma_device in rdma for port in rdma_device.ports if port.link_layer}
            if len(layers) == 1:
                facts["linkLayer"] = layers.pop()
        return self._device(function, facts)

    def _device(self, function: PciDevice, facts: dict[str, AttributeValue]) -> Device:
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor=vendor_name(function.vendor),
            model=model_name(function.vendor, function.device),
            parent="" if function.physfn is None else pci_device_name(self.device_class, function.physfn),
            attributes=facts,
        )

    def _observe_one(self, tree: Tree, address: PciAddress) -> list[Observation]:
        try:
            seen = self._pci_health.observe(tree, address)
            if any(observation.dimension is Dimension.PRESENCE for observation in seen):
                self._best_mbps.pop(address, None)
                return seen
            seen += observe_kernel_driver(tree, address)
            interfaces = function_interfaces(tree, address)
            ports = [port for function_rdma_device in function_rdma_devices(tree, address) for port in function_rdma_device.ports]
        except HardwareError as err:
            return [unreadable(err)]
        link = (_carrier(interfaces), _rdma_ports(interfaces, ports), self._speed(interfaces, ports, address), _duplex(interfaces))
        return [*seen, *(observation for observation in link if observation is not None)]

    def _speed(self, interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort], address: PciAddress) -> Observation | None:
        now, path = _present_speed(interfaces, ports)
        if not now:
            return None
        best = max(now, self._best_mbps.get(address, 0))
        self._best_mbps[address] = best
        if now >= best:
            return None
        return Observation(
            dimension=Dimension.LINK,
            state=HealthState.DEGRADED,
            reason="speed-dropped",
            message=f"the link runs at {now} Mbit/s, ran at {best} before",
            evidence={"path": path, "value": str(now)},
        )


def _is_network(tree: Tree, function: PciDevice) -> bool:
    if function.is_bridge:
        return False
    folder = pci_folder(function.address)
    return function.class_code >> 16 == _NETWORK_CLASS or tree.exists(f"{folder}/net") or tree.exists(f"{folder}/infiniband")


def _interface_facts(interfaces: Sequence[NetInterface]) -> dict[str, AttributeValue]:
    """Tell the first interface's name, address and speed; a function with several (rare, one a port) is told by its first."""
    if not interfaces:
        return {}
    first = interfaces[0]
    facts: dict[str, AttributeValue] = {"interface": first.name}
    if first.mac:
        facts["mac"] = first.mac[:64]
    if first.speed_mbps is not None:
        facts["linkSpeed"] = first.speed_mbps
    return facts


def _vfio_group(tree: Tree, address: PciAddress) -> str | None:
    """Name the IOMMU group of a function that is bound to vfio-pci, read anew each time: the number changes over reboots."""
    folder = pci_folder(address)
    driver = tree.real(f"{folder}/driver")
    group = tree.real(f"{folder}/iommu_group")
    return group.rpartition("/")[2] if driver and group and driver.endswith("/vfio-pci") else None


def _carrier(interfaces: Sequence[NetInterface]) -> Observation | None:
    # The kernel tells a carrier only of interfaces that are switched on.
    net_interfaces = [interface for interface in interfaces if interface.carrier is not None]
    lost = [net_interface for net_interface in net_interfaces if not net_interface.carrier]
    if not lost:
        return None
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.UNHEALTHY if len(lost) == len(net_interfaces) else HealthState.DEGRADED,
        reason="carrier-lost",
        message=f"no carrier on {', '.join(net_interface.name for net_interface in lost)}: cable, transceiver or switch port",
        evidence={"path": f"{lost[0].path}/carrier", "value": "0"},
    )


def _rdma_ports(interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort]) -> Observation | None:
    # A RoCE port follows its interface, so without one that is on and in sight its state says nothing about the hardware.
    is_interface_on = any(interface.is_up for interface in interfaces)
    rdma_ports = [port for port in ports if port.link_layer == "InfiniBand" or is_interface_on]
    down = [rdma_port for rdma_port in rdma_ports if not rdma_port.is_active]
    if not down:
        return None
    first = down[0]
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.UNHEALTHY if len(down) == len(rdma_ports) else HealthState.DEGRADED,
        reason="rdma-port-down",
        message=f"RDMA port {', '.join(str(rdma_port.number) for rdma_port in down)} is {first.state} ({first.physical_state or 'no physical state'})",
        evidence={"path": f"{first.path}/state", "value": first.state},
    )


def _duplex(interfaces: Sequence[NetInterface]) -> Observation | None:
    half = next((interface for interface in interfaces if interface.carrier and interface.duplex == "half"), None)
    if half is None:
        return None
    return Observation(
        dimension=Dimension.LINK,
        state=HealthState.DEGRADED,
        reason="half-duplex",
        message=f"{half.name} runs half duplex: the link partner does not negotiate",
        evidence={"path": f"{half.path}/duplex", "value": half.duplex},
    )


def _present_speed(interfaces: Sequence[NetInterface], ports: Sequence[RdmaPort]) -> tuple[int, str]:
    """Give the speed now in Mbit/s and where it stands; 0 while no link is up."""
    fast = max(
        (interface for interface in interfaces if interface.carrier and interface.speed_mbps),
        key=lambda interface: interface.speed_mbps or 0,
        default=None,
    )
    if fast is not None:
        return fast.speed_mbps or 0, f"{fast.path}/speed"
    port = max(
        (rdma_port for rdma_port in ports if rdma_port.is_active and rdma_port.rate_gbps),
        key=lambda rdma_port: rdma_port.rate_gbps or 0,
        default=None,
    )
    return (int((port.rate_gbps or 0) * 1000), f"{port.path}/rate") if port is not None else (0, "")
