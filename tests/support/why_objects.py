"""Builders of the objects of a small cluster, as an API server takes them: nodes, pods, claims,
volumes, and the slices of six foreign drivers.

The names and types of attributes are those that the drivers publish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "NAMESPACE",
    "NVIDIA_SELECTOR",
    "Plain",
    "allocated",
    "amd_gpus",
    "asks",
    "bound_volume",
    "card",
    "claim",
    "class_of",
    "cpu_groups",
    "functions",
    "intel_gpus",
    "interfaces",
    "node",
    "nvidia_gpus",
    "partitions",
    "pod",
    "slice_of",
    "template",
    "volume_claim",
    "volume_class",
]

Plain = dict[str, Any]

NAMESPACE = "team"
_DRA = "resource.k8s.io/v1"
_ROOT = "resource.kubernetes.io/pcieRoot"
_BUS_ID = "resource.kubernetes.io/pciBusID"
NVIDIA, AMD, INTEL = "gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com"
NETWORK, SRIOV, CPU = "dra.net", "sriovnetwork.k8snetworkplumbingwg.io", "dra.cpu"
NVIDIA_SELECTOR = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"
_SELECTORS = {
    NVIDIA: NVIDIA_SELECTOR,
    "mig.nvidia.com": NVIDIA_SELECTOR.replace("'gpu'", "'mig'"),
    AMD: "device.driver == 'gpu.amd.com'",
    INTEL: "device.driver == 'gpu.intel.com'",
    NETWORK: "device.driver == 'dra.net'",
    SRIOV: "device.driver == 'sriovnetwork.k8snetworkplumbingwg.io'",
    CPU: "device.driver == 'dra.cpu'",
}


def _object(kind: str, name: str, *, version: str = "v1", namespace: str = "", **parts: Any) -> Plain:
    metadata = {"name": name, **({"namespace": namespace, "uid": f"uid-{name}"} if namespace else {})}
    metadata |= parts.pop("metadata", {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


# Nodes and pods


def node(
    name: str,
    *,
    labels: Mapping[str, str] | None = None,
    taints: Sequence[Mapping[str, str]] = (),
    is_cordoned: bool = False,
    **allocatable: str,
) -> Plain:
    """Describe a node with 16 CPUs and 64 GiB unless said otherwise."""
    room = {"cpu": "16", "memory": "64Gi", "pods": "110", **allocatable}
    spec: Plain = {"taints": list(taints)} if taints else {}
    if is_cordoned:
        spec["unschedulable"] = True
    return _object(
        "Node",
        name,
        metadata={"labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        spec=spec,
        status={"allocatable": room, "capacity": room, "conditions": [{"type": "Ready", "status": "True"}]},
    )


def pod(
    name: str,
    *claims: str,
    on: str = "",
    templates: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    phase: str = "",
    resources: Mapping[str, Any] | None = None,
    port: int = 0,
    **spec: Any,
) -> Plain:
    """Describe a pod with one container that uses claims by name, and claims made from templates.

    Shapes: on — its node, where it runs; empty while it waits.
    """
    uses: list[Plain] = [{"name": f"use-{claim}", "resourceClaimName": claim} for claim in claims]
    uses += [{"name": f"use-{made}", "resourceClaimTemplateName": made} for made in templates]
    container: Plain = {
        "name": "main",
        "image": "registry.example.com/main:1",
        "resources": {"requests": {"cpu": "1"}, **(resources or {}), "claims": [{"name": use["name"]} for use in uses]},
    }
    if port:
        container["ports"] = [{"containerPort": port, "hostPort": port}]
    return _object(
        "Pod",
        name,
        namespace=NAMESPACE,
        metadata={"labels": dict(labels or {})},
        spec={
            "containers": [container],
            "resourceClaims": uses,
            **({"nodeName": on} if on else {}),
            "automountServiceAccountToken": False,
            **spec,
        },
        status={"phase": phase or ("Running" if on else "Pending")},
    )


# Claims and classes


def class_of(driver: str, *, expression: str = "", name: str = "", resource: str = "") -> Plain:
    """Describe the class of a driver's devices, which may serve an extended resource."""
    spec: Plain = {"selectors": [{"cel": {"expression": expression or _SELECTORS[driver]}}]}
    if resource:
        spec["extendedResourceName"] = resource
    return _object("DeviceClass", name or driver, version=_DRA, spec=spec)


def asks(device_class: str, count: int = 1, *where: str, name: str = "", **fields: Any) -> Plain:
    """Ask for devices of a class that match some expressions.

    Shapes: name — of the request; by default the first part of the class's name.
    """
    exactly: Plain = {
        "deviceClassName": device_class,
        **({} if fields.get("allocationMode") == "All" else {"allocationMode": "ExactCount", "count": count}),
        **({"selectors": [{"cel": {"expression": each}} for each in where]} if where else {}),
        **fields,
    }
    return {"name": name or device_class.partition(".")[0], "exactly": exactly}


