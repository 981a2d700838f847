"""A stand-in for pynvml: the functions that the plugin uses, with pynvml's own error classes and
constants, set by hand.
"""

# ruff: noqa: D102  # the functions are pynvml's own, and its reference describes them

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from topobus.gpu.nvml.nvml import Nvml
from topobus.gpu.nvml.nvml_library import NvmlUnavailable
from topobus.values.health import Observation
from topobus.values.pci import PciAddress

FIRST, SECOND = PciAddress.parse("0000:18:00.0"), PciAddress.parse("0000:1a:00.0")


@dataclass
class Gpu:
    """One GPU of the stand-in."""

    address: PciAddress
    links: list[str] = field(default_factory=list)
    """Per link: a peer's address, `switch`, or empty for a link that is down."""
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    clocks: int = 0
    recovery: int = 0
    is_lost: bool = False
    refuses: frozenset[str] = frozenset()
    error: int = 0
    """What every question to this GPU is answered with; 0: it answers."""


class Library:
    """Stands for the module pynvml.

    What is not here (constants, errors) comes from pynvml itself.
    """

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = {gpu.address: gpu for gpu in gpus}
        self.events: list[tuple[PciAddress, int]] = []
        self.session_error = 0
        """What every question of this session is answered with; 0: it is good."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> Gpu:  # noqa: N802 - NVML's own name
        gpu = self.gpus.get(PciAddress.parse(bus_id))
        if self.session_error:
            raise pynvml.NVMLError(self.session_error)
        if gpu is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        if gpu.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(busId=f"{gpu.address.domain:08X}:{str(gpu.address).partition(':')[2].upper()}".encode())

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        self._check(gpu, "uuid")
        return f"GPU-nvml-{gpu.address.bus:x}"

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        self._check(gpu, "name")
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> SimpleNamespace:  # noqa: N802
        self._check(gpu, "memory")
        return SimpleNamespace(total=85_520_809_984)

    def nvmlDeviceGetMinorNumber(self, gpu: Gpu) -> int:  # noqa: N802
        return gpu.address.bus

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:  # noqa: N802
        if link >= len(gpu.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(bool(gpu.links[link]))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: Gpu, link: int) -> int:  # noqa: N802
        is_switch = gpu.links[link] == "switch"
        return int(pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: Gpu, link: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"0000{gpu.links[link]}".upper().encode())

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: Sequence[int]) -> list[SimpleNamespace]:  # noqa: N802
        values = {
            pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: 25_000,
            pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: gpu.recovery,
        }
        return [
            SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=values[each_field]))
            for each_field in fields
        ]

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:  # noqa: N802
        self._check(gpu, "rows")
        return gpu.rows

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int:  # noqa: N802
        return gpu.clocks

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, _types: int, _events: str) -> None:  # noqa: N802
        self._check(gpu, "events")

    def nvmlEventSetWait_v2(self, _events: str, _timeout_ms: int) -> SimpleNamespace:  # noqa: N802
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        address, xid = self.events.pop(0)
        return SimpleNamespace(
            device=self.gpus[address], eventData=xid, gpuInstanceId=0xFFFFFFFF, computeInstanceId=0xFFFFFFFF
        )

    def _check(self, gpu: Gpu, what: str) -> None:
        if self.session_error or gpu.error:
            raise pynvml.NVMLError(self.session_error or gpu.error)
        if what in gpu.refuses:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class MigLibrary(Library):
    """The first GPU is in MIG mode."""

    def nvmlDeviceGetIndex(self, gpu: Gpu) -> int:  # noqa: N802
        return list(self.gpus).index(gpu.address)

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:  # noqa: N802
        return [int(gpu.address == min(self.gpus)), 0]

    def nvmlDeviceGetArchitecture(self, _gpu: Gpu) -> int:  # noqa: N802
        return int(pynvml.NVML_DEVICE_ARCH_HOPPER)

    def nvmlDeviceGetBrand(self, _gpu: Gpu) -> int:  # noqa: N802
        return int(pynvml.NVML_BRAND_UNKNOWN)

    def nvmlDeviceGetCudaComputeCapability(self, _gpu: Gpu) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12020


def started(library: Library, *successors: Library | None) -> Nvml:
    """Give a session whose successors open in this order.

    None is an attempt that fails, and after the last nothing opens.
    """
    waiting = list(successors)

    def reopen(_module: Any) -> Library:
        successor = waiting.pop(0) if waiting else None
        if successor is None:
            raise NvmlUnavailable("Driver/library version mismatch")
        return successor

    return Nvml(library, reopen=reopen)


def observed(library: Library) -> list[Observation]:
    """Look once at the health of the first GPU, after it was described."""
    nvml = started(library)
    nvml.describe([FIRST])
    return nvml.observe([FIRST])[FIRST]
