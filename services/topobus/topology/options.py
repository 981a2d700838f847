"""Publishes the node's alignment options, so that the controller and dry runs decide as this node would.

Flows in: settings. Flows out: one state of the catalogue. During a rolling update two instances may have different settings; the one that started last wins and
the other does not write again.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from topobus.contracts.catalogue import ALIGNMENT
from topobus.domain.errors import PeerUnavailable
from topobus.domain.view import NodeAlignment
from topobus.runtime.bus import AmbiguousWrite, Bus
from topobus.runtime.logging import get_logger
from topobus.runtime.state import ChangeKind

__all__ = ["publish_options"]

# Between two tries to write: nobody waits for it, and the controller's defaults are kubelet's.
_RETRY_S = 1.0


async def publish_options(bus: Bus, node_alignment: NodeAlignment) -> None:
    """Keep the options published, for ever: written at the start when others stand there, and again when they were lost."""
    alignment: NodeAlignment | None = None
    async with aclosing(bus.watch(ALIGNMENT, node=node_alignment.node)) as changes:
        async for change in changes:
            match change.kind:
                case ChangeKind.PUT:
                    # What another release wrote is written again, so that nobody takes it for the one that runs.
                    alignment = change.value if change.origin.release == bus.release else None
                case ChangeKind.RESET:
                    alignment = None
                case ChangeKind.DELETE | ChangeKind.SNAPSHOT_END:
                    alignment = None if change.kind is ChangeKind.DELETE else alignment
                    if alignment != node_alignment:
                        await _write(bus, node_alignment)
                        alignment = node_alignment


async def _write(bus: Bus, node_alignment: NodeAlignment) -> None:
    while True:
        try:
            await bus.put(ALIGNMENT, node_alignment, node=node_alignment.node)
        except (PeerUnavailable, AmbiguousWrite) as err:
            get_logger().warning("alignment.unpublished", error=str(err))
            await asyncio.sleep(_RETRY_S)
        else:
            get_logger().info("alignment.published", policy=node_alignment.options.policy.value, scope=node_alignment.options.scope.value)
            return
