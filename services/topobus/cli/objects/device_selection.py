"""Finds the devices that a command line selects: by name, or all that match a class, a node and
conditions.

Pure. The devices are sorted, with their node and class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial

from msgspec import Struct

from topobus.cli.exits import NotFoundError, UsageError
from topobus.cli.options import one_of, one_of_classes
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.values.device import Device, Inventory
from topobus.values.pci import PciAddress
from topobus.values.pools import Condition

__all__ = ["ChosenDevice", "Selection", "choose_devices", "read_conditions"]

_SHOWN = 10


class ChosenDevice(Struct, frozen=True, kw_only=True, order=True):
    """One selected device."""

    node: str
    device_class: str
    device: str


class Selection(Struct, frozen=True, kw_only=True):
    """The selection of devices on a command line."""

    names: tuple[str, ...] = ()
    node: str | None = None
    device_class: str | None = None
    where: tuple[str, ...] = ()


def read_conditions(where: Iterable[str]) -> tuple[tuple[Condition, ...], ...]:
    """Read `FIELD=VALUE` words, of which all must hold.

    A value that looks like a number may be one or a text, so each word gives alternatives.

    Errors: raises UsageError.

    >>> [condition.glob for condition in read_conditions(["driver=nvid*"])[0]]
    ['nvid*']
    """
    return tuple(map(_read, where))


def choose_devices(
    selection: Selection, inventories: Sequence[Inventory], withheld: Sequence[ClassMaintenance] = ()
) -> tuple[ChosenDevice, ...]:
    """Find the selected devices.

    Shapes: withheld — the withheld devices, for a command that may also select devices that are
    gone.
    Errors: raises UsageError when nothing is selected or one name could mean several devices,
    NotFoundError when a name or a selector matches none.
    """
    conditions = read_conditions(selection.where)
    places = [(each.node, each.device_class) for each in inventories] + [
        (each.node, each.device_class) for each in withheld
    ]
    if selection.node is not None:
        one_of("node", selection.node, (node for node, _ in places))
    if selection.device_class is not None:
        one_of_classes(selection.device_class, (device_class for _, device_class in places))
    offered = {
        ChosenDevice(node=inventory.node, device_class=inventory.device_class, device=device.name): device
        for inventory in inventories
        for device in inventory.devices
    }
    gone = {
        ChosenDevice(node=maintenance.node, device_class=maintenance.device_class, device=name)
        for maintenance in withheld
        for name in maintenance.devices
    } - offered.keys()
    scope = [
        chosen
        for chosen in sorted({*offered, *gone})
        if selection.node in (None, chosen.node)
        and selection.device_class in (None, chosen.device_class)
        and _matches(offered.get(chosen), conditions)
    ]
    if selection.names:
        return tuple(
            sorted(
                chosen for name in dict.fromkeys(selection.names) for chosen in _named(name, selection, scope, offered)
            )
        )
    if selection.device_class is None and not selection.where:
        raise UsageError(
            "no device is named, and no selector given",
            next_step="name devices, or give --class CLASS or --where FIELD=VALUE, with --node NODE",
        )
    if not scope:
        raise NotFoundError(
            f"no device {_selection_text(selection)}", next_step="`topobus inventory CLASS` lists what there is"
        )
    return tuple(scope)


def _address(name: str) -> PciAddress | None:
    """Read a PCI address, with or without its domain. None for any other text."""
    try:
        return PciAddress.parse(name)
    except ValueError:
        return None


def _named(
    name: str, selection: Selection, scope: Sequence[ChosenDevice], offered: Mapping[ChosenDevice, Device]
) -> list[ChosenDevice]:
    meant = [chosen for chosen in scope if chosen.device == name]
    if not meant and (address := _address(name)):
        # In the form of lspci and the drawing. Each function of a partitioned card has its own
        # address.
        meant = [
            chosen
            for chosen in scope
            if chosen in offered and offered[chosen].pci == address and not offered[chosen].parent
        ]
    if not meant:
        names = sorted({chosen.device for chosen in scope} or {chosen.device for chosen in offered})
        near = get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`topobus inventory CLASS` lists what there is"
        raise NotFoundError(
            f"no device {name!r}{' ' + _selection_text(selection) if _selection_text(selection) else ''}",
            next_step=hint,
        )
    if len(meant) > 1 and selection.node is None:
        places = ", ".join(f"{chosen.node} ({chosen.device_class})" for chosen in meant[:_SHOWN])
        raise UsageError(
            f"{len(meant)} devices are named {name}: on {places}{' …' if len(meant) > _SHOWN else ''}",
            next_step="choose one with --node NODE",
        )
    return meant


def _selection_text(selection: Selection) -> str:
    """Describe the filters of the selection."""
    words = [f"of class {selection.device_class}"] if selection.device_class is not None else []
    words += [f"on node {selection.node}"] if selection.node is not None else []
    words += [f"with {' and '.join(selection.where)}"] if selection.where else []
    return " ".join(words)


def _matches(device: Device | None, conditions: tuple[tuple[Condition, ...], ...]) -> bool:
    if not conditions:
        return True
    return device is not None and all(
        any(condition.holds(device) for condition in alternatives) for alternatives in conditions
    )


def _read(word: str) -> tuple[Condition, ...]:
    field, equals, value = word.partition("=")
    if not equals or not field or not value:
        raise UsageError(
            f"--where is {word!r}, wanted FIELD=VALUE",
            next_step="for instance --where driver=nvidia or --where 'model=*H100*'",
        )
    alternatives: list[Condition] = []
    fault = ""
    exact_values = [exact for exact in (_number(value), _BOOLEANS.get(value)) if exact is not None]
    for make in (
        partial(Condition, field=field, glob=value),
        *(partial(Condition, field=field, equals=exact) for exact in exact_values),
    ):
        try:
            alternatives.append(make())
        except ValueError as err:
            fault = fault or str(err)
    if not alternatives:
        raise UsageError(f"--where {word}: {fault}", next_step="docs/reference/pools.md lists the fields")
    return tuple(alternatives)


_BOOLEANS = {"true": True, "false": False}


def _number(value: str) -> int | None:
    return int(value) if value.isdigit() else None
