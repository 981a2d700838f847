"""Names and memory sizes of GPUs whose kernel driver does not publish them, from the table
`products.toml` beside this module.
"""

from __future__ import annotations

import tomllib
from importlib import resources

from msgspec import Struct

from topobus.values.machine import PciDevice

__all__ = ["Product", "ProductTable"]

_GIB = 1 << 30


class Product(Struct, frozen=True, kw_only=True):
    """An entry of the table, empty or 0 where the table has none."""

    name: str = ""
    memory_bytes: int = 0
    compute_dies: int = 0
    """Accelerator complex dies: as many partitions has an AMD card in CPX."""


class ProductTable:
    """The table, read once by each driver that uses it."""

    def __init__(self) -> None:
        text = resources.files("topobus.gpu").joinpath("products.toml").read_text(encoding="utf-8")
        self._rows = tomllib.loads(text)

    def product(self, function: PciDevice) -> Product:
        """Look a function up by vendor and device id."""
        row = self._rows.get(f"{function.vendor:04x}", {}).get(f"{function.device:04x}", {})
        return Product(
            name=row.get("name", ""),
            memory_bytes=row.get("memory_gib", 0) * _GIB,
            compute_dies=row.get("compute_dies", 0),
        )
