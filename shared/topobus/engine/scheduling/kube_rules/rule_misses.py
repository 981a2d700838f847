"""Which nodes, of those that rules keep a pod off, are the nearest misses.

Misses that end by themselves come before those that a person must resolve, and nodes with the same
reasons are reported as one. Nodes that lack devices come first, as in `explanations`. A cluster has
many nodes and few kinds of them: without the grouping, the taints of eight nodes filled a condition
before the node that lacked only a free port.
"""

from __future__ import annotations

from collections.abc import Sequence

from topobus.engine.allocation.explanations import SHOWN_NODES
from topobus.engine.allocation.values import NoFit
from topobus.engine.scheduling.decisions import NodeMiss, explain_misses
from topobus.engine.scheduling.kube_rules.placement_rules import PLACEMENT_CODES
from topobus.values.node_text import first_of
from topobus.values.outcome import Reason

__all__ = ["RULE_CODES", "explain_choice", "nearness"]

RULE_CODES = PLACEMENT_CODES | {
    "node-name",
    "node-tainted",
    "node-selector-label",
    "node-affinity",
    "volume-elsewhere",
    "volume-zone",
    "volume-unavailable",
    "unschedulable",
}
"""Codes of what keeps a pod off a node that is not searched for devices then."""

# Names of nodes with the same reasons, as far as a condition shows them.
_SHOWN_NAMES = 4


def nearness(reasons: Sequence[Reason]) -> tuple[int, int, int]:
    """Compute how near a miss is. Lower is nearer.

    Shapes: result — reasons that do not end by themselves when pods come or go, all reasons, and
            what these count: ports, pods, resources.
    """
    lasting = sum(reason.code not in PLACEMENT_CODES or reason.facts.get("permanent") is True for reason in reasons)
    counts = (reason.facts.get("hindrances", 1) for reason in reasons)
    return lasting, len(reasons), sum(count for count in counts if isinstance(count, int))


def explain_choice(misses: Sequence[NodeMiss]) -> tuple[str, tuple[Reason, ...]]:
    """Name a condition's reason and the reasons behind it.

    Order: misses of devices, the nearest first. Then misses by rules, the nearest first, of equals
            in the order of the nodes.
    """
    ruled = [
        (miss.node, miss.outcome.reasons) for miss in misses if _is_ruled_out(miss) and isinstance(miss.outcome, NoFit)
    ]
    others = [miss for miss in misses if not _is_ruled_out(miss)]
    if not ruled:
        return explain_misses(misses)
    nothing: tuple[str, tuple[Reason, ...]] = ("DoesNotFit", ())
    condition, reasons = explain_misses(others) if others else nothing
    if condition == "Invalid":
        return condition, reasons
    groups: dict[tuple[str, ...], list[tuple[str, Sequence[Reason]]]] = {}
    for node, why in sorted(ruled, key=lambda each: nearness(each[1])):
        groups.setdefault(tuple(_without_node(node, reason) for reason in why), []).append((node, why))
    uncounted = [reason for reason in reasons if reason.code != "more-nodes"]
    room = max(SHOWN_NODES - len(uncounted), 1)
    shown, hidden = list(groups.items())[:room], list(groups.values())[room:]
    counts = [reason.facts.get("count") for reason in reasons if reason.code == "more-nodes"] + [
        len(members) for members in hidden
    ]
    more = sum(count for count in counts if isinstance(count, int))
    uncounted += [_reason_of(texts, members) for texts, members in shown]
    if more:
        uncounted.append(Reason(code="more-nodes", message=f"and {more} more nodes", facts={"count": more}))
    return condition, tuple(uncounted)


def _is_ruled_out(miss: NodeMiss) -> bool:
    """Say whether rules alone keep a node out.

    An allocation on other nodes is reported separately.
    """
    return isinstance(miss.outcome, NoFit) and bool(miss.outcome.reasons) and miss.outcome.reasons[0].code in RULE_CODES


def _without_node(node: str, reason: Reason) -> str:
    return reason.message.removeprefix(f"node {node}: ")


def _reason_of(texts: tuple[str, ...], members: Sequence[tuple[str, Sequence[Reason]]]) -> Reason:
    """Merge nodes with the same reasons into one Reason, with the facts of the first."""
    names = [node for node, _ in members]
    first = members[0][1][0]
    named = f"node{'s' if len(names) > 1 else ''} {first_of(names, _SHOWN_NAMES)}"
    text, *others = texts
    rest = f" (and {'; '.join(others)})" if others else ""
    return Reason(
        code=first.code,
        message=f"{named}: {text}{rest}",
        facts={**first.facts, "nodes": tuple(names[:SHOWN_NODES]), "count": len(names)},
    )
