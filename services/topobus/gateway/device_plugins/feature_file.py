"""Keeps a file from which Node Feature Discovery labels this node by its devices.

The file is replaced in one step when a label changes. Without devices it is empty, and NFD's worker
removes the labels that it had set. The gateway itself does not write its Node, because the right to
patch one would extend to every node of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from topobus.devicekit.containers.cdi_files import write
from topobus.gateway.device_plugins.rules.node_labels import feature_file, node_labels
from topobus.gateway.node_state import NodeState
from topobus.process.logging import get_logger
from topobus.values.device import Inventory

__all__ = ["FeatureFile"]

_NAME = "topobus"


class FeatureFile:
    """The file in a folder of NFD."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _NAME
        self._written: bytes | None = None
        self._fault = ""

    async def follow(self, state: NodeState) -> None:
        """Keep it up to date until cancelled."""
        while True:
            ticket = state.changed.ticket()
            await self.update(state.inventories())
            await ticket.wait()

    async def update(self, inventories: Mapping[str, Inventory]) -> None:
        """Write it when a label has changed.

        A failure is logged once, and the next change is another attempt.
        """
        data = feature_file(node_labels(inventories))
        if data == self._written:
            return
        try:
            await asyncio.to_thread(write, self.path.parent, self.path.name, data)
        except OSError as err:
            if str(err) != self._fault:
                get_logger().warning("node-labels.unwritten", path=str(self.path), error=str(err))
            self._fault = str(err)
            return
        self._written, self._fault = data, ""
        get_logger().info("node-labels.written", path=str(self.path), labels=data.count(b"\n"))
