"""Judges what kernel drivers of GPUs publish in sysfs: temperatures of hwmon, AMD's RAS error
counts, the survivability mode and health indicator of Intel's xe.

There is no observation for what a driver does not publish.
Source: Documentation/hwmon/sysfs-interface; Documentation/gpu/amdgpu/ras.rst (`ras/*_err_count`:
lines `ue: N` and `ce: N`); Documentation/gpu/xe/xe_survivability;
Documentation/ABI/testing/sysfs-driver-intel-xe-ras (`gpu_health`, since Linux 7.3).
"""

from __future__ import annotations

from topobus.devicekit.counter_rises import CounterRises
from topobus.sysfs.tree import Tree
from topobus.values.errors import HardwareError
from topobus.values.health import Dimension, HealthState, Observation, RecoveryAction
from topobus.values.health_reasons import sign

__all__ = ["health_indicator_sign", "ras_counts", "ras_sign", "survivability_sign", "temperature_sign"]


def temperature_sign(tree: Tree, folder: str) -> Observation | None:
    """Compare each sensor with its critical temperature, at which the hardware throttles or stops.

    Errors: raises HardwareError for a file that is no number.
    """
    for monitor in tree.names(f"{folder}/hwmon"):
        for name in tree.names(f"{folder}/hwmon/{monitor}"):
            if not (name.startswith("temp") and name.endswith("_crit")):
                continue
            path = f"{folder}/hwmon/{monitor}/{name.removesuffix('_crit')}_input"
            now, critical = tree.read_int(path), tree.read_int(f"{folder}/hwmon/{monitor}/{name}")
            if now is not None and critical and now >= critical:
                return sign("too-hot", f"{now / 1000:g} °C, critical is {critical / 1000:g} °C", path, now)
    return None


def ras_sign(tree: Tree, folder: str, counters: CounterRises) -> Observation | None:
    """Compare the uncorrected errors of each block of an AMD GPU (umc is its memory) with the last
    look.
    """
    for name in tree.names(f"{folder}/ras"):
        block = name.removesuffix("_err_count")
        if block == name:
            continue
        path = f"{folder}/ras/{name}"
        counts = ras_counts(tree, path)
        rise = counters.rise(path, counts.get("ue"))
        if rise:
            return sign(
                "ras-uncorrected",
                f"{rise} new uncorrected error(s) in block {block}",
                path,
                counts["ue"],
                dimension=Dimension.MEMORY if block == "umc" else Dimension.COMPUTE,
            )
    return None


def ras_counts(tree: Tree, path: str) -> dict[str, int]:
    """Read the errors of one block of an AMD GPU: `ue` uncorrected, `ce` corrected.

    Errors: raises HardwareError for a file that cannot be read.
    """
    lines = (line.partition(":") for line in (tree.read(path) or "").splitlines())
    return {key.strip(): int(value) for key, colon, value in lines if colon and value.strip().isdecimal()}


def survivability_sign(tree: Tree, folder: str) -> Observation | None:
    """Report that xe runs a card only so far that its firmware can be repaired. The file exists in
    this mode alone.
    """
    path = f"{folder}/survivability_mode"
    text = tree.read(path)
    if text is None:
        return None
    return sign(
        "survivability-mode",
        "the kernel driver runs the card in survivability mode: its firmware must be repaired",
        path,
        text.splitlines()[0][:60] if text else "",
    )


def health_indicator_sign(tree: Tree, folder: str) -> Observation | None:
    """Report the state of the card as a whole, as xe and the card's firmware publish it: `ok`,
    `warning` or `critical`.

    Older kernels and cards publish nothing.

    Errors: raises HardwareError for any other word.
    """
    path = f"{folder}/gpu_health"
    text = tree.read(path)
    if text in (None, "ok"):
        return None
    if text not in ("warning", "critical"):
        raise HardwareError(
            f"{path} under {tree.root}: got {text[:60]!r}, wanted ok, warning or critical", path=path, raw=text[:200]
        )
    return sign(
        "health-indicator",
        f"the kernel driver's health indicator of the card is {text}",
        path,
        text,
        state=HealthState.UNHEALTHY if text == "critical" else HealthState.DEGRADED,
        action=RecoveryAction.RESET_DEVICE if text == "critical" else RecoveryAction.NONE,
    )
