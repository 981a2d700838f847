"""Reads from NVML what people graph of a GPU or a MIG instance. There is no reading for what the
GPU or the driver does not support.

Bytes over PCIe and NVLink are the driver's counters. The older query for PCIe throughput is not
used: it measures for 20 ms while the driver's thread waits.
Source: NVML API reference, "Device Queries" and "Field Value Enums".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topobus.gpu.nvml.nvml_signs import Ask
from topobus.values.readings import Quantity, Reading

__all__ = ["gpu_readings", "memory_readings"]

# Of a field that NVML keeps for each NVLink: all of them together.
_ALL_LINKS = 0xFFFFFFFF
# Members of nvmlValue_t by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_KIB, _MHZ = 1024, 1_000_000


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
    """Read the memory of a GPU, or of a MIG instance, of which NVML knows nothing else."""
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
