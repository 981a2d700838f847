"""Reads PCI functions: ids, place in the tree, port type of bridges, link, NUMA node and near CPUs.

They are in sys/bus/pci/devices and the device folders that its links lead to. The folder of a
function is inside those of the bridges above it, so its path gives the tree. The port type of a
bridge is in its configuration space.
Source: Documentation/ABI/testing/sysfs-bus-pci; PCI Express base specification, Device/Port Type in
the PCI Express Capabilities register.
"""

from __future__ import annotations

import re

from topobus.sysfs.idsets import read_cpus
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.idset import CpuSet
from topobus.values.machine import PciDevice, PciLink
from topobus.values.pci import PciAddress

__all__ = ["PCI_DEVICES", "pci_folder", "read_pci_devices"]

PCI_DEVICES = "sys/bus/pci/devices"
"""The folder that has a folder for each function."""

_BRIDGE_CLASS = 0x0604
_EXPRESS = 0x10
# Device/Port Type, bits 7:4 of the capability's second word.
_ROOT_PORT, _UPSTREAM, _DOWNSTREAM = 4, 5, 6
# Type 1 header: a bridge. Bit 7 means "several functions".
_HEADER_BRIDGE = 1
_MAX_CAPABILITIES = 48


def pci_folder(address: PciAddress | str) -> str:
    """Return the folder of a PCI function, relative to the tree's root. It may be absent.

    >>> pci_folder(PciAddress.parse("0000:3b:00.0"))
    'sys/bus/pci/devices/0000:3b:00.0'
    """
    return f"{PCI_DEVICES}/{address}"


def read_pci_devices(tree: Tree, usable: CpuSet) -> tuple[tuple[PciDevice, ...], tuple[str, ...]]:
    """Read all functions, sorted by address. `usable` are the CPUs that we may use.

    A text that is no number gives a warning, and the number comes from configuration space, or else
    is unknown. A function whose place cannot be read is left out with a warning. The others stay.
    """
    pci_devices: dict[PciAddress, PciDevice] = {}
    warnings: list[str] = []
    ports: dict[PciAddress, int | None] = {}
    for name in tree.names(PCI_DEVICES):
        try:
            address = PciAddress.parse(name)
            device, port = _read(tree, name, address, usable, warnings)
        except (HardwareError, ValueError) as err:
            warnings.append(f"{pci_folder(name)}: {err.message if isinstance(err, HardwareError) else err}; left out")
            continue
        if device is not None:
            pci_devices[address] = device
            ports[address] = port
    return tuple(_finish(device, pci_devices, ports) for _, device in sorted(pci_devices.items())), tuple(warnings)


def _read(
    tree: Tree, name: str, address: PciAddress, usable: CpuSet, warnings: list[str]
) -> tuple[PciDevice | None, int | None]:
    real = tree.real(pci_folder(name))
    if real is None:
        # The link dangles: the function went away between the listing and now.
        return None, None
    config = tree.read_bytes(f"{real}/config", 256) or b""
    folder = pci_folder(name)
    # The offset of each number in configuration space, which the kernel shows to every user up to
    # byte 64 (PCI local bus specification, chapter 6).
    class_code = _number(tree, folder, "class", config[0x09:0x0C], warnings)
    is_bridge = class_code >> 8 == _BRIDGE_CLASS and (len(config) < 0x10 or config[0x0E] & 0x7F == _HEADER_BRIDGE)
    port = _port_type(config) if is_bridge else None
    node = _number(tree, folder, "numa_node", b"", warnings, missing=-1)
    local = _local_cpus(tree, folder, warnings)
    root, path = _place(real)
    physfn = tree.real(f"{real}/physfn")
    device = PciDevice(
        address=address,
        vendor=_number(tree, folder, "vendor", config[0x00:0x02], warnings),
        device=_number(tree, folder, "device", config[0x02:0x04], warnings),
        subsystem_vendor=_number(tree, folder, "subsystem_vendor", b"", warnings),
        subsystem_device=_number(tree, folder, "subsystem_device", b"", warnings),
        class_code=class_code,
        revision=_revision(tree, folder, config, warnings),
        root=root,
        path=path,
        is_bridge=is_bridge,
        is_root_port=port == _ROOT_PORT or (is_bridge and port is None and not path and _has_express(tree, real)),
        is_switch_port=port in (_UPSTREAM, _DOWNSTREAM),
        numa_node=node if node >= 0 else None,
        driver=tree.link_name(f"{real}/driver"),
        link=_read_link(tree, real),
        iommu_group=_read_group(tree, real),
        physfn=PciAddress.parse(physfn.rpartition("/")[2]) if physfn else None,
        near_cpus=local & usable if local else usable,
    )
    return device, port


