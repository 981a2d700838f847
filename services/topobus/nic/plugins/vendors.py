"""Names of NIC vendors and models by PCI id.

A vendor that the table lacks is named by its number.
Source: the PCI ID repository (pci.ids).
"""

from __future__ import annotations

__all__ = ["model_name", "vendor_name"]

_VENDORS = {
    0x1077: "QLogic",
    0x10EC: "Realtek",
    0x10EE: "Xilinx",
    0x11AB: "Marvell",
    0x1425: "Chelsio",
    0x14E4: "Broadcom",
    0x15AD: "VMware",
    0x15B3: "Mellanox",
    0x177D: "Cavium",
    0x1924: "Solarflare",
    0x19A2: "Emulex",
    0x19E5: "Huawei",
    0x19EE: "Netronome",
    0x1AF4: "Red Hat",
    0x1D0F: "Amazon",
    0x1D6A: "Aquantia",
    0x1DD8: "Pensando",
    0x8086: "Intel",
}
_MODELS = {
    (0x14E4, 0x16D7): "BCM57414",
    (0x14E4, 0x1750): "BCM57508",
    (0x14E4, 0x1751): "BCM57504",
    (0x14E4, 0x1760): "BCM57608",
    (0x15B3, 0x1013): "ConnectX-4",
    (0x15B3, 0x1015): "ConnectX-4 Lx",
    (0x15B3, 0x1017): "ConnectX-5",
    (0x15B3, 0x1018): "ConnectX-5 VF",
    (0x15B3, 0x1019): "ConnectX-5 Ex",
    (0x15B3, 0x101B): "ConnectX-6",
    (0x15B3, 0x101C): "ConnectX-6 VF",
    (0x15B3, 0x101D): "ConnectX-6 Dx",
    (0x15B3, 0x101E): "ConnectX VF",
    (0x15B3, 0x101F): "ConnectX-6 Lx",
    (0x15B3, 0x1021): "ConnectX-7",
    (0x15B3, 0x1023): "ConnectX-8",
    (0x15B3, 0xA2D6): "BlueField-2",
    (0x15B3, 0xA2DC): "BlueField-3",
    (0x1AF4, 0x1000): "Virtio network device",
    (0x1AF4, 0x1041): "Virtio network device",
    (0x1D0F, 0xEC20): "Elastic Network Adapter",
    (0x1D0F, 0xEFA0): "Elastic Fabric Adapter",
    (0x1D0F, 0xEFA1): "Elastic Fabric Adapter",
    (0x1D0F, 0xEFA2): "Elastic Fabric Adapter",
    (0x8086, 0x1521): "I350",
    (0x8086, 0x1563): "X550",
    (0x8086, 0x1565): "X550 VF",
    (0x8086, 0x1572): "X710",
    (0x8086, 0x1583): "XL710",
    (0x8086, 0x1592): "E810-C",
    (0x8086, 0x1593): "E810-C",
    (0x8086, 0x159B): "E810-XXV",
    (0x8086, 0x154C): "XL710 VF",
    (0x8086, 0x1889): "Adaptive VF",
}


def vendor_name(vendor: int) -> str:
    """Name a maker.

    >>> vendor_name(0x15b3), vendor_name(0xabcd)
    ('Mellanox', '0xabcd')
    """
    return _VENDORS.get(vendor, f"{vendor:#06x}")


def model_name(vendor: int, device: int) -> str:
    """Name a model, or return "" when the table lacks it."""
    return _MODELS.get((vendor, device), "")
