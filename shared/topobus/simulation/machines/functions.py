"""Builds the files of PCI functions, and those of their network, RDMA, graphics and FPGA drivers.

Pure.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterable

from topobus.simulation.machines.content import Content
from topobus.simulation.machines.layout import PlacedFunction, PortKind
from topobus.simulation.machines.processors import cpus_of_node, mask
from topobus.simulation.machines.profile import Profile
from topobus.sysfs.pci import pci_folder
from topobus.values.idset import CpuSet
from topobus.values.pci import PciAddress

__all__ = ["function_contents", "locality_content"]

_UNCORRECTABLE = (
    "Undefined",
    "DLP",
    "SDES",
    "TLP",
    "FCP",
    "CmpltTO",
    "CmpltAbrt",
    "UnxCmplt",
    "RxOF",
    "MalfTLP",
    "ECRC",
)
_CORRECTABLE = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF")
_AER = {
    "correctable": (*_CORRECTABLE, "TOTAL_ERR_COR"),
    "fatal": (*_UNCORRECTABLE, "TOTAL_ERR_FATAL"),
    "nonfatal": (*_UNCORRECTABLE, "TOTAL_ERR_NONFATAL"),
}
# First render node (Linux drm: DRM_MINOR_RENDER 128) and InfiniBand character major.
_FIRST_RENDER = 128
_UVERBS_MAJOR = 231
# Those of sysfs-class-net-statistics that are read here.
_INTERFACE_COUNTERS = (
    "rx_bytes",
    "tx_bytes",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_crc_errors",
    "rx_frame_errors",
    "rx_length_errors",
    "tx_carrier_errors",
)


class _Counters:
    """Numbers that drivers hand out in the order of probing: here, of addresses."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def take(self, kind: str, first: int = 0) -> int:
        number = self._next.get(kind, first)
        self._next[kind] = number + 1
        return number


def function_contents(profile: Profile, placed: Iterable[PlacedFunction]) -> dict[PciAddress, Content]:
    """Build the files of each function by address, including those outside its folder (links,
    /proc, /dev).

    CPU lists are built by `locality_content`.
    """
    counters = _Counters()
    groups: dict[PciAddress, int] = {}
    contents: dict[PciAddress, Content] = {}
    for placed_function in placed:
        content = Content()
        group = groups.setdefault(placed_function.group, len(groups))
        _add_pci(content, placed_function, group)
        if placed_function.function.nic is not None:
            _add_nic(content, profile, placed_function, counters)
        if placed_function.function.gpu is not None:
            _add_gpu(content, profile, placed_function, counters)
        if placed_function.function.fpga is not None:
            _add_fpga(content, profile, placed_function, counters)
        if placed_function.function.files or placed_function.function.nodes:
            _add_own(content, placed_function, counters)
        contents[placed_function.address] = content
    return contents


def locality_content(profile: Profile, placed: Iterable[PlacedFunction], online: CpuSet) -> dict[PciAddress, Content]:
    """Build the files that depend on which CPUs are online."""
    near = {
        node: cpus_of_node(profile, node, online) for node in {placed_function.numa_node for placed_function in placed}
    }
    contents = {placed_function.address: Content() for placed_function in placed}
    for placed_function in placed:
        cpus = near[placed_function.numa_node]
        contents[placed_function.address].attributes(
            placed_function.folder, {"local_cpulist": cpus, "local_cpus": mask(cpus)}
        )
    return contents


