"""MIG of the libnvidia-ml of a profile: what NVIDIA's GPUs offer, instances that somebody else
makes, and the files of the kernel module about them.

The tables are NVML's: profile ids, sizes and placements as `nvidia-smi mig -lgip` and `-lgipp`
print them in NVIDIA's MIG User Guide ("Creating GPU instances", the same placements for A100 and
H100), engines and copy engines from its "Supported MIG Profiles" (A100, H100, B200). SMs and
memory: A100 from that guide's listings and from NVIDIA/go-nvml pkg/nvml/mock; H100 from listings of
H100-80 cards; those of B200 from go-nvml's mock, rounded up for the halves. That mock's placements
are not used: it gives 3g three memory slices and 1g.20gb one, and the guide four and two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path

import pynvml

from support.fake_nvml import GIB, FakeGpu
from topobus.gpu.nvml.nvml_library import open_library
from topobus.sysfs.tree import HardwareSettings, Tree

__all__ = [
    "A100_40",
    "A100_80",
    "B200",
    "H100_80",
    "MODELS",
    "MigModel",
    "add_capabilities",
    "as_somebody",
    "make_instance",
    "mig_gpu",
]

# Index and id of NVML's profiles, slices, instances, memory slices, and where they may begin.
_PLACES = {
    "1g": (0, 19, 1, 7, 1, (0, 1, 2, 3, 4, 5, 6)),
    "1g+me": (7, 20, 1, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    "1g.2": (9, 15, 1, 4, 2, (0, 2, 4, 6)),
    "2g": (1, 14, 2, 3, 2, (0, 2, 4)),
    "3g": (2, 9, 3, 2, 4, (0, 4)),
    "4g": (3, 5, 4, 1, 4, (0,)),
    "7g": (4, 0, 7, 1, 8, (0,)),
}


@dataclass(frozen=True, kw_only=True)
class MigModel:
    """What one model of GPU offers."""

    name: str
    total_bytes: int
    engines: tuple[int, ...]
    """SMs, copy engines, decoders, encoders, JPEG and OFA of the whole GPU."""
    profiles: dict[str, tuple[str, int, int, int, int, int, int, int]]
    """Key of the places to: name, MiB, SMs, copy engines, decoders, encoders, JPEG, OFA."""

    def lines(self) -> tuple[str, ...]:
        """Write the GPU's lines of the profile."""
        written = [f"engines {' '.join(map(str, self.engines))}"]
        for key, (name, mib, *engines) in self.profiles.items():
            index, profile, slices, count, size, starts = _PLACES[key]
            numbers = " ".join(map(str, engines))
            written.append(
                f"migprofile {index} {profile} {slices} {count} {numbers} {mib} {name} {size} "
                f"{' '.join(map(str, starts))}"
            )
        return tuple(written)

    def placements(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Give each place of each profile with the profile's id and the memory slices that it
        takes.
        """
        return {
            (name, start): (_PLACES[key][1], _PLACES[key][4])
            for key, (name, *_) in self.profiles.items()
            for start in _PLACES[key][5]
        }


def _a100(mib: tuple[int, int, int, int], sizes: tuple[int, int, int, int], sms: int, name: str) -> MigModel:
    eighth, quarter, half, whole = sizes
    return MigModel(
        name=name,
        total_bytes=whole * GIB,
        engines=(108, 7, 5, 0, 1, 1),
        profiles={
            "1g": (f"1g.{eighth}gb", mib[0], 14, 1, 0, 0, 0, 0),
            "1g+me": (f"1g.{eighth}gb+me", mib[0], 14, 1, 1, 0, 1, 1),
            "1g.2": (f"1g.{quarter}gb", mib[1], 14, 1, 1, 0, 0, 0),
            "2g": (f"2g.{quarter}gb", mib[1], 28, 2, 1, 0, 0, 0),
            "3g": (f"3g.{half}gb", mib[2], 42, 3, 2, 0, 0, 0),
            "4g": (f"4g.{half}gb", mib[2], 56, 4, 2, 0, 0, 0),
            "7g": (f"7g.{whole}gb", mib[3], sms, 7, 5, 0, 1, 1),
        },
    )


A100_40 = _a100((4864, 9856, 19968, 40192), (5, 10, 20, 40), 98, "NVIDIA A100-SXM4-40GB")
A100_80 = _a100((9728, 19968, 40192, 80896), (10, 20, 40, 80), 98, "NVIDIA A100-SXM4-80GB")
H100_80 = MigModel(
    name="NVIDIA H100 80GB HBM3",
    total_bytes=80 * GIB,
    engines=(132, 8, 7, 0, 7, 1),
    profiles={
        "1g": ("1g.10gb", 9984, 16, 1, 1, 0, 1, 0),
        "1g+me": ("1g.10gb+me", 9984, 16, 1, 1, 0, 1, 1),
        "1g.2": ("1g.20gb", 20096, 26, 1, 1, 0, 1, 0),
        "2g": ("2g.20gb", 20096, 32, 2, 2, 0, 2, 0),
        "3g": ("3g.40gb", 40448, 60, 3, 3, 0, 3, 0),
        "4g": ("4g.40gb", 40448, 64, 4, 4, 0, 4, 0),
        "7g": ("7g.80gb", 81152, 132, 8, 7, 0, 7, 1),
    },
)
B200 = MigModel(
    name="NVIDIA B200",
    total_bytes=180 * GIB,
    engines=(148, 16, 7, 0, 7, 1),
    profiles={
        "1g": ("1g.23gb", 23552, 18, 2, 1, 0, 1, 0),
        "1g+me": ("1g.23gb+me", 23552, 18, 2, 1, 0, 1, 1),
        "1g.2": ("1g.45gb", 46080, 30, 2, 1, 0, 1, 0),
        "2g": ("2g.45gb", 46080, 36, 3, 1, 0, 1, 0),
        "3g": ("3g.90gb", 92160, 70, 6, 1, 0, 1, 0),
        "4g": ("4g.90gb", 92160, 74, 8, 1, 0, 1, 0),
        "7g": ("7g.180gb", 184320, 148, 16, 1, 0, 1, 1),
    },
)
MODELS = {"a100-40": A100_40, "a100-80": A100_80, "h100-80": H100_80, "b200": B200}


def mig_gpu(model: MigModel, address: str, *, minor: int = 0, is_on: bool = True, uuid: str = "") -> FakeGpu:
    """Make a GPU that can be cut, in MIG mode or not."""
    uuid = uuid or f"GPU-{minor:08d}-2222-3333-4444-555555555555"
    return FakeGpu(
        address=address,
        name=model.name,
        minor=minor,
        uuid=uuid,
        total_bytes=model.total_bytes,
        mig=(is_on, is_on),
        mig_lines=model.lines(),
    )


@contextmanager
def as_somebody(folder: Path) -> Iterator[None]:
    """Have a session with the library of a folder, as somebody beside the driver under test has
    (`nvidia-smi mig`).
    """
    if pynvml.nvmlLib is None:
        open_library(Tree(HardwareSettings(root=str(folder), library_path=str(folder))))
    else:
        pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def make_instance(
    folder: Path, address: str, model: MigModel, name: str, start: int, *, computes: tuple[int, ...] | None = None
) -> int:
    """Make a GPU instance and its compute instances (ids of their profiles; by default one that
    fills it), as somebody with `nvidia-smi mig -cgi`; its id.
    """
    profile, size = model.placements()[name, start]
    full = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[int(name[0])]
    with as_somebody(folder):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address)
        place = byref(pynvml.c_nvmlGpuInstancePlacement_t(start, size))
        instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile, place)
        for compute in (full,) if computes is None else computes:
            pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute)
        return int(pynvml.nvmlGpuInstanceGetInfo(instance).id)


def add_capabilities(root: Path, minor: int, *, major: int = 236) -> None:
    """Write the kernel module's files of a GPU's capabilities: `mig-minors` names the node of each
    instance that there can be, in the module's order.
    """
    folder = root / "proc" / "driver" / "nvidia-caps"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["config 1", "monitor 2"]
    number = 3 + minor * 15 * 9
    for gi in range(15):
        lines.append(f"gpu{minor}/gi{gi}/access {number + gi * 9}")
        lines += [f"gpu{minor}/gi{gi}/ci{ci}/access {number + gi * 9 + 1 + ci}" for ci in range(8)]
    file = folder / "mig-minors"
    before = file.read_text(encoding="utf-8").splitlines()[2:] if file.exists() else []
    file.write_text("\n".join([*lines[:2], *before, *lines[2:]]) + "\n", encoding="utf-8")
    devices = root / "proc" / "devices"
    devices.write_text(
        f"Character devices:\n  1 mem\n195 nvidia\n{major} nvidia-caps\n\nBlock devices:\n  8 sd\n", encoding="utf-8"
    )
