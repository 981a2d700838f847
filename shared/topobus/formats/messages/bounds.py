"""Limits the size of every part of a message that crosses NATS.

Each message type of the catalogue gets a twin type of the same shape with limits on every text,
list, map and number. The codec decodes into the twin first, so msgspec refuses a message out of
bounds in C, with the JSON path, before any object is made. Without limits a few hundred bytes cost
a reader gigabytes or minutes (memory blocks by the thousand, CPU lists of a million). The limits
follow what Linux, kubelet and Kubernetes can have, so no honest message comes near them. Fields of
type Any (Kubernetes' own objects, opaque configuration) are bounded by the size of the whole
message, and checked where they are read.
"""

from __future__ import annotations

import enum
import types
import typing
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from topobus.values.counters import CounterUse
from topobus.values.device import Device
from topobus.values.idset import CpuSet, IdSet, NodeSet
from topobus.values.machine import Cpu, NumaNode, PciDevice
from topobus.values.outcome import MemoryBlock
from topobus.values.pci import PciAddress
from topobus.values.view import CoreView, NumaMemory

__all__ = [
    "MAX_COUNTERS",
    "MAX_ENTRIES",
    "MAX_ID_TEXT",
    "MAX_INTEGER",
    "MAX_MEMORY_BLOCKS",
    "MAX_NAME",
    "MAX_SHARES",
    "MAX_TEXT",
    "MAX_USES",
    "MAX_VALID_VALUES",
    "bounded",
]

MAX_NAME = 1024
"""Characters of a name, an id or an owner's key. Kubernetes' names end at 253; an owner's key has
three of them and a kind."""
MAX_TEXT = 64 * 1024
"""Characters of a sentence, a path or a variable's value. A condition ends at 32 KiB
(metav1.Condition); a refusal may name some thousand nodes."""
MAX_ID_TEXT = 64 * 1024
"""Characters of a list of ids: every second CPU of the largest machine takes 20 kB."""
MAX_ENTRIES = 8192
"""Entries of a list or a map. As many as a machine may have CPUs (NR_CPUS), each of which is a
device; pods a node end at some hundreds."""
MAX_MEMORY_BLOCKS = 64
"""Memory blocks of one container: one for plain memory and one for each size of huge pages; arm64
has four of these, ppc64 five."""
MAX_SHARES = 1024
"""Shares of a memory block: one a NUMA node at most (MAX_NUMNODES)."""
MAX_COUNTERS = 32
"""Counters of a counter set (resource.k8s.io/v1)."""
MAX_USES = 64
"""Counters that a device uses: those of two sets (resource.k8s.io/v1)."""
MAX_VALID_VALUES = 10
"""Values of a capacity's policy (resource.k8s.io/v1)."""
MAX_INTEGER = 2**63 - 1
"""As far as every reader of Kubernetes' numbers goes (int64); downwards the same."""

# Texts that are written for people or copied from a machine, by the field's name. All other texts
# are names.
_TEXTS = frozenset(
    {
        "annotations",
        "attributes",
        "config",
        "container_path",
        "env",
        "evidence",
        "facts",
        "failure",
        "host_path",
        "kubelet",
        "ledger",
        "message",
        "options",
        "path",
        "policy",
    }
    | {"reason", "warnings", "why"}
)
_INTEGER = Annotated[int, Meta(ge=-MAX_INTEGER - 1, le=MAX_INTEGER)]
_NODE_ID = Annotated[int, Meta(ge=0, le=NodeSet.MAX_ID)]
_CPU_ID = Annotated[int, Meta(ge=0, le=CpuSet.MAX_ID)]
# Numbers that become members of a set. `core` and `l3` are the lowest CPU of their group.
_IDS = {
    (Cpu, "id"): _CPU_ID,
    (Cpu, "core"): _CPU_ID,
    (Cpu, "l3"): _CPU_ID,
    (Cpu, "numa_node"): _NODE_ID,
    (Device, "cpu"): _CPU_ID,
    (NumaNode, "id"): _NODE_ID,
    (PciDevice, "numa_node"): _NODE_ID,
    (CoreView, "numa_node"): _NODE_ID,
    (NumaMemory, "id"): _NODE_ID,
}
_PLAIN = (float, bool, type(None), Any, Raw)


