"""Reads from sysfs what kernel drivers of GPUs publish for people to graph: use, memory, ECC errors
and clocks, and the sensors of hwmon.

There is no reading for what a driver does not publish, or what cannot be read now: a GPU that
sleeps refuses its sensors.
Source: Documentation/gpu/amdgpu/thermal.rst (gpu_busy_percent, hwmon) and ras.rst;
Documentation/ABI/testing/sysfs-driver-intel-i915-hwmon and sysfs-driver-intel-xe-hwmon;
Documentation/hwmon/sysfs-interface; drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c and
drivers/gpu/drm/xe/xe_gt_freq.c.
"""

from __future__ import annotations

from collections.abc import Iterable

from topobus.gpu.sensor_health import ras_counts
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.readings import Quantity, Reading

__all__ = ["amd_readings", "intel_readings"]

_PERCENT, _MICRO, _MILLI, _MHZ = 1e-2, 1e-6, 1e-3, 1e6
# What hwmon's labels mean: amdgpu has `edge` (an MI300 only `junction`), `mem`, `sclk` and `mclk`;
# Intel's drivers have `pkg` and `vram`. amdgpu labels no first sensor of a card that has one alone.
_PARTS = {
    "": "core",
    "edge": "core",
    "junction": "core",
    "pkg": "core",
    "sclk": "core",
    "mem": "memory",
    "vram": "memory",
    "mclk": "memory",
}


def amd_readings(tree: Tree, folder: str) -> list[Reading]:
    """Read a whole AMD GPU.

    Shapes: folder — of its PCI function.
    """
    try:
        errors = ras_counts(tree, f"{folder}/ras/umc_err_count")
    except HardwareError:
        errors = {}
    counts = [
        Reading(quantity=Quantity.MEMORY_ERRORS, part=part, value=float(errors[key]))
        for key, part in (("ce", "corrected"), ("ue", "uncorrected"))
        if key in errors
    ]
    return [
        *_read(tree, f"{folder}/gpu_busy_percent", Quantity.UTILIZATION, _PERCENT),
        *_read(tree, f"{folder}/mem_busy_percent", Quantity.MEMORY_UTILIZATION, _PERCENT),
        *_read(tree, f"{folder}/mem_info_vram_used", Quantity.MEMORY_USED),
        *_read(tree, f"{folder}/mem_info_vram_total", Quantity.MEMORY_SIZE),
        *counts,
        *_sensors(tree, folder),
    ]


def intel_readings(tree: Tree, folder: str, card: str, memory_bytes: int) -> list[Reading]:
    """Read an Intel GPU. Its drivers publish no use of the GPU or of its memory in sysfs.

    Shapes: folder — of its PCI function; card — the DRM card's name, empty without; memory_bytes —
            its own memory, 0 without.
    """
    clocks = (f"{folder}/tile0/gt0/freq0/act_freq", f"{folder}/drm/{card}/gt/gt0/rps_act_freq_mhz")
    size = [Reading(quantity=Quantity.MEMORY_SIZE, value=float(memory_bytes))] if memory_bytes else []
    return _first_of_each(
        [
            *(reading for path in clocks for reading in _read(tree, path, Quantity.CLOCK, _MHZ, "core")),
            *size,
            *_sensors(tree, folder),
        ]
    )


def _sensors(tree: Tree, folder: str) -> list[Reading]:
    """Read the sensors of a card. The first counts where it has several of one kind: xe has the
    energy of the card, and then that of the chip.
    """
    readings: list[Reading] = []
    for monitor in tree.names(f"{folder}/hwmon"):
        base = f"{folder}/hwmon/{monitor}"
        # amdgpu publishes the average or, on newer cards, the present power.
        for name in ("power1_average", "power1_input"):
            readings += _read(tree, f"{base}/{name}", Quantity.POWER, _MICRO)
        for name in tree.names(base):
            kind = name.removesuffix("_input").rstrip("0123456789")
            if name.endswith("_input") and kind in ("temp", "freq", "energy"):
                readings += _read_sensor(tree, base, name, kind)
    return _first_of_each(readings)


def _read_sensor(tree: Tree, base: str, name: str, kind: str) -> list[Reading]:
    path = f"{base}/{name}"
    if kind == "energy":
        return _read(tree, path, Quantity.ENERGY, _MICRO)
    try:
        part = _PARTS.get(tree.read(f"{path.removesuffix('_input')}_label") or "")
    except HardwareError:
        return []
    if part is None:
        return []
    if kind == "freq":
        return _read(tree, path, Quantity.CLOCK, part=part)
    return _read(tree, path, Quantity.TEMPERATURE, _MILLI, part)


def _read(tree: Tree, path: str, quantity: Quantity, unit: float = 1, part: str = "") -> list[Reading]:
    try:
        number = tree.read_int(path)
    except HardwareError:
        return []
    return [] if number is None else [Reading(quantity=quantity, part=part, value=number * unit)]


def _first_of_each(readings: Iterable[Reading]) -> list[Reading]:
    first: dict[tuple[Quantity, str], Reading] = {}
    for reading in readings:
        first.setdefault((reading.quantity, reading.part), reading)
    return list(first.values())
