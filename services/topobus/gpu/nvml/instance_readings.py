"""Reads what NVML knows of one MIG instance: its memory, ECC errors and, from Hopper on, how busy it
was since the reading before.

NVML has no utilization rates of an instance. Its GPU performance monitoring compares two samples of
a GPU instance's counters, so each reading leaves its sample for the next one, and the first has no
use. A compute instance that is a part of its GPU instance has none, because the counters are those
of the whole. Of ECC errors NVML counts for an instance those that were not corrected, outside its
memory. Power, temperatures, clocks and links are the GPU's.
Source: NVML API reference, nvmlDeviceGetMemoryErrorCounter, nvmlGpmMigSampleGet (100 ms and more
between two samples), nvmlGpmMetricsGet; dcgm, modules/profiling, which reads samples of the GPU
instance as well.
"""

from __future__ import annotations

from typing import Any

from topobus.gpu.nvml.nvml_facts import Ask, memory_readings
from topobus.values.pci import PciAddress
from topobus.values.readings import Quantity, Reading

__all__ = ["InstanceReadings"]


class InstanceReadings:
    """The last sample of each GPU instance. They are those of one session of NVML."""

    def __init__(self) -> None:
        self._samples: dict[tuple[PciAddress, int], tuple[str, Any]] = {}
        """By GPU and GPU instance: the compute instance's UUID, and the sample."""

    def read(self, library: Any, gpu: Any, address: PciAddress, uuid: str, ask: Ask) -> list[Reading]:
        """Read an instance.

        Shapes: gpu — the handle of its GPU; uuid — of the compute instance.
        Cost: seven calls.
        """
        handle = ask(library.nvmlDeviceGetHandleByUUID, uuid)
        if handle is None:
            return []
        kind = (
            library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            library.NVML_VOLATILE_ECC,
            library.NVML_MEMORY_LOCATION_SRAM,
        )
        errors = ask(library.nvmlDeviceGetMemoryErrorCounter, handle, *kind)
        readings = memory_readings(library, handle, ask)
        if errors is not None:
            readings.append(Reading(quantity=Quantity.MEMORY_ERRORS, part="uncorrected", value=float(errors)))
        attributes, gi = ask(library.nvmlDeviceGetAttributes, handle), ask(library.nvmlDeviceGetGpuInstanceId, handle)
        if attributes is None or gi is None or attributes.computeInstanceSliceCount != attributes.gpuInstanceSliceCount:
            return readings
        percent = self._percent(library, gpu, (address, int(gi)), uuid, ask)
        if 0 <= percent <= 100:
            readings.append(Reading(quantity=Quantity.UTILIZATION, value=percent / 100))
        return readings

    def _percent(self, library: Any, gpu: Any, key: tuple[PciAddress, int], uuid: str, ask: Ask) -> float:
        """Return the share of the time since the last sample in which a program computed. Less than
        0 where that is not known.
        """
        support = ask(library.nvmlGpmQueryDeviceSupport, gpu)
        if support is None or not support.isSupportedDevice:
            return -1
        sample = ask(library.nvmlGpmSampleAlloc)
        if sample is None:
            return -1
        if ask(library.nvmlGpmMigSampleGet, gpu, key[1], sample) is None:
            ask(library.nvmlGpmSampleFree, sample)
            return -1
        last_uuid, last = self._samples.get(key, ("", None))
        self._samples[key] = uuid, sample
        if last is None:
            return -1
        wanted = library.c_nvmlGpmMetricsGet_t(version=library.NVML_GPM_METRICS_GET_VERSION, numMetrics=1)
        wanted.sample1, wanted.sample2 = last, sample
        wanted.metrics[0].metricId = library.NVML_GPM_METRIC_GRAPHICS_UTIL
        answer = ask(library.nvmlGpmMetricsGet, wanted) if last_uuid == uuid else None
        ask(library.nvmlGpmSampleFree, last)
        if answer is None or answer.metrics[0].nvmlReturn != library.NVML_SUCCESS:
            return -1
        return float(answer.metrics[0].value)
