"""Devices and inventories: what a device service offers, in the words that alignment, DRA and
people share.

A device's name is stable over reboots (it comes from where or what the device is,
never from the order of discovery). It begins with the class, by which Kubernetes knows whose it is.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from topobus.values.counters import CapacityPolicy, CounterSet, CounterUse
from topobus.values.device_sharing import DeviceSharing
from topobus.values.health import HEALTHY, DeviceHealth
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.maintenance import DeviceVerb, Maintenance
from topobus.values.names import Generation
from topobus.values.pci import PciAddress

__all__ = [
    "AttributeValue",
    "Device",
    "DeviceRole",
    "Inventory",
    "KeptFunction",
    "Link",
    "LinkClass",
]

AttributeValue = bool | int | str
"""A DRA attribute: booleans, integers (64 bit), strings (at most 64 characters)."""


class LinkClass(StrEnum):
    """How two devices reach each other, widest first.

    The order of the members is the order of preference.
    """

    FABRIC = "fabric"
    """NVLink, XGMI or the like."""
    SWITCH = "switch"
    """Under the same PCIe switch."""
    ROOT = "root"
    """Under the same root complex."""
    NUMA = "numa"
    SOCKET = "socket"
    SYSTEM = "system"
    """Across sockets; an unknown pair counts as this, the worst."""


class DeviceRole(StrEnum):
    """What a piece of hardware is for, as it is set up now."""

    COMPUTE = "compute"
    """What its class is for, by a container: computing, a network, a function of an FPGA."""
    PASSTHROUGH = "passthrough"
    """A passthrough driver (vfio-pci) holds it, for a virtual machine or a program that drives it
    itself."""
    PARTITION_PARENT = "partition-parent"
    """It is cut into parts, which are offered instead: MIG, CPX, virtual functions."""
    MANAGEMENT = "management"
    """The node's own: its user changes the card, or the node, for all."""


class Link(Struct, frozen=True, kw_only=True):
    """A direct link from one device to a peer of the same class and node,
    as the driver reports it.
    """

    peer: str
    kind: LinkClass = LinkClass.FABRIC
    bandwidth_gbps: float = 0.0
    count: int = 0
    """How many links are bonded, each with its part of the bandwidth (NVLink); 0: the driver does
    not report it."""


