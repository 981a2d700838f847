"""The process that answers for all nodes of a fleet: `python -m lab.fleet.player URL NODES
CONTENT_FILE CLASS,CLASS`.

CONTENT_FILE has the publications of a recorded machine's services. It prints a line for each
hundred nodes that have started, and `ready` after the last. Then it answers until it is ended. It
shares the machine with the controller that is measured, so its own processor time is part of the
figures.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import msgspec

from lab.fleet.fleet_node import FleetNode, node_template
from lab.leaves.node_content import NodeContent
from topobus.bus.bus import Bus
from topobus.process.config import NatsSettings

__all__ = ["READY", "main"]

READY = "ready"
_AT_ONCE = 100


async def main(url: str, nodes: int, content: NodeContent, classes: frozenset[str]) -> None:
    """Start all nodes, a hundred at a time, and answer until cancelled."""
    template = node_template(content, classes)
    async with Bus.session(NatsSettings(url=url), name="fleet") as bus:
        fleet = [FleetNode(bus, template, index) for index in range(nodes)]
        for start in range(0, nodes, _AT_ONCE):
            await asyncio.gather(*(node.start() for node in fleet[start : start + _AT_ONCE]))
            print(min(start + _AT_ONCE, nodes), flush=True)
        # Its own garbage collections would pause all nodes at once, which happens in no fleet.
        gc.freeze()
        print(READY, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    content = msgspec.json.decode(Path(sys.argv[3]).read_bytes(), type=NodeContent)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), content, frozenset(sys.argv[4].split(","))))
