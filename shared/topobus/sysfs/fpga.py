"""Reads FPGAs of the kernel's Device Feature List (DFL) framework: management engine, ports, loaded
functions and recorded errors.

Values are the state at the time of the call. Error registers are only read: the operator who
repairs the card clears them.
Source: Documentation/fpga/dfl.rst, Documentation/ABI/testing/sysfs-platform-dfl-fme,
sysfs-platform-dfl-port, sysfs-class-fpga-region.
"""

from __future__ import annotations

import re

from msgspec import Struct

from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.pci import PciAddress

__all__ = ["DflCard", "DflPort", "ErrorRegister", "dfl_regions", "read_dfl_card"]

_REGIONS = "sys/class/fpga_region"
# Error registers of the management engine; inject_errors is a test aid and no error.
_ENGINE_REGISTERS = ("catfatal_errors", "nonfatal_errors", "fme_errors", "pcie0_errors", "pcie1_errors")


class ErrorRegister(Struct, frozen=True, kw_only=True):
    """One error register with its value. Zero means no error."""

    name: str
    path: str
    value: int


class DflPort(Struct, frozen=True, kw_only=True):
    """One port, through which one accelerator function (AFU) is reached."""

    name: str
    """`dfl-port.0`, also its character device."""
    path: str
    number: int = 0
    """Which port of its FPGA it is, by the hardware; where the kernel does not show it, its
    place among them."""
    afu_id: str = ""
    """UUID of the loaded function, 32 hexadecimal digits; all ones when the function does not
    answer."""
    errors: ErrorRegister | None = None
    power_state: int | None = None
    """0 normal, 1 and 2 throttled (AP1, AP2), 6 stopped (AP6)."""

    @property
    def has_crashed(self) -> bool:
        """Return whether the function's id reads as all ones, as it does after a dead bus or a hung
        function.
        """
        return re.fullmatch(r"f{32}", self.afu_id) is not None


class DflCard(Struct, frozen=True, kw_only=True):
    """One FPGA: a top-level region with its management engine and its ports."""

    region: str
    """`region0`."""
    path: str
    pci: PciAddress | None = None
    """The PCI function it hangs on; None for one on the processor's own bus."""
    numa_node: int | None = None
    engine: str = ""
    """`dfl-fme.0`, also its character device; empty on a virtual
    function, which has ports alone."""
    bitstream_id: str = ""
    interface_ids: tuple[str, ...] = ()
    """Compatibility ids of the reconfigurable regions, in their order: a bitstream fits when it
    names one."""
    ports: tuple[DflPort, ...] = ()
    """By number; those that went to virtual functions are not there."""
    port_count: int = 0
    """How many ports it has, with those that went to virtual functions."""
    errors: tuple[ErrorRegister, ...] = ()
    """All registers of the management engine, zero ones too."""
    alarms: tuple[ErrorRegister, ...] = ()
    """Temperature and power alarms (`temp1_crit_alarm`), one while it lasts, else zero."""

    def interface_id(self, port: DflPort) -> str:
        """Return the compatibility id of the region behind a port. Empty where there is none.

        The engine makes one region for each port that the hardware has, in their order
        (dfl-fme-pr.c), so they pair off. When their number differs, a region cannot be assigned to
        a port, unless all have one id.
        """
        if len(self.interface_ids) == len(self.ports):
            return self.interface_ids[self.ports.index(port)]
        return self.interface_ids[0] if len(set(self.interface_ids)) == 1 else ""


def dfl_regions(tree: Tree) -> tuple[str, ...]:
    """Name the top-level regions, one per FPGA: `region0`.

    Inner regions (the reconfigurable ones) are in the same class. They have neither engine nor
    ports and are part of their card.
    """
    return tuple(
        region for region in tree.names(_REGIONS) if any(_is_part(name) for name in tree.names(f"{_REGIONS}/{region}"))
    )


