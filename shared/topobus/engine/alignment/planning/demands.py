"""What a pod demands, checked and put in the order in which kubelet admits containers.

The result is one `ContainerDemand` for each container, or a Refusal that names every fault. Nothing
about the node is considered here.
Source: kubelet's order (init containers and sidecars as listed, then app containers); pod totals as
in k8s.io/component-helpers/resource PodLimits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from topobus.engine.alignment.planning.node_view import MEMORY, cpu_of_name
from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import ContainerKind, ContainerRequest, DeviceRequest, PodRequest

__all__ = ["ContainerDemand", "DeviceDemand", "pod_total", "read_demands"]


class DeviceDemand(Struct, frozen=True, kw_only=True):
    """A number of devices of one class, some of them by name."""

    device_class: str
    any_count: int = 0
    """How many the planner chooses."""
    names: tuple[str, ...] = ()
    """Wanted by name, sorted."""
    shared: tuple[str, ...] = ()
    """Looked at without being held, or held by share. `claims_only.share_faults` checks whether
    that is possible."""

    @property
    def count(self) -> int:
        """How many are held in the end."""
        return self.any_count + len(self.names)

    @property
    def excluded(self) -> set[str]:
        """Devices that may not be chosen for the rest: those wanted by name, and those with admin
        access, which are not held but must not be chosen either.
        """
        return {*self.names, *self.shared}


class ContainerDemand(Struct, frozen=True, kw_only=True):
    """The demand of one container (or, without a name, of a whole pod).

    Demands are in the order of admission.
    """

    name: str
    place: int
    """Position in the request."""
    kind: ContainerKind
    cpus: int = 0
    """Exclusive CPUs that the planner chooses."""
    named_cpus: CpuSet = CpuSet()
    devices: tuple[DeviceDemand, ...] = ()
    """One a class, sorted by class."""
    memory: dict[str, int] = {}
    """Kind to bytes, of what is wanted at all."""

    def of_class(self, device_class: str) -> DeviceDemand:
        """The demand for a class, zero when there is none."""
        return next(
            (device for device in self.devices if device.device_class == device_class),
            DeviceDemand(device_class=device_class),
        )

    def unmet(self, code: str, message: str, resource: str, **facts: str | int) -> Reason:
        """Make the reason why this cannot be met. The message names the container or the pod."""
        who = f"container {self.name!r}" if self.name else "the pod"
        return Reason(
            code=code, message=f"{who}: {message}", facts={"container": self.name, "resource": resource, **facts}
        )


def read_demands(request: PodRequest) -> tuple[ContainerDemand, ...] | Refusal:
    """Check a request and order its containers: init containers and sidecars first, then app
    containers.
    """
    faults: list[Reason] = []
    if not request.containers:
        faults.append(Reason(code="no-containers", message="the request names no container"))
    names = [container.name for container in request.containers]
    faults += [
        Reason(
            code="duplicate-container",
            message=f"the request names container {name!r} more than once",
            facts={"container": name},
        )
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    demands = [_read(container, place, faults) for place, container in enumerate(request.containers)]
    if faults:
        return Refusal(reasons=tuple(faults))
    return tuple(sorted(demands, key=lambda demand: (demand.kind is ContainerKind.APP, demand.place)))


def pod_total(demands: Sequence[ContainerDemand]) -> ContainerDemand:
    """Add up a pod: what its init phase needs at its peak, or what runs side by side afterwards,
    whichever is more.
    """
    classes = sorted({device.device_class for demand in demands for device in demand.devices})
    devices = []
    for device_class in classes:
        names = sorted({name for demand in demands for name in demand.of_class(device_class).names})
        most = _peak(demands, [demand.of_class(device_class).any_count for demand in demands])
        devices.append(DeviceDemand(device_class=device_class, any_count=most, names=tuple(names)))
    named = CpuSet()
    for demand in demands:
        named |= demand.named_cpus
    kinds = sorted({kind for demand in demands for kind in demand.memory})
    return ContainerDemand(
        name="",
        place=0,
        kind=ContainerKind.APP,
        cpus=_peak(demands, [demand.cpus for demand in demands]),
        named_cpus=named,
        devices=tuple(devices),
        memory={kind: _peak(demands, [demand.memory.get(kind, 0) for demand in demands]) for kind in kinds},
    )


def _peak(demands: Sequence[ContainerDemand], amounts: Sequence[int]) -> int:
    staying, peak = 0, 0
    for demand, amount in zip(demands, amounts, strict=True):
        if demand.kind is ContainerKind.INIT:
            peak = max(peak, staying + amount)
        else:
            staying += amount
    return max(peak, staying)


def _read(container: ContainerRequest, place: int, faults: list[Reason]) -> ContainerDemand:
    def fault(code: str, message: str, **facts: str | int) -> None:
        faults.append(
            Reason(
                code=code,
                message=f"container {container.name!r}: {message}",
                facts={"container": container.name, **facts},
            )
        )

    if container.cpus < 0:
        fault(
            "count-zero",
            f"asks for {container.cpus} exclusive CPUs, wanted 0 or more",
            resource=CPU_CLASS,
            wanted=container.cpus,
        )
    for kind, size in ((MEMORY, container.memory_bytes), *sorted(container.hugepages.items())):
        if size < 0:
            fault("count-zero", f"asks for {size} bytes of {kind}, wanted 0 or more", resource=kind, wanted=size)
    cpus = max(container.cpus, 0)
    named_cpus: list[int] = []
    counts: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    shared: dict[str, list[str]] = {}
    for device in container.devices:
        if _is_misfit(device, fault):
            continue
        if device.device_class == CPU_CLASS:
            cpu_ids = [cpu_of_name(name) for name in device.names]
            for name, cpu in zip(device.names, cpu_ids, strict=True):
                if cpu is None:
                    fault(
                        "unknown-device",
                        f"there is no CPU device named {name!r}, wanted cpu-<id>",
                        resource=CPU_CLASS,
                        device=name,
                    )
            if not device.is_shared:
                named_cpus += [cpu for cpu in cpu_ids if cpu is not None]
                cpus += 0 if device.names else device.count
        else:
            counts[device.device_class] = counts.get(device.device_class, 0) + (0 if device.names else device.count)
            (shared if device.is_shared or device.by_share else names).setdefault(device.device_class, []).extend(
                device.names
            )
    for device_class, name in _named_twice(names, shared, named_cpus):
        fault("duplicate-device", f"names {device_class} {name} more than once", resource=device_class, device=name)
    return ContainerDemand(
        name=container.name,
        place=place,
        kind=container.kind,
        cpus=cpus,
        named_cpus=CpuSet.of(named_cpus),
        devices=_device_demands(counts, names, shared),
        memory=_memory(container),
    )


def _device_demands(
    counts: Mapping[str, int], names: Mapping[str, Sequence[str]], shared: Mapping[str, Sequence[str]]
) -> tuple[DeviceDemand, ...]:
    return tuple(
        DeviceDemand(
            device_class=device_class,
            any_count=count,
            names=tuple(sorted(names.get(device_class, ()))),
            shared=tuple(sorted(shared.get(device_class, ()))),
        )
        for device_class, count in sorted(counts.items())
    )


def _named_twice(
    names: Mapping[str, Sequence[str]], shared: Mapping[str, Sequence[str]], named_cpus: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Give the class and the name of each device that is named more than once; several shares of one
    device are not.
    """
    both = {
        device_class: [*names.get(device_class, ()), *dict.fromkeys(listed)] for device_class, listed in shared.items()
    }
    for device_class, listed in (*{**names, **both}.items(), (CPU_CLASS, [str(cpu) for cpu in named_cpus])):
        for name in sorted({name for name in listed if listed.count(name) > 1}):
            yield device_class, name


def _is_misfit(device: DeviceRequest, fault: Callable[..., None]) -> bool:
    """Report what is wrong with the count and the names of a device request, and return whether
    anything is.
    """
    wanted: dict[str, str | int] = {"resource": device.device_class, "wanted": device.count}
    if device.count <= 0:
        message = f"asks for {device.count} devices of class {device.device_class}, wanted 1 or more"
        fault("count-zero", message, **wanted)
    elif device.names and len(device.names) != device.count:
        message = f"asks for {device.count} {device.device_class} but names {len(device.names)}"
        fault("count-mismatch", message, **wanted, named=len(device.names))
    elif (device.is_shared or device.by_share) and not device.names:
        fault("shared-needs-names", f"asks to share {device.device_class} without naming devices", **wanted)
    else:
        return False
    return True


def _memory(container: ContainerRequest) -> dict[str, int]:
    """Return the memory that the memory policy handles.

    As in kubelet, only for containers whose memory is guaranteed.
    """
    if not container.is_memory_fixed:
        return {}
    return {
        kind: size
        for kind, size in ((MEMORY, container.memory_bytes), *sorted(container.hugepages.items()))
        if size > 0
    }
