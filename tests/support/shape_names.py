"""Names of shapes without the digest of their parts."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["full", "plain"]


def plain(name: str) -> str:
    """Leave out a shape's digest; any other name stays.

    >>> plain("shape-half-0-f19526"), plain("gpu-000")
    ('shape-half-0', 'gpu-000')
    """
    return re.sub(r"\b(shape-[a-z0-9-]+)-[0-9a-f]{6}\b", r"\1", name)


def full(names: Iterable[str], name: str) -> str:
    """Look up the name of a shape by the same name without a digest.

    >>> full(["shape-half-0-f19526", "shape-half-1-5d41e2"], "shape-half-1")
    'shape-half-1-5d41e2'
    """
    (named,) = (each for each in names if plain(each) == name)
    return named
