"""Registers all functions that an expression over a device may use.

Kubernetes' base environment also has `authorizer` and `image`. They concern requests and pods, and
a device expression has no use for them.
"""

from __future__ import annotations

from topobus.engine.cel.functions.formats import FORMATS
from topobus.engine.cel.functions.kubernetes import KUBERNETES
from topobus.engine.cel.functions.lists import LISTS
from topobus.engine.cel.functions.network import NETWORK
from topobus.engine.cel.functions.standard import STANDARD
from topobus.engine.cel.functions.texts import TEXTS
from topobus.engine.cel.registry import Functions

__all__ = ["ENVIRONMENT", "LIBRARIES"]

LIBRARIES = {
    "standard": STANDARD,
    "texts": TEXTS,
    "lists": LISTS,
    "quantities, versions, patterns, sets, attributes": KUBERNETES,
    "addresses, networks, URLs": NETWORK,
    "formats": FORMATS,
}
ENVIRONMENT = Functions(*LIBRARIES.values())
