"""Where an object is stored, and the revision at which it was read."""

from __future__ import annotations

from typing import NamedTuple

from topobus.contracts.messages import ApiObject

__all__ = ["ObjectKey", "Stored"]


class ObjectKey(NamedTuple):
    """Where an object is stored."""

    kind: str
    namespace: str
    name: str


class Stored(NamedTuple):
    """An object with the revision it was read at."""

    revision: int
    value: ApiObject
