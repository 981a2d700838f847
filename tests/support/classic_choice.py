"""The choice of the built-in classic driver, asked for selectors and counts alone."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from topobus.controller.classic.rules.device_choice import (
    LONGEST_EXPRESSION,
    choose,
    structured_claim,
    structured_class,
)
from topobus.engine.allocation.pools import Pool
from topobus.engine.allocation.values import AllocationInput, ClaimToAllocate, Mode, Node, Usage
from topobus.engine.cel.selector import CelCompiler
from topobus.formats.kubernetes.classic.classic_parameters import DeviceSelector
from topobus.values.outcome import Refusal

__all__ = ["CLASSIC_COMPILER", "Wanted", "choose_on"]

CLASSIC_COMPILER = CelCompiler(LONGEST_EXPRESSION)


class Wanted(Struct, frozen=True):
    """What one claim wants."""

    count: int
    of_class: DeviceSelector = DeviceSelector()
    of_claim: DeviceSelector = DeviceSelector()


def choose_on(
    node: Node, device_class: str, wanted: Sequence[Wanted], pools: tuple[Pool, ...], usage: Usage | None = None
) -> tuple[tuple[str, ...], ...] | Refusal:
    """Choose for claims of a ResourceClass each."""
    claims = tuple(
        ClaimToAllocate(f"default/c{number}", structured_claim(f"class-{number}", asked.count, asked.of_claim))
        for number, asked in enumerate(wanted)
    )
    classes = {f"class-{number}": structured_class(device_class, asked.of_class) for number, asked in enumerate(wanted)}
    given = AllocationInput(
        node=node, claims=claims, classes={}, pools=pools, usage=usage or Usage(), mode=Mode.CORRECTED
    )
    return choose(given, device_class, classes, CLASSIC_COMPILER)
