"""Reads claims by name: from the stand-alone store in this module, or from what a node's own server has of it; from a cluster's API server in `gateway.cluster`.

Flows in: a claim's namespace and name. Flows out: the claim in the shape of resource.k8s.io/v1. The caller compares the uid, because a claim of the same name may
have replaced the one that kubelet means.
"""

from __future__ import annotations

from typing import Protocol

from topobus.contracts.catalogue import NODE_CLAIM, OBJECT
from topobus.contracts.messages import ApiObject
from topobus.kubernetes.api.classic_handles import as_structured
from topobus.runtime.bus import Bus
from topobus.runtime.config import NatsSettings

__all__ = ["NOT_YET", "BusClaims", "ClaimReader", "NodeServerClaims", "stored_claims"]

NOT_YET = ("claim-missing", "claim-replaced", "claim-unallocated")
"""The refusals that only say, where a reader may lag, that it has not what kubelet means yet."""


class ClaimReader(Protocol):
    """Where claims are read: the stand-alone store, what a node's own server has of it, or a cluster's API server."""

    @property
    def may_lag(self) -> bool:
        """Whether a claim that is allocated for its users may not be here yet."""
        ...

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim; None when there is none.

        Errors: raises PeerUnavailable or ContractError.
        """
        ...


class BusClaims:
    """Claims of the stand-alone store."""

    may_lag = False

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim from the bucket; one of classic DRA in the shape of structured ones.

        Errors: raises ContractError for a classic claim whose handles are not ours to have written.
        """
        entry = await self._bus.get(OBJECT, kind="resourceclaim", namespace=namespace, name=name)
        return as_structured(entry.value) if entry else None


class NodeServerClaims:
    """Claims of the stand-alone store that are allocated on this node, where the node has a server of its own: what its relay keeps there (docs/adr/0040)."""

    may_lag = True

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim from the node's bucket; None for one that is not there yet, or no more.

        Errors: raises ContractError for a classic claim whose handles are not ours to have written.
        """
        entry = await self._bus.get(NODE_CLAIM, node=self._node, namespace=namespace, name=name)
        return as_structured(entry.value.claim) if entry else None


def stored_claims(bus: Bus, node: str, nats: NatsSettings) -> ClaimReader:
    """Choose where a node's stand-alone claims are: at its own server, or at the one for everything."""
    return NodeServerClaims(bus, node) if nats.is_nodes_own else BusClaims(bus)