class Device(Struct, frozen=True, kw_only=True):
    """One allocatable device.

    `numa_nodes` is None when the machine does not report a node (the kernel's -1): no opinion,
    never node 0. `attributes` are what DRA selectors see in the driver's domain. The standard ones
    (`resource.kubernetes.io/pcieRoot`, `pciBusID`, `numaNode`) are derived from the fields here.
    """

    name: str
    device_class: str
    driver: str = ""
    """The plugin that found it: `nvidia`, `pci-netdev`, `linux-cpu`."""
    vendor: str = ""
    model: str = ""
    uuid: str = ""
    numa_nodes: NodeSet | None = None
    pci: PciAddress | None = None
    pcie_root: str = ""
    pcie_roots: tuple[str, ...] = ()
    """Of what is no PCIe function itself, such as a CPU: the roots near it, sorted. One constraint
    on `pcieRoot` then ties it to devices under any of them."""
    pcie_path: tuple[PciAddress, ...] = ()
    """Bridges from the root complex down to the device."""
    pcie_switch: PciAddress | None = None
    """The upstream port of the innermost switch above the device."""
    parent: str = ""
    """Name of the device that this one is a part of (a VF's PF, a partition's card)."""
    cpu: int | None = None
    """The logical CPU, for devices of class `cpu`."""
    core: int | None = None
    socket: int | None = None
    l3: int | None = None
    links: tuple[Link, ...] = ()
    attributes: dict[str, AttributeValue] = {}
    capacity: dict[str, int] = {}
    """Amounts in base units (bytes, count)."""
    allows_multiple: bool = False
    """Several claims may hold it at once, each a share of its capacity. Kubelet's device plugins
    have no shares: through them it is offered by replicas (`sharing`), or not at all."""
    sharing: DeviceSharing | None = None
    """How the operator has it shared; None: it is allocated whole, or shared as its driver
    reports."""
    capacity_policies: dict[str, CapacityPolicy] = {}
    """By capacity: which amounts a claim may have. Only of a device that several may hold."""
    consumes: tuple[CounterUse, ...] = ()
    """What it takes from the counter sets of its inventory while it is held: it and another that
    takes too much of the same are never held at once."""
    partition_of: str = ""
    """Name of the device that it is cut out of: the two are never held at once. Without `consumes`
    any number of its parts can be held together."""
    near_cpus: CpuSet = CpuSet()
    role: DeviceRole = DeviceRole.COMPUTE
    """What it is for. It is prepared as that alone: when the hardware is set up for something else
    meanwhile, a claim is refused."""
    pool: str = ""
    """The pool that its device service puts it into, by the operator's selectors; empty: the
    class's own resource offers it."""
    health: DeviceHealth = HEALTHY
    maintenance: Maintenance | None = None
    """The operator's decision that no new owner gets it; None: there is none."""
    is_spare: bool = False
    """Its service withholds it to replace an equal one that gets sick (`spares`). It is fit, and a
    claim that was allocated it in the moment before is prepared."""

    @property
    def is_fit(self) -> bool:
        """Say whether its health allows a new owner and no operator withholds it."""
        return self.maintenance is None and self.health.is_allocatable

    @property
    def is_allocatable(self) -> bool:
        """Say whether a new owner may get it: it is fit, and no spare."""
        return self.is_fit and not self.is_spare

    @property
    def is_excluded(self) -> bool:
        """Say whether an operator excluded it: to new owners it is as if it did not exist."""
        return self.maintenance is not None and self.maintenance.verb is DeviceVerb.EXCLUDE

    @property
    def why_not(self) -> str:
        """Explain in a few words why no new owner gets it. Empty when one may get it.

        >>> Device(name="gpu-0", device_class="gpu").why_not
        ''
        """
        if self.maintenance is not None:
            state = "excluded" if self.is_excluded else "under maintenance"
            return f"{state} by {self.maintenance.who}: {self.maintenance.why}"
        if self.health.is_allocatable:
            return "a spare" if self.is_spare else ""
        worst = self.health.worst
        return f"{self.health.state}" + (f": {worst.reason}" if worst is not None else "")


class KeptFunction(Struct, frozen=True, kw_only=True):
    """A PCI function of a class that is not offered because it serves another purpose."""

    pci: PciAddress
    role: DeviceRole
    why: str = ""
    """For people: `kernel driver vfio-pci holds it for passthrough`."""


class Inventory(Struct, frozen=True, kw_only=True):
    """All devices of one class on one node, unhealthy ones included, sorted by name.

    A device that vanished stays listed as Unhealthy while it may be held (an allocated id must
    never leave kubelet's list).
    """

    node: str
    device_class: str
    generation: Generation
    """Grows by one with every published change; a plan names the generation that it used."""
    machine_generation: Generation = 0
    boot_id: str = ""
    """The node's boot in which every driver has looked; an earlier one, or empty, until each has."""
    devices: tuple[Device, ...] = ()
    has_custom_hints: bool = False
    drivers: tuple[str, ...] = ()
    """Plugins that looked, also those that found nothing."""
    warnings: tuple[str, ...] = ()
    counter_sets: tuple[CounterSet, ...] = ()
    """What the devices' `consumes` refers to, sorted by name."""
    kept: tuple[KeptFunction, ...] = ()
    """Functions that are no device, by address: their use instead."""
    resource: str = ""
    """The resource name under which kubelet and pods know the class, when it is not ours:
    `nvidia.com/gpu` of somebody else's device plugin."""
    reading_drivers: tuple[str, ...] = ()
    """Those of `drivers` that can report that preparing a device changes nothing: `prepare` may be
    called before the devices have an owner (`is_ahead`)."""

    def device(self, name: str) -> Device | None:
        """Find a device by name."""
        return next((device for device in self.devices if device.name == name), None)