def read_dfl_card(tree: Tree, region: str) -> DflCard:
    """Read one FPGA by its region.

    Errors: raises HardwareError when the region is gone, or a file of it cannot be read.
    """
    path = tree.real(f"{_REGIONS}/{region}")
    if path is None:
        raise HardwareError(f"{_REGIONS}/{region} under {tree.root} is gone", path=f"{_REGIONS}/{region}")
    parts = [name for name in tree.names(path) if _is_part(name)]
    engine = next((name for name in parts if name.startswith("dfl-fme.")), "")
    names = [name for name in parts if name.startswith("dfl-port.")]
    ports = sorted(
        (_read_port(tree, f"{path}/{name}", name, place) for place, name in enumerate(names)),
        key=lambda port: port.number,
    )
    return _read_card(tree, region, path, engine, tuple(ports))


def _is_part(name: str) -> bool:
    return re.fullmatch(r"dfl-(fme|port)\.\d+", name) is not None


def _read_card(tree: Tree, region: str, path: str, engine: str, ports: tuple[DflPort, ...]) -> DflCard:
    engine_path = f"{path}/{engine}"
    return DflCard(
        region=region,
        path=path,
        pci=_pci_of(path),
        numa_node=_numa_node(tree, path),
        engine=engine,
        bitstream_id=(tree.read(f"{engine_path}/bitstream_id") or "") if engine else "",
        interface_ids=_interface_ids(tree, engine_path) if engine else (),
        ports=ports,
        port_count=max((tree.read_int(f"{engine_path}/ports_num", 0) or 0) if engine else 0, len(ports)),
        errors=_registers(tree, f"{engine_path}/errors", _ENGINE_REGISTERS) if engine else (),
        alarms=_alarms(tree, engine_path) if engine else (),
    )


def _read_port(tree: Tree, path: str, name: str, place: int) -> DflPort:
    registers = _registers(tree, f"{path}/errors", ("errors",))
    number = tree.read_int(f"{path}/id", 0)
    return DflPort(
        name=name,
        path=path,
        number=place if number is None else number,
        afu_id=(tree.read(f"{path}/afu_id") or "").lower(),
        errors=registers[0] if registers else None,
        power_state=tree.read_int(f"{path}/power_state", 0),
    )


def _registers(tree: Tree, folder: str, names: tuple[str, ...]) -> tuple[ErrorRegister, ...]:
    error_registers = []
    for name in names:
        value = tree.read_int(f"{folder}/{name}", 0)
        if value is not None:
            error_registers.append(ErrorRegister(name=name, path=f"{folder}/{name}", value=value))
    return tuple(error_registers)


def _alarms(tree: Tree, engine_path: str) -> tuple[ErrorRegister, ...]:
    error_registers: list[ErrorRegister] = []
    # The sensors are platform devices below the engine: dfl-fme.0/hwmon/hwmonN, or one level
    # further down in newer kernels.
    folders = [
        engine_path,
        *(f"{engine_path}/{name}" for name in tree.names(engine_path) if name.startswith("dfl_dev.")),
    ]
    for folder in folders:
        for sensor in tree.names(f"{folder}/hwmon"):
            names = tuple(name for name in tree.names(f"{folder}/hwmon/{sensor}") if name.endswith("_alarm"))
            error_registers.extend(_registers(tree, f"{folder}/hwmon/{sensor}", names))
    return tuple(error_registers)


def _interface_ids(tree: Tree, engine_path: str) -> tuple[str, ...]:
    inner = [
        f"{engine_path}/{name}/fpga_region" for name in tree.names(engine_path) if name.startswith("dfl-fme-region.")
    ]
    return tuple(tree.read(f"{folder}/{name}/compat_id") or "" for folder in inner for name in tree.names(folder))


def _pci_of(path: str) -> PciAddress | None:
    for part in reversed(path.split("/")):
        try:
            return PciAddress.parse(part)
        except ValueError:
            continue
    return None


def _numa_node(tree: Tree, path: str) -> int | None:
    """Climb to the first ancestor that knows its NUMA node.

    The kernel's -1 is "unknown", and so is no file at all.
    """
    folder = path
    while folder.count("/") >= 2:
        node = tree.read_int(f"{folder}/numa_node")
        if node is not None:
            return node if node >= 0 else None
        folder = folder.rpartition("/")[0]
    return None
