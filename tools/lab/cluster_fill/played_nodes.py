"""Plays the nodes' side of a fill in one process: `python -m lab.cluster_fill.played_nodes NATS_URL
KUBECONFIG COUNT CONTENT_FILE`.

CONTENT_FILE has the publications of a recorded machine's services. Each node is that of the fleet
benchmark on the bus (`lab.fleet.fleet_node`), and has a Node object and ResourceSlices at the API
server. Prints `ready` when all are there.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from lab.cluster_fill.node_records import class_object, node_object, slice_objects
from lab.fleet.fleet_node import FleetNode, NodeTemplate, node_template
from lab.leaves.node_content import NodeContent
from topobus.bus.bus import Bus
from topobus.kubernetes.access import AccessSettings
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.process.config import NatsSettings
from topobus.testing.apiserver import Object
from topobus.values.errors import PeerUnavailable

__all__ = ["CLASSES", "READY", "create", "open_client", "publish_nodes"]

READY = "ready"
CLASSES = frozenset({"gpu", "nic"})
"""The device classes of each node."""
# Nodes that start at the same time: as many requests as one client has under way at an API server.
_PARALLEL = 16


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


async def publish_nodes(bus: Bus, client: KubernetesClient, template: NodeTemplate, count: int) -> list[FleetNode]:
    """Start nodes: on the bus first, as slices of a node without inventory are ignored.

    Then the classes and the nodes' objects.
    """
    slots = asyncio.Semaphore(_PARALLEL)

    async def publish(node: FleetNode) -> None:
        async with slots:
            await node.start()
            stored = await create(client, "nodes", node_object(node))
            for each_slice in slice_objects(node, str(stored["metadata"]["uid"])):
                await create(client, "resourceslices", each_slice)

    for device_class in sorted(CLASSES):
        await create(client, "deviceclasses", class_object(device_class))
    nodes = [FleetNode(bus, template, index) for index in range(count)]
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(publish(node))
    return nodes


async def _play(url: str, kubeconfig: str, count: int, content: NodeContent) -> None:
    client = open_client(kubeconfig)
    try:
        async with Bus.session(NatsSettings(url=url), name="nodes") as bus:
            await publish_nodes(bus, client, node_template(content, CLASSES), count)
            print(READY, flush=True)
            await asyncio.Event().wait()
    finally:
        await client.close()


if __name__ == "__main__":
    recorded = msgspec.json.decode(Path(sys.argv[4]).read_bytes(), type=NodeContent)
    asyncio.run(_play(sys.argv[1], sys.argv[2], int(sys.argv[3]), recorded))
