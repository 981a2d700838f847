"""Writes to the API server as this home does them: each bound to the version on which it was decided, and looked at again when nobody knows whether it took effect.

Flows in: patches from `core.gated`. Flows out: the object as stored, which the copy learns at once so that the next decision sees it; None when somebody else was
faster: the copy then has the present object. Silence is PeerUnavailable, after an attempt to see what became of the write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topobus.contracts.messages import ApiObject
from topobus.controller.cluster_metrics import ClusterMetrics
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.store.api import (
    CLAIMS,
    PODS,
    Api,
    Kind,
    Rejected,
)
from topobus.domain.errors import PeerUnavailable
from topobus.runtime.logging import get_logger

__all__ = ["ApiServerWriter"]


class ApiServerWriter:
    """Writes claims and pods."""

    def __init__(self, api: Api, world: ApiServerState, metrics: ClusterMetrics) -> None:
        self._api = api
        self._world = world
        self._metrics = metrics

    async def claim(self, key: Key, patch: Mapping[str, Any], *, part: str = "") -> ApiObject | None:
        """Write a claim; None when it is another by now."""
        return await self._write(CLAIMS, key, patch, part)

    async def pod(self, key: Key, patch: Mapping[str, Any], *, part: str = "") -> ApiObject | None:
        """Write a pod; None when it is another by now."""
        return await self._write(PODS, key, patch, part)

    async def refresh(self, kind: Kind, key: Key) -> ApiObject | None:
        """Read an object as it is now; None when it is gone.

        Errors: raises PeerUnavailable; ContractError when nobody can read it.
        """
        plain = await self._api.get(kind, *key)
        if plain is None:
            self._world.drop(kind.name, key)
            return None
        return self._learn(kind, key, await self._api.version_of(kind), plain)

    async def _write(self, kind: Kind, key: Key, patch: Mapping[str, Any], part: str) -> ApiObject | None:
        try:
            written = await self._api.patch(kind, *key, patch, part=part)
        except PeerUnavailable as err:
            self._count(kind, "unknown")
            get_logger().warning("write.ambiguous", kind=kind.name, namespace=key[0], name=key[1], error=str(err))
            # Neither done nor undone: what is there now is what the next decision begins with.
            await self.refresh(kind, key)
            raise
        if isinstance(written, Rejected):
            self._count(kind, "lost" if written.is_conflict else "refused")
            if not written.is_conflict:
                raise PeerUnavailable(
                    f"API server: {kind.name} {key[0]}/{key[1]}: {written.code} {written.message}",
                    next_step="check the controller's rights in the cluster (deploy/kubernetes/controller.yaml)",
                    code=written.code,
                )
            get_logger().debug("write.lost", kind=kind.name, namespace=key[0], name=key[1], why=written.message)
            await self.refresh(kind, key)
            return None
        self._count(kind, "done")
        return self._learn(kind, key, await self._api.version_of(kind), written)

    def _count(self, kind: Kind, outcome: str) -> None:
        self._metrics.writes.labels(kind.name, outcome).inc()

    def _learn(self, kind: Kind, key: Key, version: str, plain: dict[str, Any]) -> ApiObject | None:
        """Take in what the server shows; one that nobody can read is not "gone": who asked sets aside what it was about to do.

        Errors: raises ContractError.
        """
        self._world.put(kind.name, version, plain)
        return (self._world.claims if kind is CLAIMS else self._world.pods).get(key)
