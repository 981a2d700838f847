"""Reads from NVML which processes use a GPU, and how much of its memory is in use.

Compute and graphics processes are read alike. NVML gives pids of the pid namespace of its caller.
Source: NVML API reference, nvmlDeviceGetComputeRunningProcesses,
nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

__all__ = ["NvmlUse", "read_use", "read_use_of_instance"]


class NvmlUse(Struct, frozen=True, kw_only=True):
    """What uses a GPU."""

    processes: Mapping[int, int | None]
    """Pid to bytes in use; None where the driver does not report them."""
    used_bytes: int | None
    """None: this GPU has no memory of its own."""


def read_use(library: Any, handle: Any) -> NvmlUse:
    """Ask which processes use a GPU.

    Errors: raises NVMLError, except for what the GPU does not support.
    """
    processes: dict[int, int | None] = {}
    for ask in (library.nvmlDeviceGetComputeRunningProcesses, library.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _supported(library, ask, handle) or ():
            before = processes.get(process.pid)
            used = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
            # The same program may compute and draw, and a MIG instance lists its processes again.
            processes[int(process.pid)] = used if before is None else max(before, used or 0)
    memory = _supported(library, library.nvmlDeviceGetMemoryInfo, handle)
    return NvmlUse(processes=processes, used_bytes=None if memory is None else int(memory.used))


def read_use_of_instance(library: Any, uuid: str) -> NvmlUse:
    """Ask which processes use a MIG instance. An instance that was destroyed has none.

    Errors: raises NVMLError, except for an instance that was destroyed.
    """
    try:
        return read_use(library, library.nvmlDeviceGetHandleByUUID(uuid))
    except library.NVMLError as err:
        if err.value != library.NVML_ERROR_NOT_FOUND:
            raise
    return NvmlUse(processes={}, used_bytes=0)


def _supported(library: Any, ask: Any, handle: Any) -> Any | None:
    try:
        return ask(handle)
    except library.NVMLError as err:
        if err.value in (library.NVML_ERROR_NOT_SUPPORTED, library.NVML_ERROR_FUNCTION_NOT_FOUND):
            return None
        raise
