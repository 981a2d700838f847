"""Reads claims by name from the stand-alone store.

`gateway.cluster` reads them from a cluster's API server. Either way a claim has the shape of
resource.k8s.io/v1. The caller compares the uid, because a claim of the same name may have replaced
the one that kubelet means.
"""

from __future__ import annotations

from typing import Protocol

from topobus.bus.bus import Bus
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.values.errors import ConfigError

__all__ = ["BusClaims", "ClaimReader", "NoClaims", "stored_claims", "without_claims"]


class ClaimReader(Protocol):
    """Reads claims from the stand-alone store or from a cluster's API server."""

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim. None: it does not exist.

        Errors: raises PeerUnavailable or ContractError, and ConfigError where no claims are read at
        all.
        """
        ...


class BusClaims:
    """Claims of the stand-alone store."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Read a claim from the bucket. A claim of classic DRA is converted to the shape of
        structured ones.

        Errors: raises ContractError for a classic claim with handles that Topobus did not write.
        """
        entry = await self._bus.get(OBJECT, kind="resourceclaim", namespace=namespace, name=name)
        return as_structured(entry.value) if entry else None


class NoClaims:
    """Reads no claims: on a node with a server of its own they are stored only at the hub."""

    async def read(self, namespace: str, name: str) -> ApiObject | None:
        """Refuse to read.

        Errors: raises ConfigError with the reason.
        """
        raise without_claims()


def without_claims() -> ConfigError:
    """Return the error for reading a claim on a node with a NATS server of its own."""
    return ConfigError(
        "no claim can be read on this node: its NATS server is its own (nats.provisioner is topology), where "
        "none are stored, "
        "and no Kubernetes API server is named (cluster.mode is off)",
        next_step="set TOPOBUS_GATEWAY__CLUSTER__MODE, or let the node's services use the hub's server "
        "(docs/how-to/choose-a-nats-shape.md)",
    )


def stored_claims(bus: Bus, nats: NatsSettings) -> ClaimReader:
    """Choose the reader of stand-alone claims: the central server's store, or none."""
    return NoClaims() if nats.is_nodes_own else BusClaims(bus)
