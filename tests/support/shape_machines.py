"""Small machines for tests of shapes, and what their shapes are, in short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from topobus.engine.shapes.shapes import Shapes, attribute_of_level, shapes_of
from topobus.values.counters import CapacityPolicy
from topobus.values.device import Device, Inventory
from topobus.values.idset import CpuSet, NodeSet
from topobus.values.own_shapes import OwnShape, ShapePlace
from topobus.values.pci import PciAddress
from topobus.values.resource_names import SHAPE_LEVELS

__all__ = [
    "NODE",
    "at_level",
    "cpu_group",
    "device",
    "inventories",
    "own_parts",
    "own_shape",
    "server",
    "shapes_on",
    "summary",
    "without",
]

NODE = "node-a"


def device(
    name: str, node: int | None = 0, *, switch: int = 0, root: str = "", model: str = "", **fields: object
) -> Device:
    """A device of the class with which its name begins, under the switch at this bus."""
    plain = Device(
        name=name,
        device_class=name.partition("-")[0],
        model=model,
        numa_nodes=None if node is None else NodeSet(node),
        pcie_root=root or (f"pci0000:{switch:02x}" if switch else ""),
        pcie_switch=PciAddress(0, switch, 0, 0) if switch else None,
    )
    return Device(**{field: getattr(plain, field) for field in plain.__struct_fields__} | fields)


def cpu_group(node: int, count: int = 8, *, step: int = 1, grouping: str = "numa", socket: int | None = None) -> Device:
    """So many CPUs of a NUMA node as one device, two a core, with ids from 100 times the node's."""
    return Device(
        name=f"cpu-{grouping}-{node}",
        device_class="cpu",
        numa_nodes=NodeSet(node),
        socket=node if socket is None else socket,
        near_cpus=CpuSet.of(range(100 * node, 100 * node + count)),
        allows_multiple=True,
        capacity={"cpus": count},
        capacity_policies={"cpus": CapacityPolicy(default=step, minimum=step, step=step)},
        attributes={"group": grouping, "cores": count // 2, "threadsPerCore": 2, "kind": "performance"},
    )


def server(*, nodes: int = 2, switches: int = 2, gpus: int = 2, nics: int = 2, model: str = "H100") -> list[Device]:
    """A server with the same devices under each switch, and as many switches on each NUMA node.

    `gpu-101` is the GPU 1 under switch 0 of node 1.
    """
    return [
        device(f"{device_class}-{node}{switch}{index}", node, switch=16 * (node + 1) + switch, model=of_class)
        for node, switch in product(range(nodes), range(switches))
        for device_class, count, of_class in (("gpu", gpus, model), ("nic", nics, "CX7"))
        for index in range(count)
    ]


def without(devices: Iterable[Device], *starts: str) -> list[Device]:
    """The devices whose names do not begin so."""
    return [each for each in devices if not each.name.startswith(starts)]


def inventories(devices: Iterable[Device], sockets: Mapping[int, int] | None = None) -> tuple[Inventory, ...]:
    """The inventories of these devices, and that of a CPU on each node: node to socket, by default one
    socket a node.
    """
    devices = list(devices)
    nodes = sorted({node for each in devices for node in each.numa_nodes or ()})
    cpus = [
        Device(name=f"cpu-{node}", device_class="cpu", cpu=node, numa_nodes=NodeSet(node), socket=socket)
        for node, socket in (sockets if sockets is not None else {node: node for node in nodes}).items()
    ]
    classes = sorted({each.device_class for each in devices})
    return tuple(
        Inventory(
            node=NODE,
            device_class=device_class,
            generation=1,
            devices=tuple(sorted((each for each in (*devices, *cpus) if each.device_class == device_class), key=_name)),
        )
        for device_class in (*classes, "cpu")
    )


def shapes_on(
    devices: Iterable[Device], sockets: Mapping[int, int] | None = None, own_shapes: Sequence[OwnShape] = ()
) -> Shapes:
    """The shapes of a node with these devices, and those that its operator adds."""
    return shapes_of(inventories(devices, sockets), own_shapes)


def own_shape(name: str, within: ShapePlace, **parts: int) -> OwnShape:
    """A shape that an operator adds."""
    return OwnShape(name=name, parts=parts, within=within)


def own_parts(shapes: Shapes, name: str) -> list[tuple[str, ...]]:
    """The parts of the shapes that a selector by an operator's level finds."""
    return [shapes.parts[shape.name] for shape in shapes.devices if shape.attributes["level"] == name]


def at_level(shapes: Shapes, level: str) -> list[tuple[str, ...]]:
    """The parts of the shapes that a selector by this level finds."""
    attribute = attribute_of_level(level)
    return [shapes.parts[shape.name] for shape in shapes.devices if shape.attributes[attribute]]


def summary(shapes: Shapes) -> dict[str, str]:
    """What each level has, without its parts' names.

    >>> summary(shapes_on(server(nodes=1, switches=1)))
    {'gpu-nic': '2 × 1 gpu 1 nic', 'switch': '1 × 2 gpu 2 nic', 'numa': '1 × 2 gpu 2 nic', 'socket': '1 × 2 gpu 2 nic', 'machine': '1 × 2 gpu 2 nic'}
    """  # noqa: E501
    texts: dict[str, str] = {}
    for level in SHAPE_LEVELS:
        counts = Counter(_counts(parts) for parts in at_level(shapes, level))
        if counts:
            texts[level] = ", ".join(f"{number} × {text}" for text, number in sorted(counts.items()))
    return texts


def _counts(parts: Iterable[str]) -> str:
    of_class = Counter(name.partition("-")[0] for name in parts)
    return " ".join(f"{of_class[device_class]} {device_class}" for device_class in sorted(of_class))


def _name(each: Device) -> str:
    return each.name
