"""Shared code of drivers for PCI cards: find functions, fill in a Device, and read the health that
every PCI function reports.

Health is presence, errors and link.
Source: Documentation/ABI/testing/sysfs-bus-pci and sysfs-bus-pci-devices-aer_stats of the Linux
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from topobus.sysfs.pci import pci_folder
from topobus.sysfs.tree import Tree
from topobus.values.device import AttributeValue, Device, DeviceRole, Link
from topobus.values.health import Observation
from topobus.values.health_reasons import sign
from topobus.values.idset import NodeSet
from topobus.values.machine import Machine, PciDevice
from topobus.values.names import to_dns_label
from topobus.values.pci import PciAddress

__all__ = [
    "PciHealth",
    "awaits_driver",
    "function_role",
    "is_passthrough_driver",
    "is_vfio",
    "observe_kernel_driver",
    "pci_device",
    "pci_device_name",
    "select_functions",
    "why_not_offered",
]

# Kernel drivers that hold a function for a virtual machine or for user space: no container can use
# it as what it is. Beside these, vfio-pci and the vendors' variants of it (nvgrace-gpu-vfio-pci,
# mlx5_vfio_pci, xe-vfio-pci) are known by their ending.
_PASSTHROUGH_DRIVERS = frozenset({"pci-stub", "pciback", "uio-pci-generic", "igb-uio", "xen-pciback"})
_VFIO_ENDING = "vfio-pci"

# So many corrected errors between two looks are a failing lane or riser, not cosmic noise (a
# healthy link has a few per day).
_CORRECTED_STORM = 100

# Where a function has its base addresses, in the part of configuration space that every user may read
# (PCI local bus specification, chapter 6).
_HEADER_BYTES = 64
_BASE_ADDRESSES = slice(0x10, 0x28)


def pci_device_name(device_class: str, address: PciAddress) -> str:
    """Name a PCI device by its class and slot, which is stable over reboots as far as the slot is.

    >>> pci_device_name("gpu", PciAddress.parse("0000:3b:00.0"))
    'gpu-0000-3b-00-0'
    """
    return to_dns_label(f"{device_class}-{address}")


def select_functions(
    tree: Tree,
    machine: Machine,
    *,
    vendors: Collection[int] = (),
    base_classes: Collection[int] = (),
    accept: Callable[[PciDevice], bool] | None = None,
) -> tuple[PciDevice, ...]:
    """Pick the machine's PCI functions by vendor id and by the upper 16 bits of the class code
    (0x0302: 3D controller).

    An empty collection accepts all. A function that left the tree since the machine was
    published is left out: it is gone.
    Order: by address.
    """
    pci_devices = (
        device
        for device in machine.pci_devices
        if (not vendors or device.vendor in vendors)
        and (not base_classes or device.class_code >> 8 in base_classes)
        and (accept is None or accept(device))
        and tree.exists(pci_folder(device.address))
    )
    return tuple(sorted(pci_devices, key=lambda device: device.address))


def pci_device(
    function: PciDevice,
    *,
    device_class: str,
    driver: str,
    vendor: str,
    model: str = "",
    uuid: str = "",
    name: str = "",
    parent: str = "",
    partition_of: str = "",
    role: DeviceRole = DeviceRole.COMPUTE,
    links: tuple[Link, ...] = (),
    attributes: dict[str, AttributeValue] | None = None,
    capacity: dict[str, int] | None = None,
) -> Device:
    """Fill a Device from a PCI function: NUMA node, root, path, switch, near CPUs and the
    attributes that all PCI devices have.

    Given attributes override the common ones. A function whose NUMA node is unknown gets None,
    never node 0.
    """
    common: dict[str, AttributeValue] = {"vendor": vendor, "pciID": f"{function.vendor:04x}:{function.device:04x}"}
    if model:
        # DRA limits a string attribute to 64 characters (KEP-4381).
        common["productName"] = model[:64]
    if uuid:
        common["uuid"] = uuid[:64]
    if function.driver:
        common["kernelDriver"] = function.driver
    if function.link is not None and function.link.max_width:
        # The best the link can do, not the present speed: an idle card lowers its speed, and an
        # inventory must not change with load.
        common["pcieMaxWidth"] = function.link.max_width
    if function.subsystem_vendor:
        common["pciSubsystemID"] = f"{function.subsystem_vendor:04x}:{function.subsystem_device:04x}"
    return Device(
        name=name or pci_device_name(device_class, function.address),
        device_class=device_class,
        driver=driver,
        vendor=vendor,
        model=model,
        uuid=uuid,
        numa_nodes=None if function.numa_node is None else NodeSet(function.numa_node),
        pci=function.address,
        pcie_root=function.root,
        pcie_path=function.path,
        pcie_switch=function.switch,
        parent=parent,
        partition_of=partition_of,
        role=role,
        links=links,
        attributes={**common, **(attributes or {})},
        capacity=capacity or {},
        near_cpus=function.near_cpus,
    )


def function_role(tree: Tree, address: PciAddress) -> tuple[DeviceRole, str]:
    """Return the present role of a PCI function, and the reason where that is not the role of its
    class.

    A function that a passthrough driver holds belongs to a virtual machine. A physical function
    with virtual functions is shared through them: given whole beside them it would be allocated
    twice.
    Errors: raises HardwareError for a file that exists and cannot be read.
    Source: Documentation/driver-api/vfio.rst; `sriov_numvfs` in
    Documentation/ABI/testing/sysfs-bus-pci.
    Cost: two look-ups in the function's folder.
    """
    folder = pci_folder(address)
    kernel_driver = tree.link_name(f"{folder}/driver")
    if is_passthrough_driver(kernel_driver):
        return DeviceRole.PASSTHROUGH, f"kernel driver {kernel_driver} holds it for passthrough"
    virtual_functions = tree.read_int(f"{folder}/sriov_numvfs") or 0
    if virtual_functions:
        return (
            DeviceRole.PARTITION_PARENT,
            f"it has {virtual_functions} virtual functions on, which are offered instead",
        )
    return DeviceRole.COMPUTE, ""


def is_vfio(kernel_driver: str) -> bool:
    """Return whether a kernel driver is vfio-pci or a vendor's variant of it.

    >>> is_vfio("mlx5_vfio_pci"), is_vfio("pci-stub")
    (True, False)
    """
    return kernel_driver.replace("_", "-").endswith(_VFIO_ENDING)


def is_passthrough_driver(kernel_driver: str) -> bool:
    """Say whether a kernel driver holds a function for a virtual machine or for user space.

    >>> is_passthrough_driver("mlx5_vfio_pci"), is_passthrough_driver("pci-stub"), is_passthrough_driver("igb")
    (True, True, False)
    """
    return is_vfio(kernel_driver) or kernel_driver.replace("_", "-") in _PASSTHROUGH_DRIVERS


def why_not_offered(tree: Tree, address: PciAddress) -> str:
    """Name the reason why a function cannot be given to a container in the role of its class.

    Empty when it can.

    Errors: raises HardwareError for a file that exists and cannot be read.
    """
    return function_role(tree, address)[1]


def awaits_driver(tree: Tree, address: PciAddress) -> str:
    """Describe that a virtual function has no kernel driver yet.

    Empty where it has one, or where none will be bound by itself. The kernel adds the function at
    once, and its driver comes a moment later, or seconds where udev has to load the module.
    Source: sriov_drivers_autoprobe in Documentation/ABI/testing/sysfs-bus-pci.
    """
    folder = pci_folder(address)
    if tree.link_name(f"{folder}/driver") or tree.read(f"{folder}/physfn/sriov_drivers_autoprobe") == "0":
        return ""
    return "no kernel driver is bound to it yet"


def observe_kernel_driver(tree: Tree, address: PciAddress) -> list[Observation]:
    """Observe whether a kernel driver is bound to a PCI function.

    Shapes: result — empty when one is bound, else one Unhealthy observation `no-kernel-driver`.
    Empty as well for a function that left the bus since `PciHealth` saw it: it lacks no driver, and
    the next look reports that it is gone.
    Errors: raises HardwareError when the function's folder cannot be read.
    Source: Documentation/ABI/testing/sysfs-bus-pci (driver).
    """
    folder = pci_folder(address)
    # The link is the evidence, not the folder that it leads to: recordings often
    # leave the drivers' folders out.
    if "driver" in tree.names(folder) or not tree.exists(folder):
        return []
    return [sign("no-kernel-driver", f"no kernel driver is bound to {address}", f"{folder}/driver", "absent")]


class PciHealth:
    """Checks what every PCI function shows: is it there, did its error counters rise, is its link
    as wide as it could be.

    Error counters only ever grow, so a rise since the last look is the evidence. The first look
    only records the counts. One instance per driver, kept over looks.
    """

    def __init__(self, *, is_speed_steady: bool = False) -> None:
        self._is_speed_steady = is_speed_steady
        """True for cards that never lower their link's speed to save power (NICs): a lower speed is
        then a fault."""
        self._counted: dict[str, tuple[str, int]] = {}
        """The error counters of the last look, as text and as a number: they seldom change, and to
        read the text takes longer than to get it. By path; the root port's by the function that it
        is read for, because several can be in one slot."""
        self._wide: dict[str, tuple[str, str | None, str | None]] = {}
        """By function: its identity with the link's width and speed that were as good as they can
        be. What they can be does not change while it is there."""

    def observe(self, tree: Tree, address: PciAddress) -> list[Observation]:
        """Return what is wrong with one function now. Empty when nothing is.

        Errors: raises HardwareError for a file that exists and cannot be read.
        """
        folder = pci_folder(address)
        identity = tree.identity(folder)
        if not identity:
            self._wide.pop(folder, None)
            for kind in ("fatal", "nonfatal", "correctable"):
                self._counted.pop(f"{folder}/aer_dev_{kind}", None)
            self._counted.pop(folder, None)
            return [sign("fell-off-bus", f"PCI function {address} is no longer on the bus", folder, "absent")]
        seen = [
            self._errors(tree, folder),
            self._failed_recovery(tree, folder),
            self._link(tree, folder, identity),
        ]
        return [observation for observation in seen if observation is not None]

    def _errors(self, tree: Tree, folder: str) -> Observation | None:
        # Both at every look: one error may be in both.
        of_function, of_slot = self._rise(tree, f"{folder}/aer_dev_fatal"), self._slot_rise(tree, folder)
        if (counter := of_function or of_slot) is not None:
            path, rise, total = counter
            return sign("aer-fatal", f"{rise} new fatal PCIe error(s)", path, total)
        if (counter := self._rise(tree, f"{folder}/aer_dev_nonfatal")) is not None:
            path, rise, total = counter
            return sign("aer-nonfatal", f"{rise} new uncorrected, non-fatal PCIe error(s)", path, total)
        if (counter := self._rise(tree, f"{folder}/aer_dev_correctable")) is not None and counter[
            1
        ] >= _CORRECTED_STORM:
            path, rise, total = counter
            return sign("aer-correctable-storm", f"{rise} corrected PCIe errors between two looks", path, total)
        return None

    def _slot_rise(self, tree: Tree, folder: str) -> tuple[str, int, int] | None:
        """Return new fatal errors that the root port directly above the function has received.

        The kernel does not read the status of an endpoint with a fatal error, so the endpoint's
        own counter stays as it is (aer_get_device_error_info; seen with Linux 6.12). Below a switch
        it is not visible which of the functions it was. A function without counters, as a virtual
        one, has its parent's signs.
        """
        if f"{folder}/aer_dev_fatal" not in self._counted:
            return None
        bridge, _, path = (tree.real(folder) or "").rpartition("/pci")
        root_bus, _, ports = path.rpartition("/")[0].partition("/")
        root_port, _, switch_ports = ports.partition("/")
        rise = self._rise(tree, f"{bridge}/pci{root_bus}/{root_port}/aer_rootport_total_err_fatal", folder)
        return None if switch_ports else rise

    def _failed_recovery(self, tree: Tree, folder: str) -> Observation | None:
        """Return that the kernel could not bring the function back after a fatal error.

        The kernel resets the slot, and the function's driver writes configuration space again. Where
        that failed, or the driver cannot do so, the kernel logs "device recovery failed" and does no
        more: the function has no base address though the kernel has assigned some, or does not
        answer. A reset by sysfs and a rebind write back what was lost already (seen with Linux
        6.12). Virtual functions have no base addresses.

        Cost: two files, and those only where the function or its root port has counted a fatal
        error since the kernel began: to read configuration space wakes a suspended function.
        Source: pcie_do_recovery in drivers/pci/pcie/err.c.
        """
        if not any(self._counted.get(key, ("", 0))[1] for key in (f"{folder}/aer_dev_fatal", folder)):
            return None
        header = tree.read_bytes(f"{folder}/config", _HEADER_BYTES) or b""
        if len(header) < _HEADER_BYTES or tree.link_name(f"{folder}/physfn"):
            return None
        answers = bool(header.strip(b"\xff"))
        if answers and (_has_address(header[_BASE_ADDRESSES]) or not _has_assigned_address(tree, folder)):
            return None
        return sign(
            "recovery-failed",
            "the kernel could not bring it back after a fatal PCIe error",
            f"{folder}/config",
            header[_BASE_ADDRESSES].hex(),
        )

    def _rise(self, tree: Tree, path: str, key: str = "") -> tuple[str, int, int] | None:
        key = key or path
        text = tree.read(path)
        last = self._counted.get(key)
        if last is not None and text == last[0]:
            return None
        total = _total(text)
        if text is None or total is None:
            return None
        before = total if last is None else last[1]
        self._counted[key] = (text, total)
        return (path, total - before, total) if total > before else None

    def _link(self, tree: Tree, folder: str, identity: str) -> Observation | None:
        width_text = tree.read(f"{folder}/current_link_width")
        speed_text = tree.read(f"{folder}/current_link_speed") if self._is_speed_steady else None
        present = (identity, width_text, speed_text)
        if self._wide.get(folder) == present:
            return None
        observation = _judge_link(tree, folder, width_text, speed_text)
        if observation is None:
            self._wide[folder] = present
        else:
            self._wide.pop(folder, None)
        return observation


def _judge_link(tree: Tree, folder: str, width_text: str | None, speed_text: str | None) -> Observation | None:
    width = _number(width_text)
    if width and (best := _best(tree, folder, "max_link_width")) and width < best:
        return sign(
            "link-narrow",
            f"PCIe link runs {width:g} lanes, could run {best:g}",
            f"{folder}/current_link_width",
            f"{width:g}",
        )
    speed = _number(speed_text)
    if speed and (best := _best(tree, folder, "max_link_speed")) and speed < best:
        return sign(
            "link-slow",
            f"PCIe link runs at {speed:g} GT/s, could run at {best:g}",
            f"{folder}/current_link_speed",
            f"{speed:g}",
        )
    return None


def _best(tree: Tree, folder: str, file: str) -> float | None:
    """Return what a function's link can be at most: its own maximum, or that of the port above if it is lower.

    A card of 16 lanes in a slot of 8 is as wide as it can be there.
    """
    own = _number(tree.read(f"{folder}/{file}"))
    above = (tree.real(folder) or "").rpartition("/")[0]
    slot = _number(tree.read(f"{above}/{file}")) if above else None
    return min(own, slot) if own and slot else own


def _has_address(registers: bytes) -> bool:
    """Say whether one of a function's base address registers has an address.

    The lowest four bits are the kind of address; one of 64 bits is two registers long.
    """
    while registers:
        length = 8 if registers[0] & 0b111 == 0b100 else 4
        if int.from_bytes(registers[:length], "little") >> 4:
            return True
        registers = registers[length:]
    return False


def _has_assigned_address(tree: Tree, folder: str) -> bool:
    """Say whether the kernel has assigned a base address, which are the first six of a function's
    resources: `start end flags`.
    """
    lines = (tree.read(f"{folder}/resource") or "").splitlines()
    return any(line.partition(" ")[0].strip("0x") for line in lines[:6])


def _total(text: str | None) -> int | None:
    """Read an aer_stats file: `NAME count` lines, the last of them TOTAL_ERR_*; a root port's total
    is a count alone.

    Older kernels lack the total.
    """
    if not text:
        return None
    counts = {
        name: int(value)
        for name, _, value in (line.strip().rpartition(" ") for line in text.splitlines())
        if value.isdecimal()
    }
    totals = [value for name, value in counts.items() if name.startswith("TOTAL_ERR")]
    return totals[0] if totals else sum(counts.values())


def _number(text: str | None) -> float | None:
    """Read `16`, `16.0 GT/s PCIe`.

    None for `Unknown`, 0 and 255 (all ones: the function does not answer).
    """
    first = (text or "").split(" ")[0]
    try:
        value = float(first)
    except ValueError:
        return None
    return value if 0 < value < 255 else None
