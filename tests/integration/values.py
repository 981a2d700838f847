"""Small messages that the bus tests send."""

from __future__ import annotations

import random

from topobus.formats.messages.messages import HealthEvent, ReleaseReply, ReleaseRequest
from topobus.values.device import Inventory
from topobus.values.health import DeviceHealth
from topobus.values.request import Owner, OwnerKind

OWNER = Owner(kind=OwnerKind.POD, name="trainer", uid="u1")

# A text of a message ends at 64 KiB (topobus.formats.messages.bounds).
_WARNING_BYTES = 60_000


def inventory(generation: int, *, node: str = "n1", device_class: str = "gpu", padding_bytes: int = 0) -> Inventory:
    """Make the inventory of a node; `padding_bytes` makes it large, with text that is half as large
    compressed.
    """
    padding = random.Random(0).randbytes(padding_bytes // 2).hex()
    warnings = tuple(padding[start : start + _WARNING_BYTES] for start in range(0, len(padding), _WARNING_BYTES))
    return Inventory(node=node, device_class=device_class, generation=generation, warnings=warnings)


def health(generation: int, device: str = "gpu-0") -> HealthEvent:
    """Make a health event of one device of node n1."""
    return HealthEvent(
        node="n1",
        device_class="gpu",
        device=device,
        health=DeviceHealth(),
        generation=generation,
        time="2026-01-01T00:00:00Z",
    )


def release(op_id: str = "op-1") -> ReleaseRequest:
    """Make a small ask."""
    return ReleaseRequest(op_id=op_id, owner=OWNER)


def released(sequence: int = 1) -> ReleaseReply:
    """Make its answer."""
    return ReleaseReply(ledger_sequence=sequence)