def claim(name: str, *requests: Plain, constraints: Sequence[Plain] = ()) -> Plain:
    """Describe a claim that is not allocated."""
    devices: Plain = {"requests": list(requests), **({"constraints": list(constraints)} if constraints else {})}
    return _object("ResourceClaim", name, version=_DRA, namespace=NAMESPACE, spec={"devices": devices}, status={})


def template(name: str, *requests: Plain) -> Plain:
    """Describe a template of claims."""
    spec = {"spec": {"devices": {"requests": list(requests)}}}
    return _object("ResourceClaimTemplate", name, version=_DRA, namespace=NAMESPACE, spec=spec)


def allocated(made: Plain, driver: str, on: str, *devices: str, by: Sequence[str] = (), **result: Any) -> Plain:
    """Allocate devices of a node's pool to the first request of a claim, reserved for some pods.

    The finalizer and the time are kube-scheduler's. Without the first the allocation is never taken
    back, and without the second kube-scheduler reserves the claim for no other pod.
    """
    request = made["spec"]["devices"]["requests"][0]["name"]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [on]}]}
    results = [{"request": request, "driver": driver, "pool": on, "device": device, **result} for device in devices]
    status = {
        "allocation": {
            "allocationTimestamp": "2026-01-01T00:00:00Z",
            "devices": {"results": results},
            "nodeSelector": {"nodeSelectorTerms": [term]},
        },
        "reservedFor": [{"resource": "pods", "name": each, "uid": f"uid-{each}"} for each in by],
    }
    finalizers = ["resource.kubernetes.io/delete-protection"]
    return {**made, "metadata": {**made["metadata"], "finalizers": finalizers}, "status": status}


# Slices


def slice_of(
    driver: str,
    on: str,
    devices: Iterable[Plain] = (),
    *,
    name: str = "",
    pool: str = "",
    generation: int = 1,
    slices: int = 1,
    counters: Sequence[Plain] = (),
    where: Plain | None = None,
) -> Plain:
    """Describe a slice of a pool, by default the node's: of devices, or of counters.

    Shapes: where — selects the nodes that reach the devices, instead of the one node.
    """
    spec: Plain = {
        "driver": driver,
        **({"nodeSelector": where} if where else {"nodeName": on}),
        "pool": {"name": pool or on, "generation": generation, "resourceSliceCount": slices},
        **({"sharedCounters": list(counters)} if counters else {"devices": list(devices)}),
    }
    return _object("ResourceSlice", name or f"{on}-{driver}", version=_DRA, spec=spec)


def _device(
    name: str, attributes: Mapping[str, object], capacity: Mapping[str, str] | None = None, **fields: Any
) -> Plain:
    described: Plain = {"name": name, "attributes": {key: _attribute(key, value) for key, value in attributes.items()}}
    if capacity:
        described["capacity"] = {key: {"value": amount} for key, amount in capacity.items()}
    return described | fields


def _attribute(name: str, value: object) -> Plain:
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    return {"version" if name in _VERSIONS else "string": value}


_VERSIONS = ("cudaComputeCapability", "cudaDriverVersion", "driverVersion")


def nvidia_gpus(count: int = 2, *, first_root: int = 0, **fields: Any) -> list[Plain]:
    """Describe GPUs as NVIDIA's driver does, each below a root of its own."""
    return [
        _device(
            f"gpu-{index}",
            {
                "type": "gpu",
                "uuid": f"GPU-5c0ffee0-0000-4000-8000-{index:012}",
                "productName": "NVIDIA H100 80GB HBM3",
                "brand": "Nvidia",
                "architecture": "Hopper",
                "cudaComputeCapability": "9.0.0",
                "cudaDriverVersion": "12.8.0",
                "driverVersion": "570.86.15",
                _ROOT: f"pci0000:{first_root + index:02x}",
                _BUS_ID: f"0000:{first_root + index:02x}:00.0",
            },
            {"memory": "81559Mi"},
            **fields,
        )
        for index in range(count)
    ]


def card(name: str = "gpu-0") -> Plain:
    """Describe what partitions of one GPU take from: memory slices and multiprocessors."""
    counters = {"memory-slices": {"value": "8"}, "multiprocessors": {"value": "132"}}
    return {"name": f"{name}-counter-set", "counters": counters}


def partitions(*profiles: str) -> list[Plain]:
    """Describe partitions of GPU 0, each of a profile such as `3g.40gb`."""
    shares = {"1g": ("1", "16"), "2g": ("2", "32"), "3g": ("4", "60"), "7g": ("8", "132")}
    devices = []
    for index, profile in enumerate(profiles):
        memory, processors = shares[profile.partition(".")[0]]
        taken = {"memory-slices": {"value": memory}, "multiprocessors": {"value": processors}}
        devices.append(
            _device(
                f"gpu-0-mig-{profile.replace('.', '-')}-{index}",
                {
                    "type": "mig",
                    "profile": profile,
                    "parentUUID": "GPU-5c0ffee0-0000-4000-8000-000000000000",
                    "productName": "NVIDIA H100 80GB HBM3",
                    _ROOT: "pci0000:00",
                },
                {"memory": f"{int(memory) * 10}Gi"},
                consumesCounters=[{"counterSet": "gpu-0-counter-set", "counters": taken}],
            )
        )
    return devices


