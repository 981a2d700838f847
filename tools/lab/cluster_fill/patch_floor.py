"""The floor of a fill: bare status patches of claims by a plain client, as many under way as a
controller has.

The seconds that they take are the floor under what any controller can do with this API server on
this machine: one that writes three times for each claim serves at most a third as many claims a
second.
"""

from __future__ import annotations

import asyncio
import time

from lab.cluster_fill.played_nodes import create
from topobus.kubernetes.answers import Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.values.errors import PeerUnavailable

__all__ = ["patch_statuses"]

_NAMESPACE = "floor"
_DRA = "resource.k8s.io/v1"
# A driver without a controller, so that these claims concern none.
_DRIVER = "floor.example.com"


async def patch_statuses(client: KubernetesClient, count: int, parallel: int) -> float:
    """Create claims, patch the status of each once, and delete them.

    Returns the seconds that the patches took.

    Errors: raises PeerUnavailable.
    """
    slots = asyncio.Semaphore(parallel)
    names = [f"floor-{number:06d}" for number in range(count)]

    async def make(name: str) -> None:
        async with slots:
            exactly = {"deviceClassName": _DRIVER, "allocationMode": "ExactCount", "count": 1}
            spec = {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}
            metadata = {"name": name, "namespace": _NAMESPACE}
            await create(
                client,
                "resourceclaims",
                {"apiVersion": _DRA, "kind": "ResourceClaim", "metadata": metadata, "spec": spec},
            )

    async def patch(name: str) -> None:
        async with slots:
            results = [{"request": "r", "driver": _DRIVER, "pool": "p", "device": name}]
            await _ask(client, "PATCH", name, "status", {"status": {"allocation": {"devices": {"results": results}}}})

    async def delete(name: str) -> None:
        async with slots:
            await _ask(client, "DELETE", name, "", None)

    await asyncio.gather(*(make(name) for name in names))
    began_s = time.monotonic()
    await asyncio.gather(*(patch(name) for name in names))
    spent_s = time.monotonic() - began_s
    await asyncio.gather(*(delete(name) for name in names))
    return spent_s


async def _ask(client: KubernetesClient, method: str, name: str, part: str, body: object) -> None:
    answer = await client.ask(
        method, object_path(_DRA, "resourceclaims", namespace=_NAMESPACE, name=name, part=part), body=body
    )
    if isinstance(answer, Rejected):
        raise PeerUnavailable(f"{method} {name}: {answer.code} {answer.message}")
