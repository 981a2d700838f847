"""Profiles: the components of a recorded machine, read from TOML.

A profile names sockets, NUMA nodes and root complexes with the cards below them. Addresses, numbers
and files follow from it by rule, so two builds of one profile are equal. Cards are described once,
in `cards.toml`. A profile with `base` is that profile with faults added.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from topobus.sysfs.regular_file import read_regular
from topobus.values.errors import ConfigError

__all__ = [
    "FAULT_KINDS",
    "PROFILES",
    "Card",
    "CardFunction",
    "CoreGroup",
    "CpuPart",
    "Fault",
    "Fpga",
    "Gpu",
    "MemoryOnly",
    "Nic",
    "NumaPart",
    "Profile",
    "Root",
    "Slot",
    "Switch",
    "load_cards",
    "load_profile",
]

PROFILES = ("dgx", "dgx-flaky", "epyc-8numa", "gb200", "laptop")

FAULT_KINDS = ("remove-pci", "cpu-offline", "carrier-down", "link-narrow", "aer-correctable", "aer-fatal", "write")


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of a GPU.

    `kind` is nvidia, amd, intel or display (a display controller that computes nothing).
    """

    kind: str
    model: str = ""
    memory_bytes: int = 0
    has_render: bool = True


class Nic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of a network function.

    `rdma` is the prefix of its RDMA device (`mlx5` makes mlx5_0 …), empty for none.
    """

    speed_mbps: int = 0
    mtu: int = 1500
    has_carrier: bool = True
    is_wireless: bool = False
    rdma: str = ""
    rdma_rate: str = ""
    firmware: str = ""
    total_vfs: int = 0
    num_vfs: int = 0
    vf_device: int = 0
    vf_driver: str = ""


class Fpga(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of an FPGA function. `kind` is xilinx-user, xilinx-management or intel-dfl."""

    kind: str
    model: str


class CardFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One PCI function of a card."""

    vendor: int
    device: int
    subsystem_vendor: int = 0
    subsystem_device: int = 0
    class_code: int
    revision: int = 0
    driver: str = ""
    speed_gts: float = 0.0
    width: int = 0
    bars_bytes: tuple[int, ...] = ()
    gpu: Gpu | None = None
    nic: Nic | None = None
    fpga: Fpga | None = None
    files: dict[str, str] = {}
    """What the card's own kernel driver shows in the function's folder: path to text; `{number}`
    counts the functions of that driver from 0."""
    nodes: tuple[str, ...] = ()
    """Its device nodes, relative to dev; `{number}` as above."""


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card: its functions in order.

    An integrated one is on the root bus, with no port above it.
    """

    title: str
    functions: tuple[CardFunction, ...]
    is_integrated: bool = False


class CoreGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cores of one kind in each socket. `l2_cores` cores share one level-2 cache."""

    count: int
    threads: int = 1
    kind: str = ""
    l1d_kib: int = 32
    l1i_kib: int = 32
    l2_kib: int = 1024
    l2_cores: int = 1


class CpuPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processors.

    `numbering` split: all first threads, then all second ones. Adjacent: siblings side by side.
    """

    model: str
    vendor: str
    sockets: int
    cores: tuple[CoreGroup, ...]
    numbering: str = "split"
    l3_kib: int = 0
    l3_cores: int = 0
    """Cores that share one level-3 cache; 0: all cores of the socket."""


class MemoryOnly(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NUMA nodes without CPUs, near one socket."""

    ids: str
    socket: int = 0
    memory_gib: int = 0


class NumaPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NUMA nodes with CPUs, equal parts of each socket, and those without.

    `hugepages` is page size in KiB to pages per node.
    """

    nodes_per_socket: int = 1
    memory_gib: int = 16
    """Of each node with CPUs."""
    hugepages: dict[int, int] = {}
    distances: dict[str, int] = {}
    """same_socket, other_socket, memory_near, memory_far, memory_other (between two memory-only
    nodes)."""
    memory_only: tuple[MemoryOnly, ...] = ()


class Slot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A card below a root port, or on the root bus when it is integrated. `at` fixes
    device.function on the root bus.
    """

    card: str
    at: str = ""


class Switch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A PCIe switch below a root port, with one downstream port per card."""

    cards: tuple[str, ...]


class Root(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A root complex by its first bus (`0000:15`). `numa_node` -1: unknown to the firmware."""

    bus: str
    numa_node: int
    slots: tuple[Slot, ...] = ()
    switches: tuple[Switch, ...] = ()


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong `at_s` seconds after the start and, with `for_s`, heals after so
    long.
    """

    at_s: float
    what: str
    target: str
    """A PCI address, a CPU id, or for `write` a path of the tree."""
    for_s: float = 0.0
    """0: stays."""
    text: str = ""
    """What `write` writes."""


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine."""

    name: str
    title: str
    architecture: str = "x86_64"
    cpu: CpuPart
    numa: NumaPart
    roots: tuple[Root, ...] = ()
    faults: tuple[Fault, ...] = ()
    cards: dict[str, Card] = {}
    """Cards of this profile's own, beside those that ship (a vendor's test machine brings the
    vendor's card)."""


# Far more than any profile has.
_LARGEST_PROFILE = 1 << 20


def load_profile(name: str | Path) -> Profile:
    """Read a shipped profile by name, or another one by the path of its TOML file.

    Errors: raises ConfigError that names the file and the key.
    """
    where, data = _read(str(name))
    base = data.pop("base", None)
    if base is not None:
        _, below = _read(str(base))
        data = {**below, **data}
    data.setdefault("name", Path(where).stem)
    try:
        profile = msgspec.convert(data, Profile, str_keys=True)
    except msgspec.ValidationError as err:
        raise ConfigError(
            f"{where}: {err}", next_step="compare with the profiles that ship in topobus/simulation/profiles"
        ) from err
    for fault in profile.faults:
        if fault.what not in FAULT_KINDS:
            raise ConfigError(f"{where}: faults: what is {fault.what!r}, wanted one of {', '.join(FAULT_KINDS)}")
    return profile


def load_cards() -> dict[str, Card]:
    """Read all cards that profiles may name."""
    text = files("topobus.simulation").joinpath("cards.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Card])


def _read(name: str) -> tuple[str, dict[str, Any]]:
    if name in PROFILES:
        where, text = (
            f"{name}.toml",
            files("topobus.simulation").joinpath("profiles", f"{name}.toml").read_text(encoding="utf-8"),
        )
    else:
        try:
            where, text = name, read_regular(name, _LARGEST_PROFILE).decode("utf-8", "replace")
        except OSError as err:
            raise ConfigError(
                f"no profile {name!r}", next_step=f"use one of {', '.join(PROFILES)}, or the path of a TOML file"
            ) from err
    try:
        return where, tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"{where}: {err}") from err
