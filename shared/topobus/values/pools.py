"""Pools: devices of one class that kubelet is offered under a resource name of their own, such as
`topobus.dev/gpu-h100`.

An operator lists pools, each a name and conditions on a device. The first pool that matches has the
device, so a device is in one resource at most. A device that no pool takes stays in the class's own
resource.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from msgspec import Struct

from topobus.values.device import AttributeValue, Device
from topobus.values.names import is_dns_label
from topobus.values.quantity import Quantity

__all__ = ["Condition", "Pool", "fault_of_pools", "pool_of", "resource_of", "resource_split"]

_TEXTS: dict[str, Callable[[Device], str]] = {
    "driver": lambda device: device.driver,
    "model": lambda device: device.model,
    "name": lambda device: device.name,
    "parent": lambda device: device.parent,
    "pci": lambda device: str(device.pci) if device.pci is not None else "",
    "pcie_root": lambda device: device.pcie_root,
    "role": lambda device: str(device.role),
    "uuid": lambda device: device.uuid,
    "vendor": lambda device: device.vendor,
}
_NUMBERS: dict[str, Callable[[Device], int | None]] = {
    # A device with several nodes is local to none of them alone.
    "numa_node": lambda device: (
        next(iter(device.numa_nodes)) if device.numa_nodes is not None and len(device.numa_nodes) == 1 else None
    ),
    "socket": lambda device: device.socket,
}
_TABLES = ("attributes", "capacity")
# A resource's name part has 63 characters at most, and so has a DNS label.
_NAME_LIMIT = 63


class Condition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One condition on a device. It is false where the device lacks the field."""

    field: str
    """`driver`, `model`, `name`, `numa_node`, `parent`, `pci`, `pcie_root`, `role`, `socket`,
    `uuid`, `vendor`, or `attributes.NAME`, `capacity.NAME`."""
    equals: bool | int | str | None = None
    """Exactly this value."""
    one_of: tuple[bool | int | str, ...] = ()
    """One of these values."""
    glob: str = ""
    """Text that this pattern matches as a whole: `*` any text, `?` one character, `[ab]` one of
    these; capitals matter."""
    minimum: int | str | None = None
    """A number of at least this; text is a quantity: `80Gi`."""
    maximum: int | str | None = None
    """A number of at most this. May be combined with `minimum`."""

    def __post_init__(self) -> None:
        """Refuse a condition that cannot mean what was intended."""
        _check_field(self.field)
        tests = [
            name
            for name, is_given in (
                ("equals", self.equals is not None),
                ("one_of", bool(self.one_of)),
                ("glob", bool(self.glob)),
                ("minimum or maximum", self.minimum is not None or self.maximum is not None),
            )
            if is_given
        ]
        if len(tests) != 1:
            got = " and ".join(tests) or "none"
            raise ValueError(f"field {self.field!r}: wanted one of equals, one_of, glob, minimum or maximum; got {got}")
        if self.field in _TEXTS and (
            tests == ["minimum or maximum"] or not all(isinstance(value, str) for value in self._values())
        ):
            raise ValueError(f"field {self.field!r} is text: wanted glob, or equals or one_of with text in quotes")
        if (self.field in _NUMBERS or self.field.startswith("capacity.")) and (
            self.glob or not all(map(_is_number, self._values()))
        ):
            raise ValueError(
                f"field {self.field!r} is a number: wanted minimum, maximum, or equals or one_of with numbers"
            )
        for name, bound in (("minimum", self.minimum), ("maximum", self.maximum)):
            if bound is not None:
                _amount(bound, f"field {self.field!r}: {name} is")
        if self.minimum is not None and self.maximum is not None and _amount(self.maximum) < _amount(self.minimum):
            raise ValueError(f"field {self.field!r}: no number is at least {self.minimum} and at most {self.maximum}")

    def holds(self, device: Device) -> bool:
        """Say whether it is true of a device."""
        value = _value(device, self.field)
        if value is None:
            return False
        if self.glob:
            return isinstance(value, str) and fnmatchcase(value, self.glob)
        if self.minimum is not None or self.maximum is not None:
            if not _is_number(value):
                return False
            amount = Quantity.parse(value)
            return (self.minimum is None or not amount < _amount(self.minimum)) and (
                self.maximum is None or not _amount(self.maximum) < amount
            )
        # True and 1 are equal to Python, but not to the operator who wrote one of them.
        return any(type(value) is type(other_value) and value == other_value for other_value in self._values())

    def _values(self) -> tuple[bool | int | str, ...]:
        return self.one_of if self.equals is None else (self.equals,)


class Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of a class under a resource name of their own."""

    name: str
    """The resource's name without the prefix: the class, a dash, and what distinguishes it from
    the others (`gpu-h100`). A DNS label."""
    where: tuple[Condition, ...]
    """All of these are true of the pool's devices."""

    def __post_init__(self) -> None:
        """Refuse a name that is not a resource's, and a pool without conditions."""
        if not is_dns_label(self.name):
            raise ValueError(
                f"name is {self.name!r}, wanted lower-case letters, digits and '-', at most {_NAME_LIMIT}, "
                "such as gpu-h100"
            )
        if not self.where:
            raise ValueError(
                f"pool {self.name}: where is empty, wanted at least one condition such as {{field = 'model', "
                "glob = '*H100*'}"
            )

    def takes(self, device: Device) -> bool:
        """Say whether a device belongs here by its own properties."""
        return all(condition.holds(device) for condition in self.where)


def fault_of_pools(device_class: str, pools: Sequence[Pool]) -> str:
    """Explain what is wrong with a class's pools as a whole. Empty when nothing is.

    >>> fault_of_pools("gpu", [Pool(name="h100", where=(Condition(field="model", glob="*H100*"),))])
    "pool 'h100' of class gpu: wanted a name that begins with 'gpu-', such as gpu-h100"
    """
    seen: set[str] = set()
    for pool in pools:
        if device_class == "cpu":
            return (
                f"pool {pool.name!r}: class cpu has no pools, for kubelet gives exclusive CPUs by its own resource cpu"
            )
        if not pool.name.startswith(f"{device_class}-"):
            # So no two services of a node can offer one name, and the name identifies the class.
            near = f"{device_class}-{pool.name}"[:_NAME_LIMIT]
            return (
                f"pool {pool.name!r} of class {device_class}: wanted a name that begins with '{device_class}-', "
                f"such as {near}"
            )
        if pool.name in seen:
            return (
                f"pool {pool.name!r} is listed twice: wanted one pool, with one_of where a field may have several "
                "values"
            )
        seen.add(pool.name)
    return ""


def pool_of(device: Device, pools: Sequence[Pool]) -> str:
    """Name the pool of a device. Empty when no pool takes it.

    Order: of several pools that take it, the first in the operator's list.
    """
    return next((pool.name for pool in pools if pool.takes(device)), "")


def resource_of(device: Device) -> str:
    """Name, without the prefix, the resource that offers a device: its pool, else its class."""
    return device.pool or device.device_class


def resource_split(devices: Sequence[Device], classes: Collection[str]) -> dict[str, tuple[Device, ...]]:
    """Sort devices of one class by the resource that offers them.

    Shapes: classes — all classes of the node. A pool named like one of them is ignored, because the
            class has the name. result — resource without its prefix to its devices, sorted by name,
            each with one device at least and in the order given.
    """
    found_devices: dict[str, list[Device]] = {}
    for device in devices:
        resource = resource_of(device)
        found_devices.setdefault(device.device_class if resource in classes else resource, []).append(device)
    return {name: tuple(own_devices) for name, own_devices in sorted(found_devices.items())}


def _value(device: Device, field: str) -> AttributeValue | None:
    if field in _TEXTS:
        return _TEXTS[field](device) or None
    if field in _NUMBERS:
        return _NUMBERS[field](device)
    table, _, key = field.partition(".")
    return device.attributes.get(key) if table == "attributes" else device.capacity.get(key)


def _check_field(field: str) -> None:
    fields = [*_TEXTS, *_NUMBERS]
    table, dot, key = field.partition(".")
    if field in fields or (table in _TABLES and dot and key):
        return
    tables = [f"{each_table}.NAME" for each_table in _TABLES]
    near = get_close_matches(field, fields, n=1)
    if not near and get_close_matches(table, _TABLES, n=1):
        near = [f"{get_close_matches(table, _TABLES, n=1)[0]}.{key or 'NAME'}"]
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(fields))}, {', '.join(tables)}"
    raise ValueError(f"there is no field {field!r}: {hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _amount(bound: int | str, what: str = "") -> Quantity:
    try:
        return Quantity.parse(bound)
    except ValueError as err:
        raise ValueError(f"{what} {err}") from err
