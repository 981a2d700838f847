"""Stand-alone claims on a node with a server of its own: how they stand there, how the controller says them, and what the node's relay notes at the hub.

Flows in: claims of the objects' bucket at the hub. Flows out: messages, and the version by which two copies of one claim are compared. Source: docs/adr/0030 (addendum), 0040.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from topobus.contracts.messages import ApiObject

__all__ = ["ClaimDrop", "ClaimPut", "ClaimsReply", "ClaimsRequest", "HeldClaims", "NodeClaim", "place_of", "version_of"]

_DIGEST_CHARACTERS = 16


class NodeClaim(Struct, frozen=True, kw_only=True):
    """One claim that is allocated on a node, as the node's own server keeps it."""

    node: str
    namespace: str
    name: str
    uid: str
    version: str
    """As `version_of` gives it."""
    claim: ApiObject
    """As it stands at the hub."""


class ClaimPut(Struct, frozen=True, kw_only=True):
    """A claim that the node is to have, in place of what the controller believes it has."""

    claim: NodeClaim
    replaces: str = ""
    """The version that the node has by its note; empty: none. Where it has another one nothing is written, so that an old request that comes late undoes nothing."""


class ClaimDrop(Struct, frozen=True, kw_only=True):
    """A claim that is no longer allocated on the node."""

    namespace: str
    name: str
    version: str
    """The version that the node has by its note; another one stays."""


class ClaimsRequest(Struct, frozen=True, kw_only=True):
    """What the controller says to a node's relay: these claims are allocated on your node, these are no more. Saying it again changes nothing."""

    puts: tuple[ClaimPut, ...] = ()
    drops: tuple[ClaimDrop, ...] = ()


class ClaimsReply(Struct, frozen=True, kw_only=True):
    """What the node has afterwards."""

    versions: dict[str, str] = {}
    """By place (`place_of`)."""
    kept: tuple[str, ...] = ()
    """Places of claims that were to go and stay, because they are prepared on the node."""
    refused: dict[str, str] = {}
    """Why claims were not taken that never will be as they are, by place; the others of the request were."""


class HeldClaims(Struct, frozen=True, kw_only=True):
    """The relay's note at the hub: which stand-alone claims the node's own server has. A node that wrote none takes none."""

    node: str
    versions: dict[str, str] = {}
    """By place (`place_of`)."""
    joined_at: str = ""
    """RFC 3339, UTC: when the relay found the hub last. So the note is another one after a cut, and what was put off meanwhile is said at once."""


def place_of(namespace: str, name: str) -> str:
    """Name a claim's place.

    >>> place_of("default", "fast")
    'default/fast'
    """
    return f"{namespace}/{name}"


def version_of(claim: ApiObject, revision: int) -> str:
    """Tell one version of a claim from every other: its revision at the hub, and a digest.

    A hub that was restored from an older copy gives its revisions a second time, to other content; the digest differs then. It is made of what Kubernetes calls an object,
    in one order, so that controllers of two releases say the same.

    >>> version_of(ApiObject(api_version="v1", kind="ResourceClaim", metadata={"name": "fast"}), 7)
    '7-b4cdecec1c27dcaf'
    """
    content = [claim.api_version, claim.kind, claim.metadata, claim.spec, claim.status]
    digest = hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()
    return f"{revision}-{digest[:_DIGEST_CHARACTERS]}"
