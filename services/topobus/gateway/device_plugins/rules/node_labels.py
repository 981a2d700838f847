"""Derives a node's labels from its devices, with the names of the vendors' feature discovery, by
which today's charts select nodes.

Pure. A property that a device does not have gets no label. A value that Kubernetes does not accept
is left out.

Source: NVIDIA/k8s-device-plugin internal/lm (nvml.go, resource.go, mig-strategy.go) and
docs/gpu-feature-discovery; ROCm/k8s-device-plugin cmd/k8s-node-labeller/main.go; the node labels of
Intel's GPU plugin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from topobus.values.device import Device, Inventory

__all__ = ["feature_file", "node_labels"]

_MIB, _GIB = 1 << 20, 1 << 30
# A name has a prefix that is a DNS subdomain, and up to 63 characters after it. A value has up to
# 63.
_NAME = re.compile(r"(?:[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
# nvidia-smi's names of strategies to those in labels.
_STRATEGIES = {"TimeSlicing": "time-slicing", "MPS": "mps"}
# Capacities of a MIG instance to the suffixes of labels.
_MIG_PARTS = {
    "multiprocessors": "multiprocessors",
    "copyEngines": "engines.copy",
    "decoders": "engines.decoder",
    "encoders": "engines.encoder",
    "jpegEngines": "engines.jpeg",
    "ofaEngines": "engines.ofa",
}
# Compiler targets to libdrm's families (amdgpu_drm.h, AMDGPU_FAMILY_*), for cards. Processors with
# graphics are left out.
_AMD_FAMILIES = {
    **dict.fromkeys(("gfx900", "gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"), "AI"),
    **dict.fromkeys(("gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1034"), "NV"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102"), "GC_11_0_0"),
    **dict.fromkeys(("gfx1200", "gfx1201"), "GC_12_0_0"),
}


def node_labels(inventories: Mapping[str, Inventory]) -> dict[str, str]:
    """Return the labels of a node, sorted by name.

    Shapes: inventories — by class. Classes of other vendors' device plugins get no labels.
    >>> gpu = Device(name="gpu-0", device_class="gpu", vendor="intel", attributes={"pciID": "8086:0bd5"})
    >>> node_labels({"gpu": Inventory(node="n", device_class="gpu", generation=1, devices=(gpu,))})
    {'feature.node.kubernetes.io/pci-8086.present': 'true', 'intel.feature.node.kubernetes.io/gpu': 'true'}
    """
    devices = [device for name in ("gpu", "nic", "fpga") if name in inventories for device in inventories[name].devices]
    gpus = [device for device in devices if device.device_class == "gpu"]
    labels = {f"feature.node.kubernetes.io/pci-{vendor}.present": "true" for vendor in _pci_vendors(devices)}
    if any(gpu.vendor == "intel" for gpu in gpus):
        labels["intel.feature.node.kubernetes.io/gpu"] = "true"
    labels |= _nvidia([gpu for gpu in gpus if gpu.vendor == "nvidia"])
    labels |= _amd([gpu for gpu in gpus if gpu.vendor == "amd"])
    return {name: value for name, value in sorted(labels.items()) if _NAME.fullmatch(name) and _VALUE.fullmatch(value)}


def feature_file(labels: Mapping[str, str]) -> bytes:
    """Encode labels as Node Feature Discovery reads them from a file: one line for each."""
    return "".join(f"{name}={value}\n" for name, value in labels.items()).encode()


def _pci_vendors(devices: Iterable[Device]) -> set[str]:
    return {_text(device, "pciID").partition(":")[0] for device in devices if _text(device, "pciID")}


def _nvidia(gpus: Sequence[Device]) -> dict[str, str]:
    # A placement without an instance has no UUID yet.
    instances = [gpu for gpu in gpus if gpu.attributes.get("type") == "mig"]
    whole = [gpu for gpu in gpus if gpu.attributes.get("type") != "mig"]
    if not gpus:
        return {}
    labels = {"nvidia.com/gpu.present": "true", **_versions(gpus)}
    if whole:
        labels |= {f"nvidia.com/gpu.{name}": value for name, value in _gpu_labels(whole).items()}
    capable = {gpu.attributes["migCapable"] for gpu in gpus if "migCapable" in gpu.attributes}
    if capable or instances:
        labels["nvidia.com/mig.capable"] = "true" if instances or True in capable else "false"
    if instances:
        labels["nvidia.com/mig.strategy"] = "mixed"
        by_profile: dict[str, list[Device]] = {}
        for instance in instances:
            if instance.uuid:
                by_profile.setdefault(_text(instance, "profile").replace("+", "."), []).append(instance)
        for profile, alike in by_profile.items():
            labels |= {f"nvidia.com/mig-{profile}.{name}": value for name, value in _mig_labels(profile, alike).items()}
    return labels


def _gpu_labels(gpus: Sequence[Device]) -> dict[str, str]:
    """Describe whole GPUs.

    Of several models the most frequent one counts, because these labels describe only one.
    """
    models = Counter(gpu.model for gpu in gpus)
    model = min(models, key=lambda name: (-models[name], name))
    first = next(gpu for gpu in gpus if gpu.model == model)
    replicas = first.sharing.replicas if first.sharing is not None else 1
    labels = {
        "product": _product(model, *(["SHARED"] if replicas > 1 else [])),
        "count": str(len(gpus)),
        "replicas": str(replicas),
        "sharing-strategy": _STRATEGIES.get(first.sharing.strategy, "none") if first.sharing is not None else "none",
    }
    if "memory" in first.capacity:
        labels["memory"] = str(first.capacity["memory"] // _MIB)
    if architecture := _text(first, "architecture"):
        labels["family"] = architecture.lower().replace(" ", "-")
    if capability := _text(first, "cudaComputeCapability"):
        labels["compute.major"], _, rest = capability.partition(".")
        labels["compute.minor"] = rest.partition(".")[0] or "0"
    return labels


def _mig_labels(profile: str, instances: Sequence[Device]) -> dict[str, str]:
    first = instances[0]
    labels = {
        "product": _product(first.model, "MIG", profile),
        "count": str(len(instances)),
        "replicas": str(first.sharing.replicas if first.sharing is not None else 1),
        "sharing-strategy": _STRATEGIES.get(first.sharing.strategy, "none") if first.sharing is not None else "none",
    }
    if "memory" in first.capacity:
        labels["memory"] = str(first.capacity["memory"] // _MIB)
    return labels | {label: str(first.capacity[name]) for name, label in _MIG_PARTS.items() if name in first.capacity}


def _versions(gpus: Sequence[Device]) -> dict[str, str]:
    """Return the versions of driver and CUDA, by the present and the former label names."""
    labels: dict[str, str] = {}
    driver = next((text for gpu in gpus if (text := _text(gpu, "driverVersion"))), "")
    if driver:
        major, minor, revision, *_ = [*driver.split("."), "", ""]
        labels |= {
            f"nvidia.com/cuda.driver.{name}": part
            for name, part in (("major", major), ("minor", minor), ("rev", revision))
        }
        parts = (("major", major), ("minor", minor), ("revision", revision), ("full", driver))
        labels |= {f"nvidia.com/cuda.driver-version.{name}": part for name, part in parts}
    cuda = next((text for gpu in gpus if (text := _text(gpu, "cudaDriverVersion"))), "")
    if cuda:
        major, minor, *_ = [*cuda.split("."), "0"]
        labels |= {"nvidia.com/cuda.runtime.major": major, "nvidia.com/cuda.runtime.minor": minor}
        cuda_parts = (("major", major), ("minor", minor), ("full", f"{major}.{minor}"))
        labels |= {f"nvidia.com/cuda.runtime-version.{name}": part for name, part in cuda_parts}
    return labels


def _amd(gpus: Sequence[Device]) -> dict[str, str]:
    """Count by kind, as ROCm's labeller does: a single value is the label's value, several become
    part of the label's name with their count.
    """
    labels: dict[str, str] = {}
    for kind, values in {
        "device-id": [_text(gpu, "pciID").partition(":")[2] for gpu in gpus],
        "product-name": [re.sub(r"[()]", "", gpu.model).replace(" ", "_") for gpu in gpus],
        "family": [_AMD_FAMILIES.get(_text(gpu, "gfxTarget"), "") for gpu in gpus],
        "vram": [f"{round(gpu.capacity['memory'] / _GIB)}G" if "memory" in gpu.capacity else "" for gpu in gpus],
        "cu-count": [str(gpu.attributes.get("computeUnits", "")) for gpu in gpus],
    }.items():
        counts = Counter(value for value in values if value)
        labels |= {f"beta.amd.com/gpu.{kind}.{value}": str(count) for value, count in counts.items()}
        if len(counts) == 1:
            labels |= {f"{domain}/gpu.{kind}": next(iter(counts)) for domain in ("amd.com", "beta.amd.com")}
        else:
            labels |= {f"amd.com/gpu.{kind}.{value}": str(count) for value, count in counts.items()}
    modes = {"_".join((_text(gpu, "partitionMode"), _text(gpu, "memoryMode"))).lower() for gpu in gpus}
    if len(modes) == 1 and not next(iter(modes)).startswith("_"):
        labels["amd.com/gpu.compute-memory-partition"] = next(iter(modes)).rstrip("_")
    return labels


def _product(*parts: str) -> str:
    """Convert a product's name as NVIDIA's feature discovery does.

    >>> _product("NVIDIA H100 80GB HBM3", "MIG", "1g.10gb")
    'NVIDIA-H100-80GB-HBM3-MIG-1g.10gb'
    """
    return "-".join("-".join(re.sub(r"[^A-Za-z0-9\-_. ]", "", part).split()) for part in parts)


def _text(device: Device, name: str) -> str:
    value = device.attributes.get(name)
    return value if isinstance(value, str) else ""
