"""Small clusters in which one pod has no node, each with the true cause and a change that helps.

Every cluster is the objects of devices, nodes, and pods that hold some, with one fault or several;
the pod to explain is `team/job`. What `topobus why` says of each is asserted twice: on these
objects, and on a real API server, where kube-scheduler confirms it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.why_objects import (
    AMD,
    CPU,
    INTEL,
    NAMESPACE,
    NETWORK,
    NVIDIA,
    NVIDIA_SELECTOR,
    SRIOV,
    Plain,
    allocated,
    amd_gpus,
    asks,
    bound_volume,
    card,
    claim,
    class_of,
    cpu_groups,
    functions,
    intel_gpus,
    interfaces,
    node,
    nvidia_gpus,
    partitions,
    pod,
    slice_of,
    template,
    volume_claim,
    volume_class,
)
from topobus.values.cluster_answers import Verdict

__all__ = ["CASES", "GENERATED", "JOB", "KEPT_COUNTERS", "Case", "first_reasons"]

JOB = (NAMESPACE, "job")
GENERATED = "resource.kubernetes.io/pod-claim-name"
"""Annotation of claims that a cluster makes of templates."""
_ROOT = "resource.kubernetes.io/pcieRoot"
_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"
_NVIDIA = 'device.attributes["gpu.nvidia.com"]'
_RULE_GATE = "DRADeviceTaintRules"
_PORT = 8443


@dataclass(frozen=True)
class Case:
    """One cluster, and what is true of its pod."""

    name: str
    code: str
    """Of the verdict."""
    reason: str
    """Code of the first reason: for all nodes, else of the nearest group. Empty when there is
    none; for a pod that fits, that of a remark."""
    change: str
    """Code of a change that helps. Empty when no change of an object that is looked at does."""
    objects: tuple[Plain, ...]
    is_refused: bool = False
    """Whether an API server refuses one of the objects, so that no cluster can have them."""
    is_passing: bool = False
    """Whether a cluster is like that for a moment only, because a controller ends it."""
    gate: str = ""
    """A gate without which the objects mean nothing."""


def first_reasons(verdict: Verdict) -> list[str]:
    """List the codes that can be the reason of a case."""
    nearest = verdict.groups[0].reasons if verdict.groups else ()
    first = verdict.remarks if verdict.code == "fits" else verdict.reasons[:1] or nearest[:1]
    return [reason.code for reason in first] or [""]


def _job(*claims: str, **fields: Any) -> Plain:
    return pod("job", *claims, **fields)


def _holder(name: str, *devices: str, driver: str = NVIDIA, on: str = "gpu-a", **result: Any) -> tuple[Plain, ...]:
    """Let a pod of some name run on a node with a claim for devices of it."""
    held = claim(f"{name}-claim", asks(driver, len(devices), name="held"))
    return (allocated(held, driver, on, *devices, by=(name,), **result), pod(name, f"{name}-claim", on=on))


def _nvidia(*names: str, count: int = 2, **fields: Any) -> tuple[Plain, ...]:
    """Make nodes with NVIDIA GPUs, and their class."""
    nodes = [each for name in names or ("gpu-a",) for each in (node(name, **fields), _gpus_on(name, count))]
    return (class_of(NVIDIA), *nodes)


def _gpus_on(name: str, count: int = 2) -> Plain:
    return slice_of(NVIDIA, name, nvidia_gpus(count))


def _wants(*requests: Plain, constraints: tuple[Plain, ...] = ()) -> tuple[Plain, ...]:
    """Make the claim `want` and the pod that waits with it."""
    return (claim("want", *requests, constraints=constraints), _job("want"))


def _from_template(*requests: Plain) -> tuple[Plain, ...]:
    """Make the template `gpus`, the pod that waits with it, and the claim that was made of it."""
    made = claim("job-gpus-x7k2p", *requests)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "job", "uid": "uid-job", "controller": True}
    metadata = {"annotations": {GENERATED: "use-gpus"}, "ownerReferences": [owner]}
    waiting = _job(templates=["gpus"])
    names = [{"name": "use-gpus", "resourceClaimName": "job-gpus-x7k2p"}]
    return (
        template("gpus", *requests),
        {**made, "metadata": {**made["metadata"], **metadata}},
        {**waiting, "status": {**waiting["status"], "resourceClaimStatuses": names}},
    )


def _deleted(plain: Plain) -> Plain:
    """Take an object that is being deleted and waits for a finalizer."""
    waits_for = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/hold"]}
    return {**plain, "metadata": {**plain["metadata"], **waits_for}}


def _in_zone(zone: str) -> Plain:
    term = {"matchExpressions": [{"key": _ZONE, "operator": "In", "values": [zone]}]}
    return {"nodeSelectorTerms": [term]}


_PLAIN_WANT = claim("want", asks(NVIDIA))
"""One GPU, which there is."""

_NAMES = (
    Case("class-misspelt", "invalid", "unknown-class", "class-name", (*_nvidia(), *_wants(asks("gpu.nvidea.com")))),
    Case(
        "class-misspelt-in-a-template",
        "invalid",
        "unknown-class",
        "class-name",
        (*_nvidia(), *_from_template(asks("gpu.nvidia.co"))),
    ),
    Case("class-of-no-near-name", "invalid", "unknown-class", "", (*_nvidia(), *_wants(asks("fpga-large")))),
    Case(
        "attribute-misspelt",
        "invalid",
        "selector-error",
        "attribute-name",
        (*_nvidia(), *_wants(asks(NVIDIA, 1, f'{_NVIDIA}.productNam == "NVIDIA H100 80GB HBM3"'))),
    ),
    Case(
        "attribute-misspelt-behind-has",
        "no-node-fits",
        "too-few-devices",
        "attribute-name",
        (
            class_of(INTEL),
            node("flex"),
            slice_of(INTEL, "flex", intel_gpus()),
            *_wants(
                asks(
                    INTEL,
                    1,
                    'has(device.attributes["gpu.intel.com"].famly) && '
                    'device.attributes["gpu.intel.com"].famly == "Data Center Flex"',
                )
            ),
        ),
    ),
    Case(
        "attribute-misspelt-behind-in",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            class_of(SRIOV),
            node("edge"),
            slice_of(SRIOV, "edge", functions()),
            *_wants(
                asks(
                    SRIOV,
                    1,
                    '"resourcename" in device.attributes["sriovnetwork.k8snetworkplumbingwg.io"]',
                )
            ),
        ),
    ),
    Case(
        "attribute-domain-misspelt",
        "invalid",
        "selector-error",
        "attribute-name",
        (
            class_of(AMD),
            node("mi300"),
            slice_of(AMD, "mi300", amd_gpus()),
            *_wants(asks(AMD, 1, 'device.attributes["gpu.amd.co"].computePartition == "spx"')),
        ),
    ),
    Case(
        "constraint-attribute-misspelt",
        "no-node-fits",
        "too-few-devices",
        "attribute-name",
        (
            *_nvidia(),
            class_of(NETWORK),
            slice_of(NETWORK, "gpu-a", interfaces()),
            *_wants(
                asks(NVIDIA),
                asks(NETWORK, name="nic"),
                constraints=({"requests": ["gpu", "nic"], "matchAttribute": "resource.kubernetes.io/pcieRot"},),
            ),
        ),
    ),
    Case(
        "distinct-attribute-misspelt",
        "no-node-fits",
        "too-few-devices",
        "attribute-name",
        (
            class_of(AMD),
            node("mi300"),
            slice_of(AMD, "mi300", amd_gpus()),
            *_wants(asks(AMD, 2), constraints=({"distinctAttribute": f"{AMD}/numaNod"},)),
        ),
    ),
    Case(
        "class-misspelt-and-more-devices-than-there-are",
        "invalid",
        "unknown-class",
        "",
        (*_nvidia(), *_wants(asks("gpu.nvidia.cm", 5))),
    ),
    Case(
        "class-selector-misspelt",
        "invalid",
        "selector-error",
        "",
        (
            class_of(NVIDIA, expression=NVIDIA_SELECTOR.replace(".type", ".typ")),
            node("gpu-a"),
            _gpus_on("gpu-a"),
            *_wants(asks(NVIDIA)),
        ),
    ),
    Case(
        "selector-that-does-not-compile",
        "invalid",
        "selector-error",
        "",
        (*_nvidia(), *_wants(asks(NVIDIA, 1, f'{_NVIDIA}.productName = "NVIDIA H100"'))),
        is_refused=True,
    ),
)

_SELECTORS = (
    Case(
        "product-that-no-node-has",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (*_nvidia("gpu-a", "gpu-b"), *_wants(asks(NVIDIA, 1, f'{_NVIDIA}.productName == "NVIDIA H200"'))),
    ),
    Case(
        "memory-above-every-device",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            class_of(AMD),
            node("mi300"),
            slice_of(AMD, "mi300", amd_gpus()),
            *_wants(
                asks(AMD, 2, 'device.capacity["gpu.amd.com"].memory.compareTo(quantity("256Gi")) >= 0', name="big")
            ),
        ),
    ),
    Case(
        "version-above-every-device",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            *_nvidia(),
            *_wants(asks(NVIDIA, 1, f'{_NVIDIA}.cudaComputeCapability.isGreaterThan(semver("10.0.0"))')),
        ),
    ),
    Case(
        "interface-without-rdma",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            class_of(NETWORK),
            node("net-a"),
            slice_of(NETWORK, "net-a", interfaces(rdma=False)),
            *_wants(asks(NETWORK, 1, 'device.attributes["dra.net"].rdma == true', name="nic")),
        ),
    ),
    Case(
        "function-of-another-resource",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            class_of(SRIOV),
            node("edge"),
            slice_of(SRIOV, "edge", functions()),
            *_wants(
                asks(
                    SRIOV,
                    1,
                    'device.attributes["sriovnetwork.k8snetworkplumbingwg.io"].resourceName == "slow-net"',
                    name="vf",
                )
            ),
        ),
    ),
    Case(
        "numa-node-that-no-machine-has",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            class_of(CPU),
            node("cpu-a"),
            slice_of(CPU, "cpu-a", cpu_groups(2)),
            *_wants(
                asks(
                    CPU,
                    1,
                    'device.attributes["dra.cpu"].numaNodeID == 5',
                    name="cpus",
                    capacity={"requests": {"dra.cpu/cpu": "4"}},
                )
            ),
        ),
    ),
    Case(
        "two-selectors-of-which-one-is-false",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            class_of(INTEL),
            node("flex"),
            slice_of(INTEL, "flex", intel_gpus()),
            *_wants(
                asks(
                    INTEL,
                    1,
                    'device.attributes["gpu.intel.com"].driver == "i915"',
                    'device.attributes["gpu.intel.com"].model == "Max 1550"',
                )
            ),
        ),
    ),
)

_COUNTS = (
    Case(
        "more-devices-than-a-node-has",
        "no-node-fits",
        "too-few-devices",
        "count",
        (*_nvidia("gpu-a", "gpu-b"), *_wants(asks(NVIDIA, 4))),
    ),
    Case(
        "more-functions-than-are-free",
        "no-node-fits",
        "too-few-devices",
        "count",
        (
            class_of(SRIOV),
            node("edge"),
            slice_of(SRIOV, "edge", functions(3)),
            *_holder("proxy", "0000-c2-00-1", driver=SRIOV, on="edge"),
            *_wants(asks(SRIOV, 3, name="vf")),
        ),
    ),
    Case(
        "held-by-one-pod",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (*_nvidia(), *_holder("train", "gpu-0", "gpu-1"), *_wants(asks(NVIDIA))),
    ),
    Case(
        "held-by-several-pods",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            *_nvidia(count=3),
            *_holder("train", "gpu-0"),
            *_holder("serve", "gpu-1"),
            *_holder("tune", "gpu-2"),
            *_wants(asks(NVIDIA, 2)),
        ),
    ),
    Case(
        "held-by-a-claim-without-pods",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            *_nvidia(count=1),
            allocated(claim("left-over", asks(NVIDIA)), NVIDIA, "gpu-a", "gpu-0"),
            *_wants(asks(NVIDIA)),
        ),
    ),
    Case(
        "all-devices-with-one-in-use",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (*_nvidia(), *_holder("train", "gpu-1"), *_wants(asks(NVIDIA, allocationMode="All"))),
    ),
    Case(
        "alternatives-all-in-use",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            *_nvidia(),
            *_holder("train", "gpu-0", "gpu-1"),
            *_wants(
                {
                    "name": "gpu",
                    "firstAvailable": [
                        {"name": "two", "deviceClassName": NVIDIA, "allocationMode": "ExactCount", "count": 2},
                        {"name": "one", "deviceClassName": NVIDIA, "allocationMode": "ExactCount", "count": 1},
                    ],
                }
            ),
        ),
    ),
    Case(
        "second-alternative-of-a-misspelt-class",
        "invalid",
        "unknown-class",
        "class-name",
        (
            *_nvidia(),
            *_wants(
                {
                    "name": "gpu",
                    "firstAvailable": [
                        {"name": "four", "deviceClassName": NVIDIA, "allocationMode": "ExactCount", "count": 4},
                        {"name": "one", "deviceClassName": "gpu.nvidia.cm", "allocationMode": "ExactCount", "count": 1},
                    ],
                }
            ),
        ),
    ),
    Case(
        "alternatives-that-no-node-has",
        "no-node-fits",
        "too-few-devices",
        "selector",
        (
            *_nvidia(),
            *_wants(
                {
                    "name": "gpu",
                    "firstAvailable": [
                        {
                            "name": product.lower(),
                            "deviceClassName": NVIDIA,
                            "allocationMode": "ExactCount",
                            "count": 1,
                            "selectors": [{"cel": {"expression": f'{_NVIDIA}.productName == "NVIDIA {product}"'}}],
                        }
                        for product in ("B200", "H200")
                    ],
                }
            ),
        ),
    ),
    Case(
        "class-without-any-slice",
        "no-node-fits",
        "too-few-devices",
        "",
        (class_of(INTEL), node("gpu-a"), *_wants(asks(INTEL))),
    ),
    Case(
        "two-claims-that-no-node-has-both-for",
        "no-node-fits",
        "too-few-devices",
        "",
        (
            *_nvidia(),
            class_of(NETWORK),
            node("net-a"),
            slice_of(NETWORK, "net-a", interfaces()),
            _PLAIN_WANT,
            claim("also", asks(NETWORK, name="nic")),
            _job("want", "also"),
        ),
    ),
    Case(
        "two-claims-that-are-one-device-short",
        "no-node-fits",
        "too-few-devices",
        "count",
        (*_nvidia(), _PLAIN_WANT, claim("also", asks(NVIDIA, 2, name="more")), _job("want", "also")),
    ),
)

_CONSTRAINTS = (
    Case(
        "gpu-and-interface-below-different-roots",
        "no-node-fits",
        "too-few-devices",
        "constraint",
        (
            *_nvidia(),
            class_of(NETWORK),
            slice_of(NETWORK, "gpu-a", interfaces(first_root=64)),
            *_wants(
                asks(NVIDIA),
                asks(NETWORK, name="nic"),
                constraints=({"requests": ["gpu", "nic"], "matchAttribute": _ROOT},),
            ),
        ),
    ),
    Case(
        "functions-of-one-physical-one-that-should-be-distinct",
        "no-node-fits",
        "too-few-devices",
        "constraint",
        (
            class_of(SRIOV),
            node("edge"),
            slice_of(SRIOV, "edge", functions()),
            *_wants(asks(SRIOV, 2, name="vf"), constraints=({"distinctAttribute": f"{SRIOV}/PFName"},)),
        ),
    ),
    Case(
        "only-the-gpu-of-the-right-root-is-held",
        "no-node-fits",
        "too-few-devices",
        "constraint",
        (
            *_nvidia(),
            class_of(NETWORK),
            slice_of(NETWORK, "gpu-a", interfaces(1)),
            *_holder("train", "gpu-0"),
            *_wants(
                asks(NVIDIA),
                asks(NETWORK, name="nic"),
                constraints=({"requests": ["gpu", "nic"], "matchAttribute": _ROOT},),
            ),
        ),
    ),
)

_DEVICES = (
    Case(
        "device-taint",
        "no-node-fits",
        "too-few-devices",
        "device-toleration",
        (
            class_of(NVIDIA),
            node("gpu-a"),
            slice_of(
                NVIDIA,
                "gpu-a",
                nvidia_gpus(1, taints=[{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]),
            ),
            *_wants(asks(NVIDIA)),
        ),
    ),
    Case(
        "device-taint-of-a-rule",
        "no-node-fits",
        "too-few-devices",
        "device-toleration",
        (
            *_nvidia(),
            {
                "apiVersion": "resource.k8s.io/v1beta2",
                "kind": "DeviceTaintRule",
                "metadata": {"name": "repair"},
                "spec": {
                    "deviceSelector": {"driver": NVIDIA, "pool": "gpu-a"},
                    "taint": {"key": "example.com/repair", "value": "fan", "effect": "NoSchedule"},
                },
            },
            *_wants(asks(NVIDIA)),
        ),
        gate=_RULE_GATE,
    ),
    Case(
        "counters-used-up",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            class_of("mig.nvidia.com"),
            node("gpu-a"),
            slice_of(NVIDIA, "gpu-a", name="gpu-a-counters", slices=2, counters=[card()]),
            slice_of(NVIDIA, "gpu-a", partitions("7g.80gb", "3g.40gb", "3g.40gb"), slices=2),
            *_holder("train", "gpu-0-mig-7g-80gb-0"),
            *_wants(asks("mig.nvidia.com", 1, 'device.attributes["gpu.nvidia.com"].profile == "3g.40gb"', name="part")),
        ),
    ),
    Case(
        "capacity-used-up",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            class_of(CPU),
            node("cpu-a"),
            slice_of(CPU, "cpu-a", cpu_groups()),
            *_holder(
                "busy",
                "cpudevnuma000",
                driver=CPU,
                on="cpu-a",
                shareID="5d1c1c0e-3f5c-4c7b-9d7f-0123456789ab",
                consumedCapacity={"dra.cpu/cpu": "6"},
            ),
            *_wants(asks(CPU, name="cpus", capacity={"requests": {"dra.cpu/cpu": "4"}})),
        ),
    ),
    Case(
        "devices-of-another-zone",
        "no-node-fits",
        "too-few-devices",
        "node-label",
        (
            class_of(NETWORK),
            node("net-a", labels={_ZONE: "east"}),
            node("net-b", labels={_ZONE: "west"}),
            slice_of(NETWORK, "", interfaces(), name="fabric", pool="fabric", where=_in_zone("west")),
            claim("want", asks(NETWORK, name="nic")),
            _job("want", nodeSelector={_ZONE: "east"}),
        ),
    ),
    Case(
        "pool-incomplete",
        "no-node-fits",
        "too-few-devices",
        "",
        (
            class_of(NVIDIA),
            node("gpu-a"),
            slice_of(NVIDIA, "gpu-a", nvidia_gpus(), slices=2),
            *_wants(asks(NVIDIA)),
        ),
    ),
    Case(
        "slices-of-an-older-generation",
        "no-node-fits",
        "too-few-devices",
        "node-label",
        (
            class_of(NVIDIA),
            node("gpu-a"),
            node("gpu-b"),
            slice_of(NVIDIA, "gpu-a", nvidia_gpus(), pool="rack", slices=2),
            slice_of(NVIDIA, "gpu-b", nvidia_gpus(), pool="rack", generation=2),
            _PLAIN_WANT,
            _job("want", nodeSelector={_HOST: "gpu-a"}),
        ),
    ),
    Case(
        "admin-access-in-an-ordinary-namespace",
        "invalid",
        "admin-access-forbidden",
        "",
        (*_nvidia(), *_wants(asks(NVIDIA, adminAccess=True))),
        is_refused=True,
    ),
)

_CLAIMS = (
    Case(
        "claim-misspelt",
        "not-ready",
        "claim-missing",
        "claim-name",
        (*_nvidia(), claim("fast-gpus", asks(NVIDIA)), _job("fast-gpu")),
    ),
    Case("claim-missing", "not-ready", "claim-missing", "", (*_nvidia(), _PLAIN_WANT, _job("scratch"))),
    Case("template-missing", "not-ready", "template-missing", "", (*_nvidia(), _job(templates=["gpus"]))),
    Case(
        "claim-not-made-yet",
        "not-ready",
        "claim-not-made",
        "",
        (*_nvidia(), template("gpus", asks(NVIDIA)), _job(templates=["gpus"])),
        is_passing=True,
    ),
    Case(
        "quota-of-claims",
        "not-ready",
        "quota-exceeded",
        "",
        (
            *_nvidia(),
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "claims", "namespace": NAMESPACE},
                "spec": {"hard": {"count/resourceclaims.resource.k8s.io": "1"}},
                "status": {
                    "hard": {"count/resourceclaims.resource.k8s.io": "1"},
                    "used": {"count/resourceclaims.resource.k8s.io": "1"},
                },
            },
            *_holder("train", "gpu-0"),
            template("gpus", asks(NVIDIA)),
            _job(templates=["gpus"]),
        ),
    ),
    Case(
        "quota-of-devices",
        "not-ready",
        "quota-exceeded",
        "",
        (
            *_nvidia(),
            {
                "apiVersion": "v1",
                "kind": "ResourceQuota",
                "metadata": {"name": "devices", "namespace": NAMESPACE},
                "spec": {"hard": {"gpu.nvidia.com.deviceclass.resource.k8s.io/devices": "1"}},
                "status": {
                    "hard": {"gpu.nvidia.com.deviceclass.resource.k8s.io/devices": "1"},
                    "used": {"gpu.nvidia.com.deviceclass.resource.k8s.io/devices": "0"},
                },
            },
            template("gpus", asks(NVIDIA, 2)),
            _job(templates=["gpus"]),
        ),
    ),
    Case(
        "claim-that-is-being-deleted",
        "not-ready",
        "claim-deleting",
        "",
        (*_nvidia(), _deleted(_PLAIN_WANT), _job("want")),
    ),
    Case(
        "shared-claim-on-a-node-that-is-excluded",
        "no-node-fits",
        "node-selector-label",
        "node-label",
        (
            class_of(NVIDIA),
            node("gpu-a"),
            node("gpu-b"),
            _gpus_on("gpu-a"),
            _gpus_on("gpu-b"),
            allocated(claim("want", asks(NVIDIA)), NVIDIA, "gpu-a", "gpu-0", by=("train",)),
            pod("train", "want", on="gpu-a"),
            _job("want", nodeSelector={_HOST: "gpu-b"}),
        ),
    ),
)

_TAINT = {"key": "example.com/gpu", "value": "reserved", "effect": "NoSchedule"}


def _near(selector: Plain) -> Plain:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}


def _affinity(kind: str, **labels: str) -> Plain:
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": _HOST}
    return {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


_NODES = (
    Case("no-node-at-all", "no-nodes", "", "", (class_of(NVIDIA), *_wants(asks(NVIDIA)))),
    Case(
        "node-tainted", "no-node-fits", "node-tainted", "toleration", (*_nvidia(taints=[_TAINT]), *_wants(asks(NVIDIA)))
    ),
    Case(
        "node-cordoned",
        "no-node-fits",
        "node-tainted",
        "node-uncordon",
        (*_nvidia(is_cordoned=True), *_wants(asks(NVIDIA))),
    ),
    Case(
        "node-label-missing",
        "no-node-fits",
        "node-selector-label",
        "node-label",
        (*_nvidia(), _PLAIN_WANT, _job("want", nodeSelector={"example.com/pool": "training"})),
    ),
    Case(
        "node-affinity",
        "no-node-fits",
        "node-affinity",
        "node-affinity",
        (
            *_nvidia(labels={_ZONE: "east"}),
            _PLAIN_WANT,
            _job("want", affinity=_near(_in_zone("west"))),
        ),
    ),
    Case(
        "zone-that-no-node-is-in",
        "no-node-fits",
        "node-selector-label",
        "node-label",
        (*_nvidia(labels={_ZONE: "east"}), _PLAIN_WANT, _job("want", nodeSelector={_ZONE: "west"})),
    ),
    Case(
        "node-without-memory-left",
        "no-node-fits",
        "node-tainted",
        "",
        (
            *_nvidia(taints=[{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]),
            *_wants(asks(NVIDIA)),
        ),
    ),
    Case(
        "tainted-and-outside-the-node-affinity",
        "no-node-fits",
        "node-tainted",
        "toleration",
        (
            *_nvidia(labels={_ZONE: "east"}, taints=[_TAINT]),
            _PLAIN_WANT,
            _job("want", affinity=_near(_in_zone("west"))),
        ),
    ),
    Case(
        "tainted-and-its-devices-held",
        "no-node-fits",
        "node-tainted",
        "",
        (*_nvidia(taints=[_TAINT]), *_holder("train", "gpu-0", "gpu-1"), *_wants(asks(NVIDIA))),
    ),
    Case(
        "cordoned-and-tainted-and-without-the-label",
        "no-node-fits",
        "node-tainted",
        "node-uncordon",
        (
            *_nvidia(is_cordoned=True, taints=[_TAINT]),
            _PLAIN_WANT,
            _job("want", nodeSelector={"example.com/pool": "training"}),
        ),
    ),
    Case(
        "free-gpus-on-a-tainted-node-and-held-ones-on-the-other",
        "no-node-fits",
        "too-few-devices",
        "toleration",
        (
            *_nvidia("gpu-b", taints=[_TAINT]),
            node("gpu-a"),
            _gpus_on("gpu-a"),
            *_holder("train", "gpu-0", "gpu-1"),
            *_wants(asks(NVIDIA)),
        ),
    ),
    Case(
        "no-room-for-cpu",
        "no-node-fits",
        "no-room",
        "requests",
        (*_nvidia(), _PLAIN_WANT, _job("want", resources={"requests": {"cpu": "32"}})),
    ),
    Case(
        "no-room-for-memory",
        "no-node-fits",
        "no-room",
        "requests",
        (
            *_nvidia(),
            pod("cache", on="gpu-a", resources={"requests": {"memory": "48Gi"}}),
            _PLAIN_WANT,
            _job("want", resources={"requests": {"memory": "32Gi"}}),
        ),
    ),
    Case(
        "no-room-for-another-pod",
        "no-node-fits",
        "no-room",
        "remove-holders",
        (*_nvidia(pods="1"), pod("cache", on="gpu-a"), *_wants(asks(NVIDIA))),
    ),
    Case(
        "host-port-taken",
        "no-node-fits",
        "host-port-taken",
        "remove-holders",
        (*_nvidia(), pod("web", on="gpu-a", port=_PORT), _PLAIN_WANT, _job("want", port=_PORT)),
    ),
    Case(
        "pod-anti-affinity",
        "no-node-fits",
        "pod-anti-affinity",
        "remove-holders",
        (
            *_nvidia(),
            pod("web", on="gpu-a", labels={"app": "web"}),
            _PLAIN_WANT,
            _job("want", affinity=_affinity("podAntiAffinity", app="web")),
        ),
    ),
    Case(
        "anti-affinity-of-another-pod",
        "no-node-fits",
        "anti-affinity-of-others",
        "remove-holders",
        (
            *_nvidia(),
            pod("alone", on="gpu-a", affinity=_affinity("podAntiAffinity", app="job")),
            _PLAIN_WANT,
            _job("want", labels={"app": "job"}),
        ),
    ),
    Case(
        "pod-affinity-without-partner",
        "no-node-fits",
        "pod-affinity",
        "",
        (*_nvidia(), _PLAIN_WANT, _job("want", affinity=_affinity("podAffinity", app="database"))),
    ),
    Case(
        "topology-spread",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            *_nvidia(labels={_ZONE: "east"}),
            node("cpu-a", labels={_ZONE: "west"}),
            pod("first", on="gpu-a", labels={"app": "job"}),
            _PLAIN_WANT,
            _job(
                "want",
                labels={"app": "job"},
                topologySpreadConstraints=[
                    {
                        "maxSkew": 1,
                        "topologyKey": _ZONE,
                        "whenUnsatisfiable": "DoNotSchedule",
                        "labelSelector": {"matchLabels": {"app": "job"}},
                    }
                ],
            ),
        ),
    ),
)


def _data(name: str = "data") -> list[Plain]:
    return [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]


_VOLUMES = (
    Case(
        "volume-claim-missing",
        "not-ready",
        "volume-claim-missing",
        "",
        (*_nvidia(), _PLAIN_WANT, _job("want", volumes=_data())),
    ),
    Case(
        "volume-claim-not-bound",
        "not-ready",
        "volume-claim-unbound",
        "",
        (
            *_nvidia(),
            volume_class("by-hand", binds_at_once=True),
            volume_claim("data", "by-hand"),
            _PLAIN_WANT,
            _job("want", volumes=_data()),
        ),
    ),
    Case(
        "volume-in-another-zone",
        "no-node-fits",
        "too-few-devices",
        "",
        (
            *_nvidia(labels={_ZONE: "east"}),
            node("cpu-a", labels={_ZONE: "west"}),
            volume_class("by-hand"),
            bound_volume("disk", "by-hand", zone="west", claim_name="data"),
            volume_claim("data", "by-hand", volume="disk"),
            _PLAIN_WANT,
            _job("want", volumes=_data()),
        ),
    ),
    Case(
        "no-volume-that-could-be-bound",
        "no-node-fits",
        "volume-unavailable",
        "",
        (
            *_nvidia(),
            volume_class("by-hand"),
            volume_claim("data", "by-hand"),
            _PLAIN_WANT,
            _job("want", volumes=_data()),
        ),
    ),
)

_SERVED = class_of(NVIDIA, resource="example.com/gpu")

_PODS = (
    Case(
        "scheduling-gate",
        "gated",
        "gated",
        "",
        (*_nvidia(), _PLAIN_WANT, _job("want", schedulingGates=[{"name": "example.com/quota"}])),
    ),
    Case(
        "more-of-an-extended-resource-than-its-class-has",
        "no-node-fits",
        "too-few-devices",
        "requests",
        (
            _SERVED,
            node("gpu-a"),
            _gpus_on("gpu-a"),
            _job(resources={"limits": {"example.com/gpu": "3"}, "requests": {"example.com/gpu": "3", "cpu": "1"}}),
        ),
    ),
    Case(
        "extended-resource-held-by-a-claim",
        "no-node-fits",
        "too-few-devices",
        "remove-holders",
        (
            _SERVED,
            node("gpu-a"),
            _gpus_on("gpu-a", 1),
            *_holder("train", "gpu-0"),
            _job(resources={"limits": {"example.com/gpu": "1"}, "requests": {"example.com/gpu": "1", "cpu": "1"}}),
        ),
    ),
    Case(
        "extended-resource-that-nobody-serves",
        "no-node-fits",
        "no-room",
        "",
        (
            *_nvidia(),
            _job(
                resources={"limits": {"vendor.example/widget": "1"}, "requests": {"vendor.example/widget": "1"}},
            ),
        ),
    ),
    Case(
        "another-scheduler",
        "fits",
        "other-scheduler",
        "",
        (*_nvidia(), _PLAIN_WANT, _job("want", schedulerName="volcano")),
    ),
    Case(
        "pod-that-is-being-deleted",
        "deleting",
        "",
        "",
        (*_nvidia(), claim("want", asks(NVIDIA, 5)), _deleted(_job("want"))),
    ),
    Case("pod-on-a-node", "scheduled", "", "", (*_nvidia(), *_holder("job", "gpu-0"))),
    Case("pod-that-ended", "ended", "", "", (*_nvidia(), _job(on="gpu-a", phase="Succeeded"))),
)

CASES = (*_NAMES, *_SELECTORS, *_COUNTS, *_CONSTRAINTS, *_DEVICES, *_CLAIMS, *_NODES, *_VOLUMES, *_PODS)
"""By kind of fault."""


def _card_of(*devices: Plain) -> tuple[Plain, ...]:
    """Make a node with one GPU that is cut into these partitions, and the partitions' class."""
    counters = slice_of(NVIDIA, "gpu-a", name="gpu-a-counters", slices=2, counters=[card()])
    return (class_of("mig.nvidia.com"), node("gpu-a"), counters, slice_of(NVIDIA, "gpu-a", devices, slices=2))


def _below(root: str, device: Plain) -> Plain:
    return {**device, "attributes": {**device["attributes"], _ROOT: {"string": root}}}


_WHOLE, _PART = partitions("7g.80gb", "3g.40gb")
_FIRST, *_OTHERS = partitions("3g.40gb", "3g.40gb", "3g.40gb")
_BAD = {"key": "example.com/repair", "value": "fan", "effect": "NoSchedule"}

KEPT_COUNTERS = (
    Case(
        "refused-by-a-taint",
        "no-node-fits",
        "too-few-devices",
        "device-toleration",
        (*_card_of({**_WHOLE, "taints": [_BAD]}, _PART), *_wants(asks("mig.nvidia.com"))),
    ),
    Case(
        "refused-by-a-constraint",
        "no-node-fits",
        "too-few-devices",
        "constraint",
        (
            *_card_of(_FIRST, *(_below("pci0000:80", device) for device in _OTHERS)),
            *_wants(asks("mig.nvidia.com", 2), constraints=({"matchAttribute": _ROOT},)),
        ),
    ),
)
"""The first device is refused, and others fit. Before 1.36.3 kube-scheduler counts the refused one as taken."""
