"""Derives health observations from NVML for a GPU that answers: the driver's recovery action, row
remapping, thermal slowdown.

There is no observation where the GPU is healthy or the value is unknown: a query that the library
refuses is no fault of the GPU.
Source: NVML API reference, nvmlDeviceGetRemappedRows, nvmlClocksEventReasons, field
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topobus.values.health import Dimension, HealthState, Observation, RecoveryAction

__all__ = ["Ask", "field_of", "memory_sign", "nvml_observation", "recovery_sign", "thermal_sign"]

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


def recovery_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report the recovery action that the driver advises for the GPU."""
    advice = field_of(library, handle, library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, ask)
    if not advice:
        return None
    text = f"the driver advises recovery action {advice}"
    action = _ACTIONS.get(advice, RecoveryAction.RESET_DEVICE)
    return nvml_observation(
        Dimension.DRIVER, HealthState.UNHEALTHY, "recovery-advised", text, action, value=str(advice)
    )


def memory_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report memory rows that could not be remapped, or that wait for a reset."""
    rows = ask(library.nvmlDeviceGetRemappedRows, handle)
    if rows is None:
        return None
    _, uncorrected, is_pending, has_failed = rows
    if has_failed:
        text = "the GPU has no spare memory row left to remap to"
        return nvml_observation(
            Dimension.MEMORY,
            HealthState.UNHEALTHY,
            "row-remap-failed",
            text,
            RecoveryAction.REPLACE,
            value=str(uncorrected),
            is_sticky=True,
        )
    if is_pending:
        text = "a memory row waits for a reset to be remapped"
        return nvml_observation(
            Dimension.MEMORY,
            HealthState.DEGRADED,
            "row-remap-pending",
            text,
            RecoveryAction.RESET_DEVICE,
            value=str(uncorrected),
        )
    return None


def thermal_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report that the hardware lowers clocks because of heat."""
    reasons = ask(library.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None or not reasons & library.nvmlClocksEventReasonHwThermalSlowdown:
        return None
    text = "clocks are lowered because the GPU is too hot"
    return nvml_observation(
        Dimension.THERMAL, HealthState.DEGRADED, "thermal-slowdown", text, RecoveryAction.WAIT, value=hex(reasons)
    )


def field_of(library: Any, handle: Any, field: int, ask: Ask) -> int | None:
    """Ask for one of the numbers that NVML keeps as fields, or return None when it refuses."""
    values = ask(library.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != library.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def nvml_observation(
    dimension: Dimension,
    state: HealthState,
    reason: str,
    message: str,
    action: RecoveryAction,
    *,
    value: str = "",
    is_sticky: bool = False,
) -> Observation:
    """Make an observation that names NVML as its source."""
    evidence = {"source": "nvml", **({"value": value} if value else {})}
    return Observation(
        dimension=dimension,
        state=state,
        reason=reason,
        message=message,
        evidence=evidence,
        action=action,
        is_sticky=is_sticky,
    )
