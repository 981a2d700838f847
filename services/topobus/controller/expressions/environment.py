"""All functions that an expression over a device may use.

What Kubernetes' base environment has besides, `authorizer` and `image`, speaks of requests and pods: no device needs it.
"""

from __future__ import annotations

from topobus.controller.expressions.formats import FORMATS
from topobus.controller.expressions.kubernetes import KUBERNETES
from topobus.controller.expressions.lists import LISTS
from topobus.controller.expressions.network import NETWORK
from topobus.controller.expressions.registry import Functions
from topobus.controller.expressions.standard import STANDARD
from topobus.controller.expressions.texts import TEXTS

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
