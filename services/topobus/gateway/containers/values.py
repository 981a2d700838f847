"""What the gateway knows of the container runtime's sandboxes and containers, and the changes that
it asks for, as values.

Flows in: messages of the runtime. Flows out: frozen values, and messages made of
ours. What a container's own configuration says (its variables, its annotations) is a
user's text and proves nothing.
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
    """A container that is created or runs."""

    id: str
    sandbox_id: str
    name: str
    cdi_devices: tuple[str, ...] = ()
    """Names without vendor and class; those of others may be among them."""
    cpus: CpuSet | None = None
    """What its cgroup was given; None: nothing, it has its parent's."""
    is_started: bool = True
    """False: it exists and does not run; what the runtime says of its CPUs then need not be what
    its start has read."""
    control_group: str = ""
    """Its control group as the runtime writes it (`cgroups_path`); empty: it does not say."""
    guards: tuple[tuple[ClaimUid, str], ...] = ()
    """Claims by uid and class whose guard keeps it from starting; of one that runs already,
    nothing."""
    has_ended: bool = False
    """The runtime lists it, and it has stopped."""


class ContainerAnswer(Struct, frozen=True, kw_only=True):
    """What a new container gets."""

    cpuset: ContainerCpuset | None = None
    """None: it has the CPUs that it would have without us."""
    passed: tuple[tuple[ClaimUid, str], ...] = ()
    """Claims whose guard is taken out."""
    edits: ContainerEdits = ContainerEdits()
    """What the device services give it besides: variables, bind mounts and annotations."""


class CpusetUpdate(Struct, frozen=True, kw_only=True):
    """CPUs and memory nodes that a container is to have from now on."""

    container_id: str
    cpus: CpuSet
    mems: NodeSet = NodeSet()
    """Empty: they stay."""


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

    Errors: raises ContractError when its sets are none.
    """
    named = [device.name.rpartition("=")[2] for device in container.CDI_devices]
    # What runtimes before NRI 0.10 leave out stands in our variables. A user may write one, too, as
    # well as a CDI name into an annotation: the name has the claim's uid in it.
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
    """Read the CPUs of a container; None when nothing is said of them.

    Errors: raises ContractError when they are no list.
    """
    try:
        return CpuSet.parse(resources.cpu.cpus) if resources.cpu.cpus else None
    except ValueError as err:
        raise ContractError(f"NRI: container {container_id}: cpuset.cpus: {err}") from err


def resources_of(cpus: CpuSet, mems: NodeSet, *, is_unlimited: bool = False) -> nri.LinuxResources:
    """Write CPUs and memory nodes; what is not named stays as it is.

    Shapes: is_unlimited — without a quota of CPU time: on CPUs of its own it
    would only stand still in between.
    """
    cpu = nri.LinuxCPU(cpus=str(cpus), mems=str(mems))
    if is_unlimited:
        cpu.quota.value = _NO_QUOTA
    return nri.LinuxResources(cpu=cpu)


def adjustment_of(answer: ContainerAnswer) -> nri.ContainerAdjustment:
    """Write what a new container gets.

    A mount is taken out by its destination behind a minus sign.
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
    """Write updates of containers that exist."""
    return [
        nri.ContainerUpdate(
            container_id=update.container_id,
            linux=nri.LinuxContainerUpdate(resources=resources_of(update.cpus, update.mems)),
        )
        for update in updates
    ]