def _add_pci(content: Content, placed_function: PlacedFunction, group: int) -> None:
    function, folder = placed_function.function, placed_function.folder
    content.attributes(
        folder,
        {
            "vendor": f"0x{function.vendor:04x}",
            "device": f"0x{function.device:04x}",
            "subsystem_vendor": f"0x{function.subsystem_vendor:04x}",
            "subsystem_device": f"0x{function.subsystem_device:04x}",
            "class": f"0x{function.class_code:06x}",
            "revision": f"0x{function.revision:02x}",
            "numa_node": placed_function.numa_node,
            "enable": 1,
            "modalias": f"pci:v{function.vendor:08X}d{function.device:08X}",
            "config": _config(placed_function),
            "resource": "\n".join(_resource(function.bars_bytes)),
        },
    )
    if function.width:
        speed = f"{function.speed_gts:.1f} GT/s PCIe"
        content.attributes(
            folder,
            {
                "current_link_speed": speed,
                "max_link_speed": speed,
                "current_link_width": function.width,
                "max_link_width": function.width,
            },
        )
    if placed_function.physfn is None and placed_function.port is not PortKind.INTEGRATED:
        for kind, names in _AER.items():
            content.text(f"{folder}/aer_dev_{kind}", "\n".join(f"{name} 0" for name in names))
    content.text(f"{folder}/uevent", "\n".join(_uevent(placed_function)))
    content.link(pci_folder(placed_function.address), folder)
    content.link(f"{folder}/subsystem", "sys/bus/pci")
    content.link(f"{folder}/iommu_group", f"sys/kernel/iommu_groups/{group}")
    content.link(f"sys/kernel/iommu_groups/{group}/devices/{placed_function.address}", folder)
    if function.driver:
        content.link(f"{folder}/driver", f"sys/bus/pci/drivers/{function.driver}")
        content.link(f"sys/bus/pci/drivers/{function.driver}/{placed_function.address}", folder)
    parent = folder.rpartition("/")[0]
    if placed_function.physfn is not None:
        content.link(f"{folder}/physfn", f"{parent}/{placed_function.physfn}")
        content.link(f"{parent}/{placed_function.physfn}/virtfn{placed_function.vf_index}", folder)
    if function.nic is not None and function.nic.total_vfs:
        content.attributes(
            folder,
            {
                "sriov_totalvfs": function.nic.total_vfs,
                "sriov_numvfs": function.nic.num_vfs,
                "sriov_drivers_autoprobe": 1,
            },
        )


def _add_nic(content: Content, profile: Profile, placed_function: PlacedFunction, counters: _Counters) -> None:
    nic = placed_function.function.nic
    assert nic is not None
    address = placed_function.address
    # As systemd names them (predictable names): domain when not 0, bus, slot,
    # function when there are several.
    prefix = "wlp" if nic.is_wireless else "enp"
    domain = f"P{address.domain}" if address.domain else ""
    name = (
        prefix.replace("p", f"{domain}p")
        + f"{address.bus}s{address.device}"
        + (f"f{address.function}" if address.function else "")
    )
    mac = _digest(profile, address)[:5]
    folder = f"{placed_function.folder}/net/{name}"
    content.attributes(
        folder,
        {
            "address": "02:" + ":".join(f"{byte:02x}" for byte in mac),
            "operstate": "up" if nic.has_carrier else "down",
            "carrier": int(nic.has_carrier),
            "carrier_changes": 1,
            "speed": nic.speed_mbps if nic.has_carrier else -1,
            "duplex": "full",
            "mtu": nic.mtu,
            "type": 1,
            "ifindex": counters.take("ifindex", 2),
            "dev_id": "0x0",
            "dev_port": 0,
            "flags": "0x1003",
        },
    )
    content.attributes(f"{folder}/statistics", dict.fromkeys(_INTERFACE_COUNTERS, 0))
    content.link(f"{folder}/device", placed_function.folder)
    content.link(f"{folder}/subsystem", "sys/class/net")
    content.link(f"sys/class/net/{name}", folder)
    if nic.is_wireless:
        content.text(f"{folder}/wireless/status", "0x0")
    if nic.rdma:
        _add_rdma(content, placed_function, name, mac, counters)


