"""Settings of the relay."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from topobus.process.config import ServiceSettings

__all__ = ["RelaySettings"]


class RelaySettings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the relay. `nats.url` is the node's own server, never the hub's."""

    check_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds between two checks that the hub still has what it acknowledged, while there is
    nothing to send. 10 s: each check is two small messages and their answers, a fifth of what an
    idle node may cost the hub. A hub that came back with an older store is brought up to date
    within two checks."""
    retry_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    """The longest pause between two tries to reach the hub while it is away. Each pause is
    random. 2 s: a try is answered by the node's own server and costs the hub nothing."""
    forget_after_s: Annotated[float, Meta(ge=0)] = 300.0
    """For how long a class's inventory may be absent from the node's server, without having been
    deleted there, before the hub's copy is deleted. 300 s: after a store was lost, each service
    writes its inventory again within seconds of its start, and a node's services may take minutes
    to start."""
