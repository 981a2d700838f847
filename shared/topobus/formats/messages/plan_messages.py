"""The messages of a plan: find a node for a pod and place it there."""

from __future__ import annotations

from msgspec import Struct

from topobus.formats.messages.messages import PlaceReply
from topobus.values.outcome import Placement, Refusal
from topobus.values.request import PodRequest

__all__ = ["NodeAnswer", "PlanReply", "PlanRequest"]


class PlanRequest(Struct, frozen=True, kw_only=True):
    """Find a node for a pod and place it there."""

    op_id: str
    pod: PodRequest
    node: str = ""
    """Only this node; empty: any."""
    is_dry_run: bool = False


class NodeAnswer(Struct, frozen=True, kw_only=True):
    """The answer of one node."""

    node: str
    result: Placement | Refusal
    decision_id: str = ""
    """The decision that has this answer; empty where no node was asked."""


class PlanReply(Struct, frozen=True, kw_only=True):
    """The chosen node's answer, and the answers of all nodes that were asked, in the order of
    asking.
    """

    chosen: PlaceReply | None = None
    answers: tuple[NodeAnswer, ...] = ()
    silent_nodes: tuple[str, ...] = ()
    """Nodes that did not answer in time: unknown, not refused."""
    retry_after_s: float = 0.0
    """Above 0: the controller has too many earlier plans and has asked no node; ask again in so
    many seconds."""
