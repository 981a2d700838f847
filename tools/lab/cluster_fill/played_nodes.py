"""Plays the nodes' side of a fill in one process: `python -m lab.cluster_fill.played_nodes NATS_URL
KUBECONFIG COUNT RECORD`.

RECORD is a file with a NodeRecord as JSON. The nodes 0 to COUNT - 1 differ only by their names.
Each publishes machine and inventories on the bus, its Node object and ResourceSlices at the API
server, and answers PLACE and RELEASE with a ledger that it alone writes, by the rules of
`topobus.engine.ledger`: its answers are those of its topology service. Prints `ready` when all are
there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.cluster_fill.node_records import CLASSES, NodeRecord, class_object, node_name, node_object, slice_objects
from lab.played_ledger import PlayedLedger
from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.node_view import node_view
from topobus.formats.messages import catalogue
from topobus.formats.messages.codec import decode
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.process.config import NatsSettings
from topobus.testing.apiserver import Object
from topobus.values.errors import PeerUnavailable
from topobus.values.idset import CpuSet
from topobus.values.ledger import Ledger
from topobus.values.view import AlignmentOptions, NodeView

__all__ = ["READY", "PlayedNode", "create", "open_client", "publish_nodes"]

READY = "ready"
# Nodes that start at the same time: as many requests as one client has under way at an API server.
_PARALLEL = 16
_DRA = "resource.k8s.io/v1"


class PlayedNode:
    """The topology service of one node, and what its other services have published."""

    def __init__(self, bus: Bus, record: NodeRecord) -> None:
        self.record = record
        self._bus = bus
        self._played = PlayedLedger(bus, record.machine.node, self._view)

    @property
    def ledger(self) -> Ledger:
        """The node's present ledger."""
        return self._played.ledger

    async def start(self) -> None:
        """Publish everything, and answer from now on."""
        node = self.record.machine.node
        await self._bus.put(catalogue.MACHINE, self.record.machine, node=node)
        for inventory in self.record.inventories:
            await self._bus.put(catalogue.INVENTORY, inventory, node=node, device_class=inventory.device_class)
        await self._played.start()

    def _view(self) -> NodeView:
        inventories = {inventory.device_class: inventory for inventory in self.record.inventories}
        return node_view(self.record.machine, inventories, None, AlignmentOptions(), CpuSet())


def open_client(kubeconfig: str) -> KubernetesClient:
    """Open a plain client of the API server."""
    return KubernetesClient.open(
        AccessSettings(
            kubeconfig=kubeconfig, call_s=60.0, setting="bench cluster", next_step="none: it is the bench's own"
        )
    )


async def create(client: KubernetesClient, plural: str, api_object: Object) -> Object:
    """Create an object, and return it as it is stored.

    Errors: raises PeerUnavailable, even for a refusal.
    """
    path = object_path(
        str(api_object["apiVersion"]), plural, namespace=str(api_object["metadata"].get("namespace", ""))
    )
    made = await client.ask("POST", path, body=api_object)
    if isinstance(made, Rejected):
        raise PeerUnavailable(f"{plural} {api_object['metadata']['name']}: {made.code} {made.message}")
    return made


async def publish_nodes(
    bus: Bus, client: KubernetesClient, record: NodeRecord, names: Sequence[str]
) -> list[PlayedNode]:
    """Start nodes: on the bus first, as slices of a node without inventory are ignored.

    Then the classes and the nodes' objects.
    """
    slots = asyncio.Semaphore(_PARALLEL)

    async def publish(node: PlayedNode) -> None:
        async with slots:
            await node.start()
            stored = await create(client, "nodes", node_object(node.record))
            for each_slice in slice_objects(node.record, str(stored["metadata"]["uid"])):
                await create(client, "resourceslices", each_slice)

    for device_class in CLASSES:
        await create(client, "deviceclasses", class_object(device_class))
    nodes = [PlayedNode(bus, record.named(name)) for name in names]
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(publish(node))
    return nodes


async def _play(url: str, kubeconfig: str, count: int, record: bytes) -> None:
    client = open_client(kubeconfig)
    try:
        async with Bus.session(NatsSettings(url=url), name="nodes") as bus:
            read = decode(record, NodeRecord, where="record of a node")
            await publish_nodes(bus, client, read, [node_name(index) for index in range(count)])
            print(READY, flush=True)
            await asyncio.Event().wait()
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(_play(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]).read_bytes()))
