"""Logical CPUs as devices: one for every CPU that Linux has online.

Flows in: the machine as discovery saw it, and the kernel's list of online CPUs. Flows out: devices `cpu-<id>` with core, socket, L3 and NUMA
node; a CPU that went offline as gone. It pins nothing: the cpuset is kubelet's or the runtime's to write; a container only learns
which CPUs were chosen. Source: Documentation/ABI/stable/sysfs-devices-system-cpu, Documentation/core-api/cpu_hotplug.rst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from topobus.devicekit.driver import PrepareContext
from topobus.devicekit.edits_text import own_variable
from topobus.domain.device import AttributeValue, Device
from topobus.domain.edits import ContainerEdits
from topobus.domain.errors import HardwareError
from topobus.domain.health import Dimension, HealthState, Observation, RecoveryAction
from topobus.domain.idset import CpuSet, NodeSet
from topobus.domain.machine import Cpu, Machine
from topobus.domain.outcome import Reason, Refusal
from topobus.sysfs.tree import Tree

__all__ = ["LinuxCpuDriver"]

_ONLINE = "sys/devices/system/cpu/online"
# A DRA string attribute holds at most 64 characters; only a machine with more than 16 threads a core could exceed it.
_MAX_ATTRIBUTE = 64


class LinuxCpuDriver:
    """Finds the online CPUs of any Linux machine."""

    name = "linux-cpu"
    device_class = "cpu"

    def discover(self, tree: Tree, machine: Machine) -> Sequence[Device]:
        """List one device for each online CPU; costs no file read, for the machine knows all of it."""
        online = [cpu for cpu in machine.cpus if cpu.online]
        siblings: dict[int, list[int]] = {}
        for cpu in online:
            if cpu.core is not None:
                siblings.setdefault(cpu.core, []).append(cpu.id)
        names = {core: str(CpuSet.of(ids)) for core, ids in siblings.items()}
        return tuple(self._device(cpu, names) for cpu in sorted(online, key=lambda cpu: cpu.id))

    def observe(self, tree: Tree, devices: Sequence[Device]) -> Mapping[str, Sequence[Observation]]:
        """Report the CPUs that are no longer online, by one read of the kernel's list."""
        online = _online(tree)
        if online is None:
            return {}
        return {
            device.name: (
                Observation(
                    dimension=Dimension.PRESENCE,
                    state=HealthState.UNHEALTHY,
                    # The reason that the host gives as well, once the machine no longer has the CPU online: one fault, one event.
                    reason="device-gone",
                    message=f"CPU {device.cpu} is offline",
                    evidence={"path": _ONLINE, "value": str(online)},
                    action=RecoveryAction.WAIT,
                ),
            )
            for device in devices
            if device.cpu is not None and device.cpu not in online
        }

    def prepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> Mapping[str, ContainerEdits] | Refusal:
        """Tell the container its CPUs: all of them in `TOPOBUS_CPUS`, and one variable a CPU."""
        online = _online(tree)
        wanted = CpuSet.of(device.cpu for device in devices if device.cpu is not None)
        if online is not None and wanted - online:
            missing = wanted - online
            reason = Reason(
                code="cpu-offline",
                message=f"CPUs {missing} are offline; bring them online or ask for others",
                facts={"cpus": str(missing), "online": str(online)},
            )
            return Refusal(reasons=(reason,))
        edits = {device.name: ContainerEdits(env={own_variable(device): "1"}) for device in devices}
        return {**edits, "": ContainerEdits(env={"TOPOBUS_CPUS": str(wanted)})}

    def unprepare(self, tree: Tree, devices: Sequence[Device], context: PrepareContext) -> None:
        """Undo nothing: preparing a CPU changes nothing on the machine."""

    def _device(self, cpu: Cpu, siblings: Mapping[int, str]) -> Device:
        facts: dict[str, AttributeValue | None] = {
            "core": cpu.core,
            "socket": cpu.socket,
            "die": cpu.die,
            "l3": cpu.l3,
            "numaNode": cpu.numa_node,
            "kind": cpu.kind or None,
            "siblings": siblings.get(cpu.core, "")[:_MAX_ATTRIBUTE] if cpu.core is not None else None,
        }
        return Device(
            name=f"cpu-{cpu.id}",
            device_class=self.device_class,
            driver=self.name,
            numa_nodes=None if cpu.numa_node is None else NodeSet(cpu.numa_node),
            cpu=cpu.id,
            core=cpu.core,
            socket=cpu.socket,
            l3=cpu.l3,
            attributes={key: value for key, value in facts.items() if value is not None},
        )


def _online(tree: Tree) -> CpuSet | None:
    """Read the CPUs that are online now; None on a tree without the file (old recordings), which then is no evidence."""
    text = tree.read(_ONLINE)
    if text is None:
        return None
    try:
        return CpuSet.parse(text)
    except ValueError as err:
        raise HardwareError(f"{_ONLINE} under {tree.root}: got {text[:60]!r}, wanted a list of CPUs", path=_ONLINE, raw=text[:200]) from err
