"""Intel GPUs from sysfs: the i915 and xe kernel drivers, data-centre cards and integrated graphics
alike.

Devices have memory where the driver publishes it. An integrated GPU is a device like any other,
with the attribute `integrated` for selectors. A card with virtual functions enabled is hidden
behind them. With `partitions.parents: counted` it is offered beside them. With
`partitions.virtual_functions` it is offered both ways while it is idle, and cut when a claim gets a
virtual function. The inventory's warnings name what is not offered.
Source: Documentation/gpu/i915, Documentation/gpu/xe;
Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from topobus.devicekit.driver import Discovery, LongWork, PrepareContext
from topobus.devicekit.function_health import FunctionHealth
from topobus.devicekit.left_out import LeftOut
from topobus.devicekit.partitioning.function_cuts import FunctionCuts
from topobus.devicekit.partitioning.on_demand_functions import OnDemandFunctions
from topobus.devicekit.passthrough.function_users import function_nodes, openers
from topobus.devicekit.pci import (
    awaits_driver,
    function_role,
    is_passthrough_driver,
    observe_kernel_driver,
    pci_device,
    pci_device_name,
    select_functions,
)
from topobus.gpu.drm_edits import drm_edits, parent_edits
from topobus.gpu.leftovers import ChecksLeftovers, GpuUse, Leftovers
from topobus.gpu.processes import holders_of
from topobus.gpu.products import ProductTable
from topobus.gpu.sensor_health import health_indicator_sign, survivability_sign, temperature_sign
from topobus.gpu.sensor_readings import intel_readings
from topobus.gpu.wedge_events import WedgeEvents
from topobus.sysfs.drm import function_drm_nodes
from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device, DeviceRole
from topobus.values.edits import ContainerEdits
from topobus.values.errors import HardwareError
from topobus.values.health import Observation
from topobus.values.machine import Machine, PciDevice
from topobus.values.outcome import Refusal
from topobus.values.pci import PciAddress
from topobus.values.readings import Reading

__all__ = ["IntelDriver"]

_VENDOR = 0x8086
# VGA, 3D and other display controllers (the last: Flex and Max data-centre cards).
_CLASSES = (0x0300, 0x0302, 0x0380)


class IntelDriver(ChecksLeftovers):
    """Finds and watches Intel GPUs."""

    name = "intel-gpu"
    device_class = "gpu"

    def __init__(self, wedges: WedgeEvents | None = None) -> None:
        """Make a driver.

        Shapes: wedges — events of GPUs that the kernel's drivers gave up; tests give their own.
        """
        self._wedges = wedges or WedgeEvents()
        self._products = ProductTable()
        self._health = FunctionHealth()
        self.leftovers = Leftovers()
        self._on_demand = OnDemandFunctions("gpu", FunctionCuts(_users, _lacks_node))

    @property
    def on_demand_functions(self) -> OnDemandFunctions:
        """Makes virtual functions by the operator's rules."""
        return self._on_demand

    def discover(self, tree: Tree, machine: Machine) -> Discovery:
        """List the GPUs, by address."""
        left_out = LeftOut()
        functions = select_functions(tree, machine, vendors=(_VENDOR,), base_classes=_CLASSES)
        devices = self._on_demand.look(
            tree,
            machine,
            functions,
            left_out,
            uses=lambda _: (),
            describe=lambda function: self._device(tree, function, DeviceRole.COMPUTE),
            offer=lambda function: self._offer(tree, function, left_out),
        )
        # Opened before the first look at health, because what the kernel sent earlier is lost.
        self._wedges.take(tree)
        blind = [f"a wedged GPU is not noticed: {self._wedges.blind}"] if devices and self._wedges.blind else []
        return Discovery(devices=devices, warnings=(*left_out, *blind), kept=left_out.kept, uncut=self._on_demand.uncut)

    def _offer(self, tree: Tree, function: PciDevice, left_out: LeftOut) -> Device | None:
        """Return a function's device, or None when it is not offered and `left_out` has the reason."""
        try:
            role, why = function_role(tree, function.address)
        except HardwareError:
            # It keeps its role, and `observe` reports what is wrong with it.
            role, why = DeviceRole.COMPUTE, ""
        if role is DeviceRole.PARTITION_PARENT and self._on_demand.is_cut(function):
            role = DeviceRole.COMPUTE
        if role is DeviceRole.COMPUTE or (role is DeviceRole.PARTITION_PARENT and self.host.offers_parents):
            return self._device(tree, function, role)
        left_out.keep(function.address, role, why)
        return None

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Observe the PCI function, the state that its driver publishes, and the events that the
        kernel sent since the last look.
        """
        tree = tree.for_scan()
        self._wedges.take(tree)
        addresses = self._on_demand.present(tree, devices)
        seen = self._health.observe(tree, addresses.values(), partial(self._look, tree))
        return {name: seen[address] for name, address in addresses.items()}

    def measure(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Reading]]:
        """Read each GPU, as far as its driver publishes it."""
        return {
            device.name: intel_readings(
                tree,
                pci_folder(device.pci),
                function_drm_nodes(tree, device.pci).card,
                device.capacity.get("memory", 0),
            )
            for device in devices
            if device.pci is not None and not self._on_demand.is_absent(tree, device.pci)
        }

    def prepare(
        self, tree: Tree, devices: Sequence[Device], context: PrepareContext
    ) -> Mapping[str, ContainerEdits] | Refusal | LongWork:
        """Give each GPU's card and render node.

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
        self.leftovers.before(context, devices, partial(self.use, tree))
        parents = [device for device in devices if device.role is DeviceRole.PARTITION_PARENT]
        edits = drm_edits(tree, [device for device in devices if device not in parents], context.owner)
        beside = parent_edits(tree, parents, context.owner)
        if isinstance(edits, Refusal) or isinstance(beside, Refusal):
            return edits if isinstance(edits, Refusal) else beside
        return {**edits, **beside}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Release the devices.

        With the last device of a card that is cut on demand, the virtual functions may be removed.
        """
        for device in devices:
            self._on_demand.undo(tree, device, context)

    def use(self, tree: Tree, device: Device) -> GpuUse:
        """Find the processes that have the card's node or the render node open.

        The driver frees the memory with the last of them.
        """
        if device.pci is None:
            return GpuUse(blind=f"{device.name} has no PCI address")
        nodes = [path.rpartition("/")[2] for path in function_drm_nodes(tree, device.pci).paths]
        holders = holders_of(tree, nodes)
        return GpuUse(processes=holders.processes, unseen=holders.unseen)

    def _device(self, tree: Tree, function: PciDevice, role: DeviceRole) -> Device:
        product = self._products.product(function)
        parent = "" if function.physfn is None else pci_device_name(self.device_class, function.physfn)
        # Integrated graphics are on the root bus itself (0000:00:02.0), cards below a port.
        attributes: dict[str, AttributeValue] = {"type": "gpu", "integrated": not function.path}
        memory_bytes = product.memory_bytes
        try:
            memory_bytes = _memory_bytes(tree, function.address) or memory_bytes
        except HardwareError:
            # `observe` reports the unreadable file.
            pass
        return pci_device(
            function,
            device_class=self.device_class,
            driver=self.name,
            vendor="intel",
            model=product.name or f"Intel device {function.device:04x}",
            parent=parent,
            partition_of=parent if self.host.offers_parents or self._on_demand.is_cut(function) else "",
            role=role,
            attributes=attributes,
            capacity={"memory": memory_bytes} if memory_bytes else {},
        )

    def _look(self, tree: Tree, address: PciAddress) -> tuple[Observation | None, ...]:
        # `discover` leaves it out when it cannot be read; the fault is reported here.
        _memory_bytes(tree, address)
        folder = pci_folder(address)
        return (
            *observe_kernel_driver(tree, address),
            temperature_sign(tree, folder),
            survivability_sign(tree, folder),
            health_indicator_sign(tree, folder),
            self._wedges.sign(tree, address),
        )


def _memory_bytes(tree: Tree, address: PciAddress) -> int:
    """Read local memory, which i915 and xe publish in different files, and not in all versions.

    0 where neither does.
    """
    folder = pci_folder(address)
    card = function_drm_nodes(tree, address).card
    candidates = [
        f"{folder}/tile0/physical_vram_size_bytes",
        *([f"{folder}/drm/{card}/lmem_total_bytes"] if card else []),
    ]
    return next((value for value in (tree.read_int(path, 0) for path in candidates) if value), 0)


def _users(tree: Tree, address: PciAddress, virtual: Sequence[PciAddress]) -> Sequence[str]:
    """Find the processes that have a node of a card or of its virtual functions open."""
    fresh = Tree(tree.settings)
    return openers(fresh, [node for function in (address, *virtual) for node in function_nodes(fresh, function)]).users


def _lacks_node(tree: Tree, address: PciAddress) -> str:
    """Return what a new virtual function lacks, or "" when it is complete.

    Its driver binds a moment after the function appears, and makes the render node a moment later.
    """
    if awaits := awaits_driver(tree, address):
        return awaits
    driver = tree.link_name(f"{pci_folder(address)}/driver")
    if not driver or is_passthrough_driver(driver) or function_drm_nodes(tree, address).render:
        return ""
    return "its render node is not there yet"