def _number(tree: Tree, folder: str, file: str, spare: bytes, warnings: list[str], *, missing: int = 0) -> int:
    """Read one number.

    When the file is garbage or unreadable, add a warning and take the spare bytes of configuration
    space, else `missing`.
    """
    try:
        value = tree.read_int(f"{folder}/{file}", 0)
    except HardwareError as err:
        # A function that does not answer reads as bytes of all ones.
        is_readable = bool(spare) and set(spare) != {0xFF}
        value = int.from_bytes(spare, "little") if is_readable else None
        instead = f"taken from configuration space as {value:#x}" if value is not None else "taken as unknown"
        warnings.append(f"{err.message}; {instead}")
    return missing if value is None else value


def _local_cpus(tree: Tree, folder: str, warnings: list[str]) -> CpuSet | None:
    try:
        return read_cpus(tree, folder, "local_cpus", "local_cpulist")
    except HardwareError as err:
        warnings.append(f"{err.message}; taken as near all CPUs")
        return None


def _finish(
    device: PciDevice, pci_devices: dict[PciAddress, PciDevice], ports: dict[PciAddress, int | None]
) -> PciDevice:
    """Set the switch: the innermost upstream port above.

    Where we may not read configuration space, derive it from the order of the bridges.
    """
    switch: PciAddress | None = None
    is_switch_port = device.is_switch_port
    above = [pci_devices[pci_address] for pci_address in device.path if pci_address in pci_devices]
    for pci_device in reversed(above):
        if ports.get(pci_device.address) == _UPSTREAM:
            switch = pci_device.address
            break
    if switch is None and not any(ports.get(pci_device.address) is not None for pci_device in above):
        # Root port, upstream port, downstream port: the second PCI Express bridge on the way
        # down is a switch's upstream port.
        express = [pci_device for pci_device in above if pci_device.link is not None]
        if len(express) >= 3:
            switch = express[-2].address
        if device.is_bridge and ports.get(device.address) is None and device.link is not None and express:
            is_switch_port = True
    if switch is None and not is_switch_port:
        return device
    values = {name: getattr(device, name) for name in device.__struct_fields__}
    return PciDevice(**{**values, "switch": switch, "is_switch_port": is_switch_port})


def _place(real: str) -> tuple[str, tuple[PciAddress, ...]]:
    """Split a device folder into its root complex and the bridges above the function.

    >>> _place("sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0")
    ('pci0000:15', (PciAddress('0000:15:01.0'),))
    """
    parts = real.split("/")
    # Some platforms (VMD, Hyper-V, ARM host bridges) put the root below other folders,
    # or nest a domain inside another.
    roots = [index for index, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}", part)]
    if not roots:
        return "", ()
    path: list[PciAddress] = []
    for part in parts[roots[-1] + 1 : -1]:
        try:
            path.append(PciAddress.parse(part))
        except ValueError:
            continue
    return parts[roots[-1]], tuple(path)


def _port_type(config: bytes) -> int | None:
    """Find the PCI Express capability and give its device/port type.

    None when there is none, or only 64 bytes may be read.
    """
    # Status register bit 4: there is a capability list.
    if len(config) < 0x40 or not config[0x06] & 0x10:
        return None
    offset = config[0x34] & 0xFC
    for _ in range(_MAX_CAPABILITIES):
        if offset < 0x40 or offset + 4 > len(config):
            return None
        if config[offset] == _EXPRESS:
            return config[offset + 2] >> 4
        offset = config[offset + 1] & 0xFC
    return None


def _has_express(tree: Tree, real: str) -> bool:
    # The kernel shows link files for PCI Express functions only.
    return tree.exists(f"{real}/max_link_speed")


def _revision(tree: Tree, folder: str, config: bytes, warnings: list[str]) -> int:
    if len(config) > 0x08:
        return config[0x08]
    # Without any source: all ones, as a function reads that does not answer.
    return _number(tree, folder, "revision", b"", warnings, missing=0xFF)


def _read_link(tree: Tree, real: str) -> PciLink | None:
    width = _whole(tree.read(f"{real}/current_link_width"))
    max_width = _whole(tree.read(f"{real}/max_link_width"))
    if not width and not max_width:
        return None
    return PciLink(
        speed_gts=_speed(tree.read(f"{real}/current_link_speed")),
        width=width,
        max_speed_gts=_speed(tree.read(f"{real}/max_link_speed")),
        max_width=max_width,
    )


def _speed(text: str | None) -> float:
    """Read `16.0 GT/s PCIe` or `8 GT/s`. 0 for `Unknown`."""
    match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", text or "")
    return float(match[1]) if match else 0.0


def _whole(text: str | None) -> int:
    # 255 lanes is the value of an unplugged function; 63 is the same in the six bits of the
    # register.
    value = int(text) if text and text.isdecimal() else 0
    return value if 0 < value <= 32 else 0


def _read_group(tree: Tree, real: str) -> int | None:
    name = tree.link_name(f"{real}/iommu_group")
    return int(name) if name.isdecimal() else None
