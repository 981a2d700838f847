"""Derives health observations from NVML for a GPU that answers: the driver's recovery action, row
remapping, thermal slowdown, uncorrected memory errors, retired pages, NVLink errors, the state of
the NVSwitch fabric.

There is no observation where the GPU is healthy or the value is unknown: a query that the library
refuses is no fault of the GPU.
Source: NVML API reference, nvmlDeviceGetRemappedRows, nvmlClocksEventReasons, field
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, nvmlDeviceGetTotalEccErrors,
nvmlDeviceGetRetiredPagesPendingStatus, nvmlDeviceGetNvLinkErrorCounter, nvmlGpuFabricInfoV_t;
NVIDIA Fabric Manager user guide, "GPU fabric state".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from topobus.devicekit.counter_rises import CounterRises
from topobus.values.health import Observation, RecoveryAction
from topobus.values.health_reasons import sign

__all__ = [
    "Ask",
    "ecc_sign",
    "fabric_sign",
    "field_of",
    "link_error_sign",
    "memory_sign",
    "nvml_sign",
    "recovery_sign",
    "retirement_sign",
    "thermal_sign",
]

Ask = Callable[..., Any | None]
# nvmlDeviceGpuRecoveryAction_t.
_ACTIONS = {
    1: RecoveryAction.RESET_DEVICE,
    2: RecoveryAction.REBOOT_NODE,
    3: RecoveryAction.WAIT,
    4: RecoveryAction.RESET_DEVICE,
    5: RecoveryAction.WAIT,
    6: RecoveryAction.RESET_DEVICE,
    7: RecoveryAction.REBOOT_NODE,
}
# A link replays now and then. This many between two looks mean a faulty cable or connector.
_REPLAY_STORM = 100
# Bits of nvmlGpuFabricInfoV_t.healthMask: fields of two bits, of which 1 means "true" (nvml.h,
# NVML_GPU_FABRIC_HEALTH_MASK_*).
_FIELD, _TRUE = 0x3, 1


def recovery_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report the recovery action that the driver advises for the GPU."""
    advice = field_of(library, handle, library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, ask)
    if not advice:
        return None
    text = f"the driver advises recovery action {advice}"
    action = _ACTIONS.get(advice, RecoveryAction.RESET_DEVICE)
    return nvml_sign("recovery-advised", text, str(advice), action=action)


def memory_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report memory rows that could not be remapped, or that wait for a reset."""
    rows = ask(library.nvmlDeviceGetRemappedRows, handle)
    if rows is None:
        return None
    _, uncorrected, is_pending, has_failed = rows
    if has_failed:
        text = "the GPU has no spare memory row left to remap to"
        return nvml_sign("row-remap-failed", text, str(uncorrected))
    if is_pending:
        text = "a memory row waits for a reset to be remapped"
        return nvml_sign("row-remap-pending", text, str(uncorrected))
    return None


def thermal_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report that the hardware lowers clocks because of heat."""
    reasons = ask(library.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None or not reasons & library.nvmlClocksEventReasonHwThermalSlowdown:
        return None
    text = "clocks are lowered because the GPU is too hot"
    return nvml_sign("thermal-slowdown", text, hex(reasons))


def field_of(library: Any, handle: Any, field: int, ask: Ask) -> int | None:
    """Ask for one of the numbers that NVML keeps as fields, or return None when it refuses."""
    values = ask(library.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != library.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def nvml_sign(code: str, message: str, value: str = "", *, action: RecoveryAction | None = None) -> Observation:
    """Make an observation that names NVML as its source."""
    evidence = {"source": "nvml", **({"value": value} if value else {})}
    return sign(code, message, evidence=evidence, action=action)


def ecc_sign(library: Any, handle: Any, ask: Ask, counters: CounterRises, key: str) -> Observation | None:
    """Compare the uncorrected errors since the driver was loaded with the last look."""
    count = ask(
        library.nvmlDeviceGetTotalEccErrors,
        handle,
        library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        library.NVML_VOLATILE_ECC,
    )
    rise = counters.rise(f"{key}/ecc", None if count is None else int(count))
    if not rise:
        return None
    text = f"{rise} new uncorrected memory error(s)"
    return nvml_sign("ecc-uncorrected", text, str(count))


def retirement_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report pages that wait for a reset to be retired, on GPUs before Ampere, which remap no
    rows.
    """
    if not ask(library.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        return None
    text = "pages of its memory wait for a reset to be retired"
    return nvml_sign("page-retirement-pending", text, "1")


def link_error_sign(
    library: Any, handle: Any, ask: Ask, counters: CounterRises, key: str, links: Iterable[int]
) -> Observation | None:
    """Compare the errors of the NVLinks that are up with the last look, and report a link that had
    to recover, or a storm of replays.
    """
    for counter, name, least in (
        (library.NVML_NVLINK_ERROR_DL_RECOVERY, "recovered from errors", 1),
        (library.NVML_NVLINK_ERROR_DL_REPLAY, "replayed", _REPLAY_STORM),
    ):
        rises = {
            link: counters.rise(
                f"{key}/nvlink/{link}/{counter}", ask(library.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter)
            )
            for link in links
        }
        worst = max(rises, key=lambda link: rises[link], default=None)
        if worst is not None and rises[worst] >= least:
            text = f"NVLink {worst} {name} {rises[worst]} time(s) since the last look"
            return nvml_sign("nvlink-errors", text, str(rises[worst]))
    return None


def fabric_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Read the GPU's state in an NVSwitch fabric: without it CUDA does not start (error 802), and
    with bad routes it hangs.
    """
    info = library.c_nvmlGpuFabricInfo_v2_t()
    if ask(library.nvmlDeviceGetGpuFabricInfoV, handle, library.byref(info)) is None:
        return None
    value = f"state {info.state}, status {info.status}, health {info.healthMask:#x}"
    if info.state in (library.NVML_GPU_FABRIC_STATE_NOT_STARTED, library.NVML_GPU_FABRIC_STATE_IN_PROGRESS):
        text = "the GPU has not joined its NVSwitch fabric yet: does the fabric manager run?"
        return nvml_sign("fabric-not-ready", text, value)
    if info.state != library.NVML_GPU_FABRIC_STATE_COMPLETED:
        return None
    if info.status != library.NVML_SUCCESS:
        text = f"the GPU could not join its NVSwitch fabric: {library.NVMLError(info.status)}"
        return nvml_sign("fabric-failed", text, value)
    if _is_set(info.healthMask, library.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY):
        text = "a route of the GPU through the NVSwitch fabric is unhealthy"
        return nvml_sign("fabric-failed", text, value)
    if _is_set(info.healthMask, library.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW):
        text = "the GPU has less bandwidth into the NVSwitch fabric than it should"
        return nvml_sign("fabric-degraded", text, value)
    return None


def _is_set(mask: int, shift: int) -> bool:
    return mask >> shift & _FIELD == _TRUE