def _add_rdma(content: Content, placed_function: PlacedFunction, netdev: str, mac: bytes, counters: _Counters) -> None:
    nic = placed_function.function.nic
    assert nic is not None
    name = f"{nic.rdma}_{counters.take(f'rdma/{nic.rdma}')}"
    number = counters.take("uverbs")
    folder = f"{placed_function.folder}/infiniband/{name}"
    guid = f"02{mac[0]:02x}:{mac[1]:02x}03:00{mac[2]:02x}:{mac[3]:02x}{mac[4]:02x}"
    content.attributes(
        folder,
        {
            "node_guid": guid,
            "sys_image_guid": guid,
            "fw_ver": nic.firmware,
            "hca_type": f"MT{placed_function.function.device & 0xFFFF}" if nic.rdma == "mlx5" else "irdma",
            "node_type": "1: CA",
        },
    )
    content.attributes(
        f"{folder}/ports/1",
        {
            "state": "4: ACTIVE" if nic.has_carrier else "1: DOWN",
            "phys_state": "5: LinkUp" if nic.has_carrier else "3: Disabled",
            "rate": nic.rdma_rate,
            "link_layer": "Ethernet",
            "lid": "0x0",
        },
    )
    content.attributes(f"{folder}/ports/1/counters", {"port_rcv_data": 0, "port_xmit_data": 0})
    content.text(f"{folder}/ports/1/gid_attrs/ndevs/0", netdev)
    content.text(f"{folder}/ports/1/gid_attrs/types/0", "RoCE v2")
    content.text(f"{folder}/ports/1/gids/0", f"fe80:0000:0000:0000:{guid}")
    content.link(f"{folder}/device", placed_function.folder)
    content.link(f"sys/class/infiniband/{name}", folder)
    verbs = f"{placed_function.folder}/infiniband_verbs/uverbs{number}"
    content.attributes(verbs, {"ibdev": name, "dev": f"{_UVERBS_MAJOR}:{192 + number}", "abi_version": 1})
    content.link(f"{verbs}/device", placed_function.folder)
    content.link(f"sys/class/infiniband_verbs/uverbs{number}", verbs)
    content.text(f"dev/infiniband/uverbs{number}", "")


def _add_gpu(content: Content, profile: Profile, placed_function: PlacedFunction, counters: _Counters) -> None:
    gpu = placed_function.function.gpu
    assert gpu is not None
    render = _add_drm(content, placed_function, counters, has_card=True, has_render=gpu.has_render)
    identity = uuid.uuid5(uuid.NAMESPACE_OID, f"topobus/{profile.name}/{placed_function.address}")
    if gpu.kind == "nvidia":
        minor = counters.take("nvidia")
        content.text(
            f"proc/driver/nvidia/gpus/{placed_function.address}/information",
            f"Model: \t\t {gpu.model}\nIRQ:   \t\t 18\nGPU UUID: \t GPU-{identity}\nVideo BIOS: \t 96.00.74.00.01\n"
            f"Bus Type: \t PCIe\nDMA Size: \t 52 bits\nBus Location: \t {placed_function.address}\nDevice "
            f"Minor: \t {minor}\n"
            "GPU Firmware: \t 550.90.07\nGPU Excluded:\t No",
        )
        content.text(f"dev/nvidia{minor}", "")
    elif gpu.kind == "amd":
        unique = f"{identity.int >> 64:016x}"
        content.attributes(
            placed_function.folder,
            {
                "mem_info_vram_total": gpu.memory_bytes,
                "mem_info_vram_used": 10854400,
                "mem_info_vram_vendor": "samsung",
                "unique_id": unique,
                "product_name": gpu.model,
                "gpu_busy_percent": 0,
            },
        )
        number = profile.cpu.sockets * profile.numa.nodes_per_socket + counters.take("kfd")
        node = f"sys/devices/virtual/kfd/kfd/topology/nodes/{number}"
        location = (
            placed_function.address.bus << 8 | placed_function.address.device << 3 | placed_function.address.function
        )
        content.text(f"{node}/gpu_id", int(unique[:4], 16))
        content.text(f"{node}/name", "aldebaran")
        content.text(
            f"{node}/properties",
            "cpu_cores_count 0\nsimd_count 416\nmem_banks_count 1\nvendor_id "
            f"{placed_function.function.vendor}\ndevice_id {placed_function.function.device}\n"
            f"location_id {location}\ndomain {placed_function.address.domain}\ndrm_render_minor "
            f"{render}\nunique_id {int(unique, 16)}",
        )


