"""What a fleet needs: memory, processor, disk, messages, and the shape of NATS, from figures that
were measured with DGX nodes.

Pure. In: how many nodes, devices of one, claims an hour. Out: one figure for each need, with the
page that has its measurement, and whether it lies beyond what was measured. The figures are those
of the pages; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from topobus.bus.server_config.streams import total_bytes

__all__ = ["FleetSize", "Need", "size_fleet"]

MEASURED_DEVICES = 242
"""Of the measured node: 8 GPUs, 8 NICs, 2 FPGAs, 224 CPUs. What grows with a node's values is scaled by its devices."""

_FLEETS, _REST = "docs/explanation/large-fleets.md", "docs/explanation/at-rest.md"
_SHAPES = "docs/how-to/choose-a-nats-shape.md"

# Nodes, and MiB, percent of a core or seconds. A hub's memory is that of a start on its store, which is the most.
_HUB_MIB = ((1, 57), (100, 139), (300, 283), (1000, 722))
_HUB_PERCENT = ((1, 0.3), (100, 0.4), (300, 0.8), (1000, 1.6))
_CONTROLLER_MIB = ((1, 47), (1000, 427), (5000, 1730))
_CONTROLLER_START_S = ((1, 1.2), (1000, 11), (5000, 49))
# Of the hub's memory, what does not grow with a node's values: itself, and a link.
_HUB_ALONE_MIB, _LINK_MIB, _COMPRESSION_MIB, _COMPRESSED_LINKS = 20, 0.125, 0.5, 25
_NODE_MIB, _NODE_PERCENT, _NODES_SERVER_MIB, _NODES_SERVER_PERCENT = 277, 0.99, 50, 0.3
# The bounds of the catalogue, which a smaller `nats.store_mib` would shrink.
_CATALOGUE_MIB = total_bytes() >> 20
# For each node: of `nats.store_mib`, its first messages, and messages a second at rest.
_STORE_MIB, _FIRST_MESSAGES, _MESSAGES_AT_REST = 10, 250, 14
# Of one claim: three confirmed writes, an ask, an event.
_MESSAGES_OF_A_CLAIM, _CLAIM_MS, _CLAIMS_A_SECOND = 5, 1.7, 527
_CENTRAL_NODES, _REGION_NODES = 10, 5000


class Need(Struct, frozen=True, kw_only=True):
    """One need of one part of the fleet."""

    part: str
    what: str
    value: float
    unit: str
    source: str
    is_extrapolated: bool = False


class FleetSize(Struct, frozen=True, kw_only=True):
    """What the fleet needs."""

    nodes: int
    devices: int
    """Of one node."""
    claims_per_hour: float
    shape: str
    """A heading of docs/how-to/choose-a-nats-shape.md."""
    regions: int
    """Hubs with controllers of their own; a region's needs are those that are listed."""
    needs: tuple[Need, ...]


def size_fleet(nodes: int, devices: int, claims_per_hour: float = 0.0) -> FleetSize:
    """Size a fleet of equal nodes.

    Shapes: nodes, devices — at least 1. The needs are those of one region where the fleet has
    several.
    Errors: raises nothing; what was not measured is marked.
    >>> size = size_fleet(1000, 242)
    >>> size.shape, [need.value for need in size.needs if (need.part, need.what) == ("hub", "memory")]
    ('leaf', [722.0])
    """
    scale = devices / MEASURED_DEVICES
    regions = max(1, math.ceil(nodes * scale / _REGION_NODES))
    here, rate, is_leaf = math.ceil(nodes / regions), claims_per_hour / regions / 3600, nodes > _CENTRAL_NODES
    is_larger = scale > 1
    hub = "hub" if is_leaf else "server"
    at_hub = is_larger or (here > _HUB_MIB[-1][0] if is_leaf else here > 1)
    at_controller = is_larger or here > _CONTROLLER_MIB[-1][0]
    links_mib = _HUB_ALONE_MIB + _LINK_MIB * here
    hub_mib = links_mib + (_at(_HUB_MIB, here) - links_mib) * scale
    messages = _MESSAGES_OF_A_CLAIM * rate + (0 if is_leaf else _MESSAGES_AT_REST * here)
    rows = [
        ("node", "memory", _NODE_MIB + is_leaf * _NODES_SERVER_MIB, "MiB", _SHAPES if is_leaf else _REST, is_larger),
        ("node", "processor", _NODE_PERCENT + is_leaf * _NODES_SERVER_PERCENT, "% of a core", _REST, is_larger),
        (hub, "memory", hub_mib, "MiB", _FLEETS, at_hub),
        (hub, "… for compressed links", _COMPRESSION_MIB * here, "MiB", _FLEETS, here > _COMPRESSED_LINKS),
        (hub, "processor at rest", _at(_HUB_PERCENT, here), "% of a core", _FLEETS, at_hub),
        (hub, "disk (nats.store_mib)", max(_CATALOGUE_MIB, _STORE_MIB * here * scale), "MiB", _FLEETS, at_hub),
        (hub, "writes when all come", _FIRST_MESSAGES * here * scale, "", _FLEETS, at_hub),
        (hub, "messages", messages, "a second", _FLEETS if is_leaf else _REST, at_hub or rate > _CLAIMS_A_SECOND),
        ("controller", "memory", _at(_CONTROLLER_MIB, here * scale), "MiB", _FLEETS, at_controller),
        ("controller", "start", _at(_CONTROLLER_START_S, here * scale), "s", _FLEETS, at_controller),
        ("controller", "processor", rate * _CLAIM_MS / 10, "% of a core", _FLEETS, rate > _CLAIMS_A_SECOND),
    ]
    return FleetSize(
        nodes=nodes,
        devices=devices,
        claims_per_hour=claims_per_hour,
        shape="leaf" if is_leaf else "central",
        regions=regions,
        needs=tuple(
            Need(part=part, what=what, value=round(value, 2), unit=unit, source=source, is_extrapolated=is_beyond)
            for part, what, value, unit, source, is_beyond in rows
            if is_leaf or "compressed" not in what
        ),
    )


def _at(points: Sequence[tuple[float, float]], place: float) -> float:
    """Read a measured line: straight between its points, and on from the last two; before the first
    point the first value.
    """
    place = max(place, points[0][0])
    after = next((index for index in range(1, len(points)) if place <= points[index][0]), len(points) - 1)
    (low, at_low), (high, at_high) = points[after - 1], points[after]
    return at_low + (at_high - at_low) * (place - low) / (high - low)
