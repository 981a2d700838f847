"""Reads the facts of a GPU that selectors use from NVML: index, architecture, brand, compute
capability, MIG mode, the driver's CUDA version.

Attributes have the names of NVIDIA's own DRA driver. Unknown facts are absent, with one exception:
a GPU that refuses the query for its MIG mode has no MIG, so MIG is off there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topobus.values.device import AttributeValue

__all__ = ["gpu_facts"]

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
