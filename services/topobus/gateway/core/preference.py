"""GetPreferredAllocation without an error: the topology service's choice when it is a legal one, else the first by name."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fall_back", "is_legal"]


def is_legal(chosen: Sequence[str], available: Sequence[str], must_include: Sequence[str], size: int) -> bool:
    """Say whether a choice has the right size, keeps what must be kept, and takes only what there is."""
    return (
        len(set(chosen)) == len(chosen) == min(size, len(set(available) | set(must_include)))
        and set(must_include) <= set(chosen)
        and set(chosen) <= set(available) | set(must_include)
    )


def fall_back(available: Sequence[str], must_include: Sequence[str], size: int) -> tuple[str, ...]:
    """Choose without help: what must be included, then by name. Never more than `size` unless more must be included.

    >>> fall_back(["c", "a", "b"], ["b"], 2)
    ('a', 'b')
    """
    kept = sorted(set(must_include))
    rest = sorted(set(available) - set(kept))
    return tuple(sorted([*kept, *rest[: max(0, size - len(kept))]]))
