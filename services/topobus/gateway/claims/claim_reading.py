"""Reads claims by name from the stand-alone store.

`gateway.cluster` reads them from a cluster's API server. Either way a claim has the shape of
resource.k8s.io/v1. The caller compares the uid, because a claim of the same name may have replaced
the one that kubelet means.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from topobus.bus.bus import Bus
from topobus.formats.kubernetes.classic.classic_handles import as_structured
from topobus.formats.messages.catalogue import OBJECT
from topobus.formats.messages.messages import ApiObject
from topobus.process.config import NatsSettings
from topobus.values.errors import ConfigError

__all__ = ["ReadClaim", "stored_claims", "without_claims"]

ReadClaim = Callable[[str, str], Awaitable[ApiObject | None]]
"""Reads a claim by namespace and name. None: it does not exist. Raises PeerUnavailable or
ContractError, and ConfigError where no claims are read at all."""


def without_claims() -> ConfigError:
    """Return the error for reading a claim on a node with a NATS server of its own."""
    return ConfigError(
        "no claim can be read on this node: its NATS server is its own (nats.provisioner is topology), where "
        "none are stored, "
        "and no Kubernetes API server is named (cluster.mode is off)",
        next_step="set TOPOBUS_GATEWAY__CLUSTER__MODE, or let the node's services use the hub's server "
        "(docs/how-to/choose-a-nats-shape.md)",
    )


def stored_claims(bus: Bus, nats: NatsSettings) -> ReadClaim:
    """Return the function that reads stand-alone claims from the central server's store. On a node
    with a server of its own they are stored only at the hub, and it raises ConfigError.

    A claim of classic DRA is converted to the shape of structured ones. With handles that Topobus
    did not write it is a ContractError.
    """

    async def read(namespace: str, name: str) -> ApiObject | None:
        if nats.is_nodes_own:
            raise without_claims()
        entry = await bus.get(OBJECT, kind="resourceclaim", namespace=namespace, name=name)
        return as_structured(entry.value) if entry else None

    return read
