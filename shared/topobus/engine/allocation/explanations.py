"""Explains why no node can serve a claim: a fault in the objects, a search that exceeded its
budget, or what each node lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.engine.allocation.miss_reasons import lacking, summarize
from topobus.engine.allocation.values import (
    Allocated,
    Fault,
    GaveUp,
    Outcome,
)
from topobus.values.outcome import Reason

__all__ = ["SHOWN_NODES", "explain_nodes"]

_NO_MACHINE = "locality-unknown"
SHOWN_NODES = 8
"""A condition is for a person: this many nodes' reasons, then a count."""


def explain_nodes(nodes: Sequence[str], outcomes: Sequence[Outcome]) -> tuple[str, tuple[Reason, ...]]:
    """Name the condition and its reasons: a fault, a search that gave up, or what each node lacks.

    Order: the nearest miss first. Nodes without Topobus come last.
    """
    if not nodes:
        return "NoNode", (Reason(code="no-node", message="no node has published a machine or an inventory yet"),)
    reasons: list[Reason] = []
    has_given_up = False
    unread = 0
    for node, outcome in zip(nodes, outcomes, strict=False):
        if isinstance(outcome, Fault) and not outcome.is_local:
            return "Invalid", (outcome.reason,)
        if isinstance(outcome, GaveUp):
            has_given_up = True
            message = (
                f"node {node}: the search gave up after {outcome.steps} steps: neither a fit nor a refusal is known"
            )
            reasons.append(Reason(code="gave-up", message=message, facts={"node": node, "steps": outcome.steps}))
        elif isinstance(outcome, Fault):
            reasons.append(outcome.reason)
        elif not isinstance(outcome, Allocated) and not outcome.reasons:
            unread += 1  # known not to fit, without reasons: a brief search makes none
        elif not isinstance(outcome, Allocated):
            reasons.append(
                Reason(code=outcome.reasons[0].code, message=summarize(outcome.reasons), facts=outcome.reasons[0].facts)
            )
    # A node that runs no Topobus has published no machine. That is true, but never a reason that a
    # reader can remove by freeing something.
    reasons.sort(key=lambda reason: (reason.code == _NO_MACHINE, lacking([reason])))
    if len(reasons) + unread > SHOWN_NODES:
        more = len(reasons) + unread - len(reasons[:SHOWN_NODES])
        reasons = [
            *reasons[:SHOWN_NODES],
            Reason(code="more-nodes", message=f"and {more} more nodes", facts={"count": more}),
        ]
    return ("SearchGaveUp" if has_given_up else "DoesNotFit"), tuple(reasons)