def _add_drm(
    content: Content, placed_function: PlacedFunction, counters: _Counters, *, has_card: bool, has_render: bool
) -> int:
    if has_card:
        card = counters.take("card")
        _add_drm_node(content, placed_function, f"card{card}", card)
    if not has_render:
        return -1
    render = counters.take("render", _FIRST_RENDER)
    _add_drm_node(content, placed_function, f"renderD{render}", render)
    return render


def _add_drm_node(content: Content, placed_function: PlacedFunction, name: str, minor: int) -> None:
    folder = f"{placed_function.folder}/drm/{name}"
    content.text(f"{folder}/dev", f"226:{minor}")
    content.link(f"{folder}/device", placed_function.folder)
    content.link(f"sys/class/drm/{name}", folder)
    content.text(f"dev/dri/{name}", "")


def _add_fpga(content: Content, profile: Profile, placed_function: PlacedFunction, counters: _Counters) -> None:
    fpga = placed_function.function.fpga
    assert fpga is not None
    identity = uuid.uuid5(uuid.NAMESPACE_OID, f"topobus/{profile.name}/{placed_function.address}")
    if fpga.kind == "xilinx-management":
        instance = (
            placed_function.address.bus << 8 | placed_function.address.device << 3 | placed_function.address.function
        )
        content.attributes(
            placed_function.folder,
            {"instance": instance, "mgmt_pf": "", "ready": "0x1", "dev_offline": 0, "interface_uuids": identity.hex},
        )
        content.attributes(f"{placed_function.folder}/rom.m.{instance}", {"VBNV": fpga.model, "uuid": identity.hex})
        content.text(f"{placed_function.folder}/xmc.m.{instance}/serial_num", f"XFL1{identity.int % 10**8:08d}")
        content.text(f"dev/xclmgmt{instance}", "")
    elif fpga.kind == "xilinx-user":
        instance = (
            placed_function.address.bus << 8 | placed_function.address.device << 3 | placed_function.address.function
        )
        content.attributes(
            placed_function.folder,
            {
                "user_pf": "",
                "ready": "0x1",
                "dev_offline": 0,
                "logic_uuids": identity.hex,
                "xclbinuuid": "",
                "mig_calibration": 1,
            },
        )
        content.attributes(f"{placed_function.folder}/rom.u.{instance}", {"VBNV": fpga.model})
        _add_drm(content, placed_function, counters, has_card=False, has_render=True)
    else:
        _add_dfl(content, placed_function, fpga.model, identity, counters)


def _add_dfl(
    content: Content, placed_function: PlacedFunction, model: str, identity: uuid.UUID, counters: _Counters
) -> None:
    number = counters.take("dfl")
    region = f"{placed_function.folder}/fpga_region/region{number}"
    content.link(f"sys/class/fpga_region/region{number}", region)
    content.link(f"{region}/device", placed_function.folder)
    fme = f"{region}/dfl-fme.{number}"
    content.attributes(
        fme,
        {
            "bitstream_id": f"0x{identity.int >> 64:x}",
            "bitstream_metadata": "0x2204081",
            "ports_num": 1,
            "fabric_version": 0,
            "dev": f"238:{number}",
        },
    )
    content.attributes(
        f"{fme}/errors",
        {"fme_errors": "0x0", "pcie0_errors": "0x0", "catfatal_errors": "0x0", "nonfatal_errors": "0x0"},
    )
    manager = f"{fme}/dfl-fme-mgr.{number}/fpga_manager/fpga{number}"
    content.attributes(manager, {"name": "DFL FPGA FME Manager", "state": "operating", "status": ""})
    content.link(f"sys/class/fpga_manager/fpga{number}", manager)
    port = f"{region}/dfl-port.{number}"
    content.attributes(port, {"id": 0, "afu_id": identity.hex, "power_state": "0x0", "dev": f"238:{128 + number}"})
    content.attributes(f"{port}/errors", {"errors": "0x0", "first_error": "0x0"})
    device = f"{fme}/dfl_dev.{number}"
    content.attributes(device, {"type": "0x0", "feature_id": "0x12", "modalias": f"dfl:t0000f0012 {model}"})
    content.link(f"sys/bus/dfl/devices/dfl_dev.{number}", device)
    content.text(f"dev/dfl-fme.{number}", "")
    content.text(f"dev/dfl-port.{number}", "")


