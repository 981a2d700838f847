"""Small and large nodes for alignment tests, made of plain values."""

from __future__ import annotations

from msgspec import structs

from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.machine import Cpu, Machine, NumaNode
from topobus.values.pci import PciAddress
from topobus.values.request import (
    ContainerKind,
    ContainerRequest,
    DeviceRequest,
    Owner,
    OwnerKind,
    PodRequest,
    Policy,
    Scope,
)
from topobus.values.view import AlignmentOptions, CoreView, NodeView

__all__ = ["container", "dgx", "dgx_facts", "holding", "owner", "pod"]


def dgx(*, policy: Policy = Policy.BEST_EFFORT, scope: Scope = Scope.CONTAINER) -> NodeView:
    """The demo machine: 2 sockets of 56 cores with SMT, 2 PCIe switches a socket with 2 GPUs and 2
    NICs each, 2 FPGAs on node 0.
    """
    cores = tuple(
        CoreView(cpus=CpuSet(core, core + 112), numa_node=core // 56, socket=core // 56, l3=core // 56 * 56)
        for core in range(112)
    )
    devices: dict[str, tuple[Device, ...]] = {
        device_class: tuple(
            Device(
                name=f"{device_class}-{place}",
                device_class=device_class,
                numa_nodes=NodeSet(place // 4),
                pcie_root=f"pci0000:{place // 2}0",
                pcie_switch=PciAddress(0, place // 2 * 16, 0, 0),
            )
            for place in range(8)
        )
        for device_class in ("gpu", "nic")
    }
    devices["fpga"] = tuple(
        Device(name=f"fpga-{place}", device_class="fpga", numa_nodes=NodeSet(0), pcie_root=f"pci0000:f{place}")
        for place in range(2)
    )
    return NodeView(
        node="demo-node",
        options=AlignmentOptions(policy=policy, scope=scope),
        numa_nodes=NodeSet(0, 1),
        distances=((10, 21), (21, 10)),
        cores=cores,
        devices=devices,
    )


def dgx_facts() -> tuple[Machine, dict[str, Inventory]]:
    """The same machine as its services publish it."""
    view = dgx()
    cpus = tuple(
        Cpu(id=cpu, online=True, core=core.cpus.lowest, socket=core.socket, numa_node=core.numa_node, l3=core.l3)
        for core in view.cores
        for cpu in core.cpus
    )
    machine = Machine(
        node=view.node,
        numa_nodes=tuple(
            NumaNode(id=node, cpus=CpuSet.of(cpu.id for cpu in cpus if cpu.numa_node == node), memory_bytes=1 << 40)
            for node in view.numa_nodes
        ),
        cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)),
        distances=view.distances,
    )
    inventories = {
        name: Inventory(node=view.node, device_class=name, generation=1, devices=devices)
        for name, devices in view.devices.items()
    }
    inventories["cpu"] = Inventory(
        node=view.node,
        device_class="cpu",
        generation=1,
        devices=tuple(Device(name=f"cpu-{cpu.id}", device_class="cpu", cpu=cpu.id) for cpu in machine.cpus),
    )
    return machine, inventories


def owner(name: str) -> Owner:
    """A pod as owner."""
    return Owner(kind=OwnerKind.POD, name=name, uid=f"uid-{name}")


def container(
    name: str = "main", *, cpus: int = 0, kind: ContainerKind = ContainerKind.APP, **devices: int
) -> ContainerRequest:
    """A container that asks for so many devices a class."""
    return ContainerRequest(
        name=name,
        kind=kind,
        cpus=cpus,
        devices=tuple(DeviceRequest(device_class=device_class, count=count) for device_class, count in devices.items()),
    )


def pod(
    name: str, *containers: ContainerRequest, policy: Policy | None = None, scope: Scope | None = None
) -> PodRequest:
    """A pod of these containers."""
    return PodRequest(owner=owner(name), containers=containers, policy=policy, scope=scope)


def holding(view: NodeView, name: str, *, cpus: str = "", **devices: tuple[str, ...]) -> NodeView:
    """The same node with these devices held by the pod of that name."""
    key = owner(name).key
    held = {device_class: dict(names) for device_class, names in view.held_devices.items()}
    for device_class, names in devices.items():
        held.setdefault(device_class, {}).update(dict.fromkeys(names, key))
    return structs.replace(
        view, held_devices=held, held_cpus={**view.held_cpus, **({key: CpuSet.parse(cpus)} if cpus else {})}
    )
