"""Decides which of the claims that the controller says are written or deleted at the node's own server.

Flows in: the request, what the server has, whose claims are prepared. Flows out: what to write, what to delete, what stays. Each item names the version that it replaces:
a request that was stuck in a dead connection, and one of a controller that is behind, undo nothing newer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from topobus.contracts.node_claim_messages import ClaimsRequest, NodeClaim, place_of
from topobus.domain.ledger import Ledger
from topobus.domain.request import Owner, OwnerKind

__all__ = ["HeldClaim", "Steps", "objection_to", "prepared_claims", "steps_of"]


class HeldClaim(Struct, frozen=True, kw_only=True):
    """One claim that the node's server has."""

    revision: int
    """Of its key in the node's bucket."""
    uid: str
    version: str


class Steps(Struct, frozen=True, kw_only=True):
    """What is done for one request."""

    puts: tuple[NodeClaim, ...]
    drops: tuple[tuple[str, str], ...]
    """Namespaces and names."""
    kept: tuple[str, ...]
    """Places of claims that stay because they are prepared; sorted."""


def steps_of(request: ClaimsRequest, held: Mapping[str, HeldClaim], prepared: Collection[str]) -> Steps:
    """Choose what to write and what to delete.

    Shapes: held — by place; prepared — the owners' keys (`Owner.key`) of what is prepared on the node.
    Order:  as in the request.
    """
    puts = tuple(
        put.claim
        for put in request.puts
        for present in [held.get(place_of(put.claim.namespace, put.claim.name))]
        if (present.version if present is not None else "") == put.replaces and put.claim.version != put.replaces
    )
    going = [
        drop
        for drop in request.drops
        for present in [held.get(place_of(drop.namespace, drop.name))]
        if present and present.version == drop.version
    ]
    kept = {
        place_of(drop.namespace, drop.name)
        for drop in going
        if _owner(drop.namespace, drop.name, held[place_of(drop.namespace, drop.name)].uid).key in prepared
    }
    drops = tuple((drop.namespace, drop.name) for drop in going if place_of(drop.namespace, drop.name) not in kept)
    return Steps(puts=puts, drops=drops, kept=tuple(sorted(kept)))


def objection_to(claim: NodeClaim, node: str) -> str:
    """Say why a claim is none that this node may have; empty when it is one.

    The gateway reads a claim by its place and acts for its uid: what says another one of itself than its place would be prepared for somebody else.
    """
    metadata = claim.claim.metadata
    got = (claim.node, claim.claim.kind, metadata.get("namespace") or "default", metadata.get("name"), metadata.get("uid"))
    wanted = (node, "ResourceClaim", claim.namespace, claim.name, claim.uid)
    if got != wanted:
        return f"the claim says {got}, wanted {wanted}"
    return "" if claim.uid and claim.version else f"claim {place_of(claim.namespace, claim.name)} has no uid or no version"


def prepared_claims(ledger: Ledger | None) -> frozenset[str]:
    """Name the owners for whom something is prepared, as a node's ledger says it.

    >>> prepared_claims(None)
    frozenset()
    """
    return frozenset(key for key, allocation in ledger.allocations.items() if allocation.is_prepared) if ledger is not None else frozenset()


def _owner(namespace: str, name: str, uid: str) -> Owner:
    """Name a claim as the ledger knows it."""
    return Owner(kind=OwnerKind.CLAIM, namespace=namespace, name=name, uid=uid)