def _add_own(content: Content, placed_function: PlacedFunction, counters: _Counters) -> None:
    number = str(counters.take(f"driver/{placed_function.function.driver}"))
    for path, text in placed_function.function.files.items():
        content.text(f"{placed_function.folder}/{path}", text.replace("{number}", number))
    for node in placed_function.function.nodes:
        content.text(f"dev/{node.replace('{number}', number)}", "")


def _config(placed_function: PlacedFunction) -> bytes:
    """Build 256 bytes of configuration space: header, and a PCI Express capability with the kind of
    port.
    """
    function = placed_function.function
    is_bridge = placed_function.secondary_bus > 0
    space = bytearray(256)
    struct.pack_into("<HHHH", space, 0x00, function.vendor, function.device, 0x0406, 0x0010)
    space[0x08] = function.revision
    space[0x09:0x0C] = function.class_code.to_bytes(3, "little")
    space[0x0E] = 1 if is_bridge else 0
    if is_bridge:
        space[0x18:0x1B] = bytes((placed_function.address.bus, placed_function.secondary_bus, placed_function.last_bus))
    else:
        struct.pack_into("<HH", space, 0x2C, function.subsystem_vendor, function.subsystem_device)
        # A virtual function has none: they are its physical one's.
        for register, start, _ in () if placed_function.physfn is not None else _base_addresses(function.bars_bytes):
            # 64 bits wide, and prefetchable.
            struct.pack_into("<Q", space, 0x10 + 4 * register, start | 0xC)
    if function.class_code == 0x060000:
        # A host bridge is conventional PCI: no capability list.
        struct.pack_into("<H", space, 0x06, 0)
        return bytes(space)
    space[0x34] = 0x40
    # Capability 0x10, no next one, version 2, device/port type in bits 7:4.
    struct.pack_into("<BBH", space, 0x40, 0x10, 0, 2 | placed_function.port.value << 4)
    code = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(function.speed_gts, 0)
    struct.pack_into("<I", space, 0x4C, code | function.width << 4)
    struct.pack_into("<H", space, 0x52, code | function.width << 4)
    return bytes(space)


def _base_addresses(bars_bytes: tuple[int, ...]) -> Iterable[tuple[int, int, int]]:
    """Assign addresses of 64 bits: the number of the register, start and size of each."""
    start = 0x200000000000
    for index, size in enumerate(bars_bytes):
        yield 2 * index, start, size
        start += size


def _resource(bars_bytes: tuple[int, ...]) -> Iterable[str]:
    lines = ["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 7
    for register, start, size in _base_addresses(bars_bytes):
        lines[register] = f"0x{start:016x} 0x{start + size - 1:016x} 0x000000000014220c"
    return lines


def _uevent(placed_function: PlacedFunction) -> Iterable[str]:
    function = placed_function.function
    if function.driver:
        yield f"DRIVER={function.driver}"
    yield f"PCI_CLASS={function.class_code:X}"
    yield f"PCI_ID={function.vendor:04X}:{function.device:04X}"
    yield f"PCI_SLOT_NAME={placed_function.address}"


def _digest(profile: Profile, address: PciAddress) -> bytes:
    return hashlib.sha256(f"{profile.name}/{address}".encode()).digest()
