"""Derives health observations from NVML's counters and from the fabric: uncorrected memory errors,
retired pages, NVLink errors, the state of the NVSwitch fabric.

There is no observation where NVML refuses a query.
Source: NVML API reference, nvmlDeviceGetTotalEccErrors, nvmlDeviceGetRetiredPagesPendingStatus,
nvmlDeviceGetNvLinkErrorCounter, nvmlGpuFabricInfoV_t; NVIDIA Fabric Manager user guide, "GPU fabric
state".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from topobus.devicekit.counter_rises import CounterRises
from topobus.gpu.nvml.nvml_signs import Ask, nvml_observation
from topobus.values.health import Dimension, HealthState, Observation, RecoveryAction

__all__ = ["ecc_sign", "fabric_sign", "link_error_sign", "retirement_sign"]

# A link replays now and then. This many between two looks mean a faulty cable or connector.
_REPLAY_STORM = 100
# Bits of nvmlGpuFabricInfoV_t.healthMask: fields of two bits, of which 1 means "true" (nvml.h,
# NVML_GPU_FABRIC_HEALTH_MASK_*).
_FIELD, _TRUE = 0x3, 1


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
    return nvml_observation(
        Dimension.MEMORY, HealthState.UNHEALTHY, "ecc-uncorrected", text, RecoveryAction.RESET_DEVICE, value=str(count)
    )


def retirement_sign(library: Any, handle: Any, ask: Ask) -> Observation | None:
    """Report pages that wait for a reset to be retired, on GPUs before Ampere, which remap no
    rows.
    """
    if not ask(library.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        return None
    text = "pages of its memory wait for a reset to be retired"
    return nvml_observation(
        Dimension.MEMORY, HealthState.DEGRADED, "page-retirement-pending", text, RecoveryAction.RESET_DEVICE, value="1"
    )


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
            return nvml_observation(
                Dimension.LINK,
                HealthState.DEGRADED,
                "nvlink-errors",
                text,
                RecoveryAction.RESET_DEVICE,
                value=str(rises[worst]),
            )
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
        return nvml_observation(
            Dimension.LINK, HealthState.UNHEALTHY, "fabric-not-ready", text, RecoveryAction.WAIT, value=value
        )
    if info.state != library.NVML_GPU_FABRIC_STATE_COMPLETED:
        return None
    if info.status != library.NVML_SUCCESS:
        text = f"the GPU could not join its NVSwitch fabric: {library.NVMLError(info.status)}"
        return nvml_observation(
            Dimension.LINK, HealthState.UNHEALTHY, "fabric-failed", text, RecoveryAction.RESET_DEVICE, value=value
        )
    if _is_set(info.healthMask, library.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY):
        text = "a route of the GPU through the NVSwitch fabric is unhealthy"
        return nvml_observation(
            Dimension.LINK, HealthState.UNHEALTHY, "fabric-failed", text, RecoveryAction.RESET_DEVICE, value=value
        )
    if _is_set(info.healthMask, library.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW):
        text = "the GPU has less bandwidth into the NVSwitch fabric than it should"
        return nvml_observation(
            Dimension.LINK, HealthState.DEGRADED, "fabric-degraded", text, RecoveryAction.WAIT, value=value
        )
    return None


def _is_set(mask: int, shift: int) -> bool:
    return mask >> shift & _FIELD == _TRUE
