"""The trial of one node for claims that are served together: the question to the search, the
outcomes that count, and the advice for claims that got nothing.

Both homes and dry runs use it. They decide how a search runs (at once, in a thread, or from a
cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from topobus.engine.allocation.suggestions import nearest
from topobus.engine.allocation.values import Allocated, Fault, NoFit, Outcome
from topobus.engine.claims.claim_admission import Wanted, objection_to_results
from topobus.engine.claims.objects import Claim
from topobus.engine.scheduling.aligned_allocation import AlignedClaims
from topobus.engine.scheduling.decisions import NodeMiss
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.resource import ClaimSpec
from topobus.values.errors import TopobusError
from topobus.values.outcome import Reason, Refusal
from topobus.values.request import PodRequest

__all__ = [
    "WantedClaim",
    "aligned_claims",
    "failed_node",
    "is_aligned",
    "nearest_miss",
    "refusal_of",
    "specs_of",
    "within_limits",
]

# Where alternatives are asked for, some nodes are better than others: this number of nodes that fit
# are compared.
_COMPARED = 16
# An error's own words, as far as a condition shows them.
_MAX_ERROR = 500


class WantedClaim(Protocol):
    """A claim that is to be allocated, alone or with others."""

    @property
    def claim(self) -> Claim:
        """The claim as stored."""
        ...

    @property
    def spec(self) -> ClaimSpec:
        """Its request."""
        ...

    @property
    def wishes(self) -> AlignmentRequest | None:
        """Its alignment wishes. None when it has none."""
        ...


def specs_of(claims: Sequence[WantedClaim]) -> list[Wanted]:
    """List the claims with their specs, as the state and admission want them."""
    return [(wanted.claim, wanted.spec) for wanted in claims]


def is_aligned(claims: Sequence[WantedClaim], pod: PodRequest | None) -> bool:
    """Say whether a claim, or the pod with its claims, wishes for alignment, so that places are
    searched one after another.
    """
    return pod is not None or any(wanted.wishes is not None for wanted in claims)


def aligned_claims(claims: Sequence[WantedClaim]) -> list[AlignedClaims]:
    """List the claims with the alignment that each wishes for."""
    return [AlignedClaims(wanted.claim, wanted.wishes) for wanted in claims]


def nodes_compared(claims: Sequence[WantedClaim]) -> int:
    """Return how many nodes that fit a cluster's pod are compared: only the first, unless a claim
    names alternatives.
    """
    return (
        _COMPARED
        if any(request.first_available for wanted in claims for request in wanted.spec.devices.requests)
        else 1
    )


def within_limits(node: str, claims: Sequence[WantedClaim], outcome: Outcome) -> Outcome:
    """Return the outcome of a search, or a Fault where its result would break a limit of the
    API.
    """
    if not isinstance(outcome, Allocated):
        return outcome
    return objection_to_results(node, specs_of(claims), outcome.results, steps=outcome.steps) or outcome


def nearest_miss(
    nodes: Sequence[str], outcomes: Sequence[Outcome], claims: Sequence[WantedClaim], pod: PodRequest | None
) -> tuple[tuple[Reason, ...], str]:
    """Name the nearest miss, where there is one, and the node on which to search for changes that
    would fit.

    Empty for claims that wish for alignment.
    """
    miss = nearest(nodes, outcomes)
    if miss is None:
        return (), ""
    node, reason = miss
    return (reason,), "" if is_aligned(claims, pod) else node


def failed_node(node: str, err: Exception) -> Fault:
    """Make the fault of a node whose search raised an unexpected error.

    The other nodes are tried.
    """
    text = str(err) if isinstance(err, TopobusError) else f"{type(err).__name__}: {err}"
    message = f"node {node}: its own description cannot be used: {text[:_MAX_ERROR]}"
    return Fault(Reason(code="node-failed", message=message, facts={"node": node}), 0, is_local=True)


def refusal_of(node: str, refusal: Refusal) -> NodeMiss:
    """Turn a node's refusal of the pod's own request into Filter's answer, with the node's name."""
    first = refusal.reasons[0]
    named = Reason(code=first.code, message=f"node {node}: {first.message}", facts=first.facts)
    return NodeMiss(node, NoFit((named, *refusal.reasons[1:]), 0))