@cache
def bounded(kind: type[Struct], unread: str = "") -> type[Struct]:
    """Make a message type's twin with limits. Values are only decoded into it and then dropped.

    Shapes: unread — the field of a map whose values stay bytes (`Raw`), for a reader that first
            finds which of them are new; keys and number of entries have their limits.
    Errors: raises TypeError for a field of a type without limits.
    """
    fields = msgspec.structs.fields(kind)
    hints = {field.name: field.type for field in fields}
    if unread:
        hints[unread] = dict[typing.get_args(hints[unread])[0], Raw]  # type: ignore[misc]  # made at run time
    config = kind.__struct_config__
    limited = [
        (field.name, _limited(hints[field.name], field.name, _IDS.get((kind, field.name), _INTEGER)), _field(field))
        for field in fields
    ]
    return msgspec.defstruct(
        f"Bounded{kind.__name__}",
        limited,
        kw_only=True,
        array_like=config.array_like,
        forbid_unknown_fields=config.forbid_unknown_fields,
        tag=config.tag,
        tag_field=config.tag_field,
        gc=False,  # dropped at once and never part of a cycle
    )


def _field(field: msgspec.structs.FieldInfo) -> Any:
    """Keep the name on the wire, and whether the field may be left out.

    The default of a field that is left out does not matter here.
    """
    return (
        msgspec.field(name=field.encode_name) if field.required else msgspec.field(default=None, name=field.encode_name)
    )


def _limited(hint: Any, name: str, integer: Any = _INTEGER) -> Any:
    """Put limits on a type.

    Shapes: name — the field's; integer — the limits of a whole number in it.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return hint  # has limits of its own
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_limited(argument, name, integer) for argument in arguments)]  # noqa: UP007 - made at run time
    if origin is dict:
        keys, values = arguments
        most = Meta(max_length=MAX_COUNTERS if name == "counters" else MAX_ENTRIES)
        return Annotated[dict[_limited(keys, "key"), _limited(values, name)], most]  # type: ignore[misc]  # made at run time
    if origin is tuple and Ellipsis not in arguments:
        return tuple[tuple(_limited(argument, name, integer) for argument in arguments)]  # type: ignore[misc]  # made at run time
    if origin in (tuple, list):
        return Annotated[list[_limited(arguments[0], name)], Meta(max_length=_most_entries(arguments[0], name))]  # type: ignore[misc]  # made at run time
    if isinstance(hint, type) and issubclass(hint, Struct):
        return bounded(hint)
    return integer if hint is int else _limited_scalar(hint, name)


def _limited_scalar(hint: Any, name: str) -> Any:
    if hint is str:
        return Annotated[str, Meta(max_length=MAX_TEXT if name in _TEXTS else MAX_NAME)]
    if hint is PciAddress:
        return Annotated[str, Meta(max_length=MAX_NAME)]
    if isinstance(hint, type) and issubclass(hint, IdSet):
        return Annotated[str, Meta(max_length=MAX_ID_TEXT)]
    if (
        hint in _PLAIN
        or typing.get_origin(hint) is typing.Literal
        or (isinstance(hint, type) and issubclass(hint, enum.Enum))
    ):
        return hint
    raise TypeError(f"field {name}: no limits are known for {hint!r}: teach topobus.formats.messages.bounds")


def _most_entries(element: Any, name: str) -> int:
    if element is MemoryBlock:
        return MAX_MEMORY_BLOCKS
    if name == "shares":
        return MAX_SHARES
    if element is CounterUse:
        return MAX_USES
    if name == "valid_values":
        return MAX_VALID_VALUES
    return MAX_ENTRIES
