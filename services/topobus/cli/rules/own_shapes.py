"""Reads `--own-shapes`: the shapes that an operator adds, as the topology service's setting has them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from cyclopts import Parameter

from topobus.cli.exits import UsageError
from topobus.values.own_shapes import OwnShape, fault_of_own_shapes

__all__ = ["OwnShapes", "read_own_shapes"]

OwnShapes = Annotated[
    str,
    Parameter(
        help="Shapes that an operator adds, as JSON: the value of TOPOBUS_TOPOLOGY__OWN_SHAPES, such as "
        '\'[{"name": "trio", "parts": {"gpu": 2, "nic": 1}, "within": "numa"}]\'.'
    ),
]


def read_own_shapes(text: str) -> tuple[OwnShape, ...]:
    """Read the option's value.

    Errors: raises UsageError for what the setting refuses.

    >>> read_own_shapes('[{"name": "trio", "parts": {"gpu": 2, "nic": 1}, "within": "numa"}]')[0].parts
    {'gpu': 2, 'nic': 1}
    """
    own_shapes: tuple[OwnShape, ...] = ()
    try:
        own_shapes = msgspec.json.decode(text or "[]", type=tuple[OwnShape, ...])
        fault = fault_of_own_shapes(own_shapes)
    except msgspec.DecodeError as err:
        fault = str(err)
    if fault:
        raise UsageError(
            f"--own-shapes: {fault}",
            next_step='write \'[{"name": "trio", "parts": {"gpu": 2, "nic": 1}, "within": "numa"}]\'',
        )
    return own_shapes
