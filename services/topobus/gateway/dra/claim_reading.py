"""Reads claims by name: from the stand-alone store in this module, from a cluster's API server in `gateway.cluster`.

Flows in: a claim's namespace and name. Flows out: the claim in the shape of resource.k8s.io/v1. The caller compares the uid, because a claim of the same name may
have replaced the one that kubelet means.
"""

from __future__ import annotations

from typing import Protocol

from topobus.contracts.catalogue import OBJECT
from topobus.contracts.messages import ApiObject
from topobus.kubernetes.api.classic_handles import as_structured
from topobus.runtime.bus import Bus

__all__ = ["BusClaims", "ClaimReader"]


class ClaimReader(Protocol):
    """Where claims are read: the stand-alone store, or a cluster's API server."""

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim; None when there is none.

        Errors: raises PeerUnavailable or ContractError.
        """
        ...


class BusClaims:
    """Claims of the stand-alone store."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim from the bucket; one of classic DRA in the shape of structured ones.

        Errors: raises ContractError for a classic claim whose handles are not ours to have written.
        """
        entry = await self._bus.get(OBJECT, kind="resourceclaim", namespace=namespace, name=name)
        return as_structured(entry.value) if entry else None
