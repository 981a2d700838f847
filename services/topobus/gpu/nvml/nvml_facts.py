"""Asks NVML about one GPU: the facts that selectors use, which processes use it and how much of its
memory, and what people graph of it or of a MIG instance.

Attributes have the names of NVIDIA's own DRA driver. Unknown facts are absent, with one exception:
a GPU that refuses the query for its MIG mode has no MIG, so MIG is off there. Compute and graphics
processes are read alike, and NVML gives pids of the pid namespace of its caller. There is no reading
for what the GPU or the driver does not support. Bytes over PCIe and NVLink are the driver's
counters: the older query for PCIe throughput measures for 20 ms while the driver's thread waits.
Source: NVML API reference, "Device Queries", "Field Value Enums",
nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses,
nvmlDeviceGetMemoryInfo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from topobus.gpu.nvml.nvml_signs import Ask
from topobus.values.device import AttributeValue
from topobus.values.readings import Quantity, Reading

__all__ = ["Ask", "NvmlUse", "gpu_facts", "gpu_readings", "memory_readings", "read_use", "read_use_of_instance"]

# nvml.h, NVML_DEVICE_ARCH_* and nvmlBrandType_t. A number that is newer than this table gives no
# attribute.
_ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
_BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
# Of a field that NVML keeps for each NVLink: all of them together.
_ALL_LINKS = 0xFFFFFFFF
# Members of nvmlValue_t by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_KIB, _MHZ = 1024, 1_000_000


def gpu_facts(library: Any, handle: Any, ask: Callable[..., Any | None]) -> dict[str, AttributeValue]:
    """Collect the attributes of one GPU.

    Shapes: library — the module pynvml; ask — calls a function of it and returns None when NVML
    refuses.
    """
    index = ask(library.nvmlDeviceGetIndex, handle)
    if index is None:
        return {}
    mig = ask(library.nvmlDeviceGetMigMode, handle)
    # NVML refuses the query for the mode on a GPU that has no MIG.
    attributes: dict[str, AttributeValue] = {
        "index": int(index),
        "migCapable": mig is not None,
        "migEnabled": bool(mig is not None and mig[0]),
    }
    texts = {
        "architecture": _ARCHITECTURES.get(ask(library.nvmlDeviceGetArchitecture, handle) or 0, ""),
        "brand": _BRANDS.get(ask(library.nvmlDeviceGetBrand, handle) or 0, ""),
    }
    capability = ask(library.nvmlDeviceGetCudaComputeCapability, handle)
    if capability is not None:
        texts["cudaComputeCapability"] = ".".join(str(int(part)) for part in capability)
    version = ask(library.nvmlSystemGetCudaDriverVersion_v2)
    if version is not None:
        # 12020 is 12.2 (nvml.h, NVML_CUDA_DRIVER_VERSION_MAJOR and _MINOR). Selectors need three
        # numbers for a version.
        texts["cudaDriverVersion"] = f"{int(version) // 1000}.{int(version) % 1000 // 10}.0"
    return attributes | {name: text for name, text in texts.items() if text}


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


def gpu_readings(library: Any, handle: Any, ask: Ask) -> list[Reading]:
    """Read a whole GPU.

    Shapes: ask — calls a function of the library and returns None when NVML refuses.
    Cost: ten calls.
    """
    use = ask(library.nvmlDeviceGetUtilizationRates, handle)
    questions: tuple[tuple[Quantity, str, float, Callable[..., Any], tuple[int, ...]], ...] = (
        (Quantity.POWER, "", 1e-3, library.nvmlDeviceGetPowerUsage, ()),
        (Quantity.ENERGY, "", 1e-3, library.nvmlDeviceGetTotalEnergyConsumption, ()),
        (Quantity.TEMPERATURE, "core", 1, library.nvmlDeviceGetTemperature, (library.NVML_TEMPERATURE_GPU,)),
        (Quantity.CLOCK, "core", _MHZ, library.nvmlDeviceGetClockInfo, (library.NVML_CLOCK_SM,)),
        (Quantity.CLOCK, "memory", _MHZ, library.nvmlDeviceGetClockInfo, (library.NVML_CLOCK_MEM,)),
        *(
            (Quantity.MEMORY_ERRORS, kind, 1, library.nvmlDeviceGetTotalEccErrors, (code, library.NVML_VOLATILE_ECC))
            for kind, code in (
                ("corrected", library.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                ("uncorrected", library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            )
        ),
    )
    answers = [
        (quantity, part, unit, ask(question, handle, *arguments))
        for quantity, part, unit, question, arguments in questions
    ]
    if use is not None:
        answers += [(Quantity.UTILIZATION, "", 0.01, use.gpu), (Quantity.MEMORY_UTILIZATION, "", 0.01, use.memory)]
    answers += _fields(library, handle, ask)
    readings = [
        Reading(quantity=quantity, part=part, value=float(answer) * unit)
        for quantity, part, unit, answer in answers
        if answer is not None
    ]
    return [*readings, *memory_readings(library, handle, ask)]


def memory_readings(library: Any, handle: Any, ask: Ask) -> list[Reading]:
    """Read the memory of a GPU or of a MIG instance."""
    memory = ask(library.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return []
    return [
        Reading(quantity=Quantity.MEMORY_USED, value=float(memory.used)),
        Reading(quantity=Quantity.MEMORY_SIZE, value=float(memory.total)),
    ]


def _fields(library: Any, handle: Any, ask: Ask) -> list[tuple[Quantity, str, float, float | None]]:
    """Read in one call what NVML has as fields."""
    wanted = (
        (Quantity.TEMPERATURE, "memory", 1, library.NVML_FI_DEV_MEMORY_TEMP, 0),
        (Quantity.SENT, "pcie", 1, library.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0),
        (Quantity.RECEIVED, "pcie", 1, library.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0),
        (Quantity.SENT, "nvlink", _KIB, library.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
        (Quantity.RECEIVED, "nvlink", _KIB, library.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
    )
    values = ask(library.nvmlDeviceGetFieldValues, handle, [(field, scope) for *_, field, scope in wanted]) or ()
    return [
        (quantity, part, unit, getattr(value.value, _MEMBERS[value.valueType]))
        for (quantity, part, unit, _, _), value in zip(wanted, values, strict=False)
        if value.nvmlReturn == library.NVML_SUCCESS and value.valueType < len(_MEMBERS)
    ]
