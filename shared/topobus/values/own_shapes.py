"""Shapes that an operator adds to those of the machine's own tree: so many devices of each class that
lie within one place of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from topobus.values.dra_names import CPU_CLASS
from topobus.values.idset import CpuSet
from topobus.values.names import is_dns_label
from topobus.values.resource_names import SHAPE_LEVELS

__all__ = ["MAX_SHAPE_PARTS", "OwnShape", "ShapePlace", "fault_of_own_shapes"]

MAX_SHAPE_PARTS = 64
"""Parts of one shape: resource.k8s.io/v1 lets a device take from 2 counter sets of 32 counters."""
_MOST = 16
"""More than twice as many as there are levels, and few enough that the slices of a node stay small."""
# A shape's device has this name, that of its first part and a digest in the 63 characters of its own.
_NAME_LIMIT = 32
ShapePlace = Literal["switch", "numa", "socket", "quarter", "half", "machine"]
"""Levels that parts can lie within. A pair is none: it has nothing but its two devices."""


class OwnShape(Struct, frozen=True, kw_only=True):
    """A shape that an operator adds."""

    name: str
    """Its level. A DNS label that no level of the machine's own tree has."""
    parts: dict[str, int]
    """Class to how many of its devices each shape has. Of class `cpu` to how many CPUs."""
    within: ShapePlace
    """The level of which one place has all parts."""

    @property
    def cpus(self) -> int:
        """How many CPUs each shape has."""
        return self.parts.get(CPU_CLASS, 0)

    @property
    def devices(self) -> dict[str, int]:
        """Class to how many of its devices each shape has, CPUs aside."""
        return {device_class: count for device_class, count in self.parts.items() if device_class != CPU_CLASS}


def fault_of_own_shapes(shapes: Sequence[OwnShape]) -> str:
    """Explain what is wrong with the shapes that an operator adds, on whatever machine. Empty when
    nothing is.

    >>> fault_of_own_shapes([OwnShape(name="trio", parts={"gpu": 2, "nic": -1}, within="numa")])
    'trio: parts: got -1 of class nic, wanted 1 or more'
    """
    if len(shapes) > _MOST:
        return f"got {len(shapes)} shapes, wanted at most {_MOST}"
    names = [shape.name for shape in shapes]
    for shape in shapes:
        fault = _fault_of_name(shape.name) or _fault_of_parts(shape)
        if fault:
            return fault
        if names.count(shape.name) > 1:
            return f"got {names.count(shape.name)} shapes with the name {shape.name!r}, wanted one"
    return ""


def _fault_of_name(name: str) -> str:
    # A name with two dashes would be read as that of another vendor's device (topobus.values.dra_names).
    if not is_dns_label(name) or "--" in name or len(name) > _NAME_LIMIT:
        return (
            f"name: got {name!r}, wanted lower-case letters, digits and single '-' between them, at most "
            f"{_NAME_LIMIT}, such as 'trio'"
        )
    if name in SHAPE_LEVELS:
        return f"name: got {name!r}, which every machine's own tree may have; wanted another, such as 'trio'"
    if name.partition("-")[0] == CPU_CLASS:
        return f"name: got {name!r}, with which the names of single CPUs begin; wanted another, such as 'trio'"
    return ""


def _fault_of_parts(shape: OwnShape) -> str:
    if not shape.parts:
        return f"{shape.name}: parts: got none, wanted classes with numbers, such as gpu: 2, nic: 1"
    for device_class, count in sorted(shape.parts.items()):
        if count < 1:
            return f"{shape.name}: parts: got {count} of class {device_class}, wanted 1 or more"
    if shape.cpus > CpuSet.MAX_ID:
        return f"{shape.name}: parts: got {shape.cpus} of class cpu, wanted at most {CpuSet.MAX_ID}"
    if not shape.devices:
        return f"{shape.name}: parts: got CPUs alone, wanted a device beside them: class cpu has CPUs alone"
    total = sum(shape.devices.values())
    least = 1 if shape.cpus else 2
    if not least <= total <= MAX_SHAPE_PARTS:
        beside = " beside CPUs" if shape.cpus else ""
        return f"{shape.name}: parts: got {total} in all{beside}, wanted {least} to {MAX_SHAPE_PARTS}"
    return ""
