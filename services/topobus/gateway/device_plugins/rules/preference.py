"""Answers GetPreferredAllocation, never with an error: topology's choice when it is legal, else a
choice by name.

A device can be requested in two ways, by device plugin and by claim. The scheduler gives claims the
first free device of a slice, in order of names. Where a class is offered both ways, pods with
device plugin requests therefore get the last devices, and devices of claims that are allocated but
not yet prepared come after all others. So the two ways collide only on a node that is nearly full.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["fall_back", "is_legal", "plugin_choices"]


def is_legal(chosen: Sequence[str], available: Sequence[str], must_include: Sequence[str], size: int) -> bool:
    """Return whether a choice has the right size, what is required, and only available devices."""
    return (
        len(set(chosen)) == len(chosen) == min(size, len(set(available) | set(must_include)))
        and set(must_include) <= set(chosen)
        and set(chosen) <= set(available) | set(must_include)
    )


def fall_back(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    *,
    withheld: Collection[str] = (),
    is_from_end: bool = False,
) -> tuple[str, ...]:
    """Choose without topology: what must be included, then by name, with withheld devices last.

    Never more than `size` unless more must be included.

    >>> fall_back(["c", "a", "b"], ["b"], 2), fall_back(["c", "a", "b"], ["b"], 2, is_from_end=True)
    (('a', 'b'), ('b', 'c'))
    """
    kept = sorted(set(must_include))
    rest = sorted(set(available) - set(kept), reverse=is_from_end)
    rest.sort(key=lambda name: name in withheld)
    return tuple(sorted([*kept, *rest[: max(0, size - len(kept))]]))


def plugin_choices(
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    *,
    withheld: Collection[str] = (),
    is_from_end: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """List the sets from which another vendor's plugin is asked to choose. The next set is used
    only if the plugin has chosen a device that is not in the last one.

    The first set has all devices that are not withheld, while those are enough. For a single
    device, where claims are given devices as well, a second set has the last half by name. For
    several devices the plugin decides which of them belong together, whatever their names are.

    >>> plugin_choices(["a", "b", "c", "d", "e"], [], 1, withheld=["e"], is_from_end=True)
    (('a', 'b', 'c', 'd'), ('c', 'd'))
    """
    every = tuple(sorted({*available, *must_include}))
    free = tuple(name for name in every if name not in withheld or name in must_include)
    if len(free) < size:
        return (every,)
    further = free[len(free) // 2 :]
    return (free, further) if is_from_end and size == 1 and not must_include and len(further) < len(free) else (free,)
