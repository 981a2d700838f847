"""The container runtime's sandboxes and containers, and the changes that the gateway requests, as
frozen values converted from and to NRI messages.

A container's own configuration (its variables, its annotations) is a user's text and proves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from topobus.gateway.claims.rules.claim_cdi import ADJUST_VARIABLE, CPUSET_VARIABLE
from topobus.gateway.containers.rules.container_guard import guard_mount, guarded_claims
from topobus.gateway.containers.rules.cpusets import ContainerCpuset
from topobus.runtimepb.nri.v1alpha1 import api_pb2 as nri
from topobus.values.edits import ContainerEdits
from topobus.values.errors import ContractError
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.names import ClaimUid
from topobus.values.sandbox import BANDWIDTH_ANNOTATIONS, Sandbox

__all__ = [
    "ContainerAnswer",
    "CpusetUpdate",
    "RunningContainer",
    "adjustment_of",
    "container_of",
    "cpus_of",
    "resources_of",
    "sandbox_of",
    "update_of",
]

_NO_QUOTA = -1
"""cpu.cfs_quota_us of a cgroup without a limit."""


class RunningContainer(Struct, frozen=True, kw_only=True):
    """A container that was created or runs."""

    id: str
    sandbox_id: str
    name: str
    cdi_devices: tuple[str, ...] = ()
    """Names without vendor and class. Those of other vendors may be among them."""
    cpus: CpuSet | None = None
    """The CPUs that its cgroup was given. None: none, it has its parent's."""
    is_started: bool = True
    """False: it exists and does not run. Its start may then have read other CPUs than the
    runtime reports."""
    control_group: str = ""
    """Its control group as the runtime writes it (`cgroups_path`). Empty: not reported."""
    guards: tuple[tuple[ClaimUid, str], ...] = ()
    """Claims, by uid and class, whose guard keeps it from starting. Empty for a container that
    runs already."""
    has_ended: bool = False
    """The runtime lists it although it has stopped."""


class ContainerAnswer(Struct, frozen=True, kw_only=True):
    """What a new container gets."""

    cpuset: ContainerCpuset | None = None
    """None: it gets the CPUs that it would have without us."""
    passed: tuple[tuple[ClaimUid, str], ...] = ()
    """Claims whose guard is removed."""
    edits: ContainerEdits = ContainerEdits()
    """Additional edits of the device services: variables, bind mounts and annotations."""


class CpusetUpdate(Struct, frozen=True, kw_only=True):
    """CPUs and memory nodes that a container should have from now on."""

    container_id: str
    cpus: CpuSet
    mems: NodeSet = NodeSet()
    """Empty: they stay unchanged."""


def sandbox_of(pod: nri.PodSandbox) -> Sandbox:
    """Read a sandbox."""
    network = next((namespace.path for namespace in pod.linux.namespaces if namespace.type == "network"), "")
    annotations = {name: pod.annotations[name] for name in BANDWIDTH_ANNOTATIONS if name in pod.annotations}
    return Sandbox(
        id=pod.id,
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        network_namespace=network,
        annotations=annotations,
    )


def container_of(container: nri.Container) -> RunningContainer:
    """Read a container.

    Errors: raises ContractError when its CPUs are no list.
    """
    named = [device.name.rpartition("=")[2] for device in container.CDI_devices]
    # Runtimes before NRI 0.10 do not report CDI names, so they are read from our variables. A user
    # may set such a variable, as well as a CDI name in an annotation, but the name contains the
    # claim's uid.
    named += [
        value
        for variable, _, value in (text.partition("=") for text in container.env)
        if variable.startswith((CPUSET_VARIABLE, ADJUST_VARIABLE))
    ]
    return RunningContainer(
        id=container.id,
        sandbox_id=container.pod_sandbox_id,
        name=container.name,
        cdi_devices=tuple(dict.fromkeys(named)),
        cpus=cpus_of(container.linux.resources, container.id),
        is_started=container.state != nri.CONTAINER_CREATED,
        control_group=container.linux.cgroups_path,
        guards=guarded_claims((mount.source, mount.destination) for mount in container.mounts),
        has_ended=container.state == nri.CONTAINER_STOPPED,
    )


def cpus_of(resources: nri.LinuxResources, container_id: str) -> CpuSet | None:
    """Read the CPUs of a container. None when they are not set.

    Errors: raises ContractError when they are no list.
    """
    try:
        return CpuSet.parse(resources.cpu.cpus) if resources.cpu.cpus else None
    except ValueError as err:
        raise ContractError(f"NRI: container {container_id}: cpuset.cpus: {err}") from err


def resources_of(cpus: CpuSet, mems: NodeSet, *, is_unlimited: bool = False) -> nri.LinuxResources:
    """Convert CPUs and memory nodes. What is empty stays unchanged.

    Shapes: is_unlimited — without a quota of CPU time, which on exclusive CPUs would only cause
    idle periods.
    """
    cpu = nri.LinuxCPU(cpus=str(cpus), mems=str(mems))
    if is_unlimited:
        cpu.quota.value = _NO_QUOTA
    return nri.LinuxResources(cpu=cpu)


def adjustment_of(answer: ContainerAnswer) -> nri.ContainerAdjustment:
    """Convert the answer for a new container.

    A mount is removed by its destination with a minus sign as prefix.
    """
    adjustment = nri.ContainerAdjustment(
        mounts=[
            nri.Mount(destination=f"-{guard_mount(uid, device_class).container_path}")
            for uid, device_class in answer.passed
        ]
    )
    edits = answer.edits
    adjustment.mounts.extend(
        nri.Mount(destination=mount.container_path, type="bind", source=mount.host_path, options=mount.options)
        for mount in edits.mounts
    )
    adjustment.env.extend(nri.KeyValue(key=name, value=value) for name, value in sorted(edits.env.items()))
    adjustment.annotations.update(edits.annotations)
    if answer.cpuset is not None:
        cpuset = answer.cpuset
        adjustment.linux.resources.CopyFrom(resources_of(cpuset.cpus, cpuset.mems, is_unlimited=cpuset.is_exclusive))
    return adjustment


def update_of(updates: Iterable[CpusetUpdate]) -> list[nri.ContainerUpdate]:
    """Convert updates of existing containers."""
    return [
        nri.ContainerUpdate(
            container_id=update.container_id,
            linux=nri.LinuxContainerUpdate(resources=resources_of(update.cpus, update.mems)),
        )
        for update in updates
    ]