def amd_gpus(count: int = 2) -> list[Plain]:
    """Describe GPUs as AMD's driver does."""
    return [
        _device(
            f"gpu-{index}",
            {
                "type": "amdgpu",
                "productName": "AMD_Instinct_MI300X_OAM",
                "deviceID": "0x74a1",
                "computePartition": "spx",
                "memoryPartition": "nps1",
                "partitionProfile": "spx_nps1",
                "numaNode": index,
                _ROOT: f"pci0000:{index + 16:02x}",
            },
            {"memory": "192Gi", "computeUnits": "304"},
        )
        for index in range(count)
    ]


def intel_gpus(count: int = 1) -> list[Plain]:
    """Describe GPUs as Intel's driver does."""
    return [
        _device(
            f"0000-{index + 3:02x}-00-0-0x56c0",
            {
                "model": "Flex 170",
                "family": "Data Center Flex",
                "pciId": "0x56c0",
                "driver": "i915",
                "pciAddress": f"0000:{index + 3:02x}:00.0",
                "sriov": True,
            },
            {"memory": "16Gi", "millicores": "1000"},
        )
        for index in range(count)
    ]


def interfaces(count: int = 2, *, first_root: int = 0, rdma: bool = True) -> list[Plain]:
    """Describe network interfaces as dranet does, each below a root of its own."""
    return [
        _device(
            f"pci-0000-{first_root + index:02x}-01-0",
            {
                "dra.net/ifName": f"eth{index + 1}",
                "dra.net/mac": f"00:11:22:33:44:{index:02x}",
                "dra.net/mtu": 9000,
                "dra.net/rdma": rdma,
                "dra.net/numaNode": 0,
                "dra.net/pciVendor": "Mellanox Technologies",
                _ROOT: f"pci0000:{first_root + index:02x}",
            },
        )
        for index in range(count)
    ]


def functions(count: int = 2) -> list[Plain]:
    """Describe virtual functions of one physical one as the SR-IOV driver does."""
    return [
        _device(
            f"0000-c2-00-{index + 1}",
            {
                "vfID": index,
                "PFName": "enp194s0",
                "pfPciAddress": "0000:c2:00.0",
                "pciAddress": f"0000:c2:00.{index + 1}",
                "resourceName": "fast-net",
                "vendor": "8086",
                "deviceID": "1889",
                "linkType": "ether",
                "rdmaCapable": False,
                "dra.net/numaNode": 1,
                _ROOT: "pci0000:c0",
            },
        )
        for index in range(count)
    ]


def cpu_groups(count: int = 1, *, size: int = 8) -> list[Plain]:
    """Describe the CPUs of each NUMA node as one device of which several claims take, as the CPU
    driver does.
    """
    return [
        {
            **_device(
                f"cpudevnuma{index:03}",
                {"dra.cpu/numaNodeID": index, "dra.cpu/socketID": 0, "dra.cpu/smtEnabled": True},
                allowMultipleAllocations=True,
            ),
            "capacity": {
                "dra.cpu/cpu": {
                    "value": str(size),
                    "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}},
                }
            },
        }
        for index in range(count)
    ]


# Volumes


def volume_class(name: str, *, binds_at_once: bool = False) -> Plain:
    """Describe a class of volumes that are made by hand."""
    mode = "Immediate" if binds_at_once else "WaitForFirstConsumer"
    return _object(
        "StorageClass",
        name,
        version="storage.k8s.io/v1",
        provisioner="kubernetes.io/no-provisioner",
        volumeBindingMode=mode,
    )


def volume_claim(name: str, storage_class: str, *, volume: str = "") -> Plain:
    """Describe a claim of a volume, bound to one where that is named."""
    spec: Plain = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": storage_class,
    }
    if not volume:
        return _object("PersistentVolumeClaim", name, namespace=NAMESPACE, spec=spec, status={"phase": "Pending"})
    bound = {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}
    return _object(
        "PersistentVolumeClaim",
        name,
        namespace=NAMESPACE,
        metadata=bound,
        spec={**spec, "volumeName": volume},
        status={"phase": "Bound"},
    )


def bound_volume(name: str, storage_class: str, *, zone: str, claim_name: str) -> Plain:
    """Describe a volume of one zone that is bound to a claim."""
    term = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]}]}
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"},
        "storageClassName": storage_class,
        "hostPath": {"path": "/srv/data"},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"kind": "PersistentVolumeClaim", "namespace": NAMESPACE, "name": claim_name},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    return _object("PersistentVolume", name, spec=spec, status={"phase": "Bound"})
