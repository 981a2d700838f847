"""Says in one sentence that a virtual environment is not what the project wants, where a test would
else fail obscurely: without a driver, or in the middle of an import.
"""

from __future__ import annotations

import importlib.util
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

__all__ = ["why_not_set_up"]

_DRIVERS = "topobus.drivers"
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@cache
def why_not_set_up(installed: frozenset[str] | None = None, *, package: str = "pyroute2") -> str:
    """Say what the environment lacks and what mends it; empty when nothing.

    Shapes: installed — names of the drivers' entry points; None: those of this environment.
    """
    wanted = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"][_DRIVERS]
    there = {line.name for line in metadata.entry_points(group=_DRIVERS)} if installed is None else installed
    missing = [f"driver {name}" for name in wanted if name not in there]
    if importlib.util.find_spec(package) is None:
        missing.append(f"package {package}")
    return (
        f"this virtual environment lacks {', '.join(missing)}: it was made before they were; run `make setup`"
        if missing
        else ""
    )
