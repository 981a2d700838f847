"""The decisions of scheduling a pod with claims, by the extension points of kube-scheduler's
dynamic-resources plugin.

    PreFilter    which claims the pod has, which of them are allocated, which must be allocated,
                 and whether the pod can be scheduled at all
    Filter       one node: whether the allocated claims are usable there and the others can be
                 allocated there together
    PostFilter   no node fits: which allocation to deallocate, so that another node becomes possible
    PreScore, Score   which of the nodes that fit is best

The values are frozen and have reasons. `claims.reservations` makes the next versions of objects.
The caller passes in the search for devices and decides where it runs. No clock and no randomness:
where upstream chooses at random, the first by name is chosen.
Source: pkg/scheduler/framework/plugins/dynamicresources, 1.36;
docs/knowledge/dynamic-resource-allocation.md#scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from topobus.engine.allocation.explanations import explain_nodes
from topobus.engine.allocation.node_selectors import selector_matches
from topobus.engine.allocation.values import (
    Allocated,
    Fault,
    Node,
    NoFit,
    Outcome,
)
from topobus.engine.claims.lifecycle import devices_of
from topobus.engine.claims.objects import Claim, Pod
from topobus.engine.claims.reservations import (
    MAX_CONSUMERS,
    Consumer,
    PodRef,
    full_reason,
    is_made_for,
    mode_of,
)
from topobus.engine.scheduling.aligned_allocation import read_alignment_request
from topobus.engine.shapes.shape_parts import Parts, without_shapes
from topobus.formats.kubernetes.alignment_request import AlignmentRequest
from topobus.formats.kubernetes.resource import (
    AllocationResult,
    ClaimSpec,
)
from topobus.values.dra_names import class_of_device
from topobus.values.errors import ContractError
from topobus.values.outcome import Fact, Reason

__all__ = [
    "Blocked",
    "NodeFit",
    "NodeMiss",
    "PodClaim",
    "PodPlan",
    "TakeBack",
    "enough_nodes",
    "explain_misses",
    "filter_node",
    "filter_outcome",
    "post_filter",
    "pre_filter",
    "static_miss",
]

# Upstream stops looking when this number of nodes fit (schedule_one.go, minFeasibleNodesToFind and
# minFeasibleNodesPercentageToFind).
_LEAST_NODES = 100
_LEAST_PERCENT = 5


@dataclass(frozen=True)
class PodClaim:
    """A claim of a pod as scheduling sees it."""

    entry: str
    """The name under which the pod's containers know it."""
    claim: Claim
    """Of which spec, status and consumers can be read."""
    wishes: AlignmentRequest | None = None

    @property
    def name(self) -> str:
        """The claim's name."""
        return self.claim.metadata.name

    @property
    def spec(self) -> ClaimSpec:
        """What the claim asks for."""
        return self.claim.spec

    @property
    def allocation(self) -> AllocationResult | None:
        """The claim's present allocation."""
        return self.claim.allocation

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """The consumers that have reserved the claim."""
        return self.claim.consumers


@dataclass(frozen=True)
class PodPlan:
    """The result of PreFilter: the pod's claims in the order of its spec, each one once."""

    pod: PodRef
    claims: tuple[PodClaim, ...]

    @property
    def pending(self) -> tuple[PodClaim, ...]:
        """The claims to allocate, together, on the node chosen."""
        return tuple(claim for claim in self.claims if claim.allocation is None)

    @property
    def allocated(self) -> tuple[PodClaim, ...]:
        """The claims that have their devices."""
        return tuple(claim for claim in self.claims if claim.allocation is not None)

    @property
    def is_reserved(self) -> bool:
        """Say whether all claims are allocated and reserved for the pod."""
        return all(
            claim.allocation is not None and any(user.uid == self.pod.uid for user in claim.consumers)
            for claim in self.claims
        )


@dataclass(frozen=True)
class Blocked:
    """The pod cannot be scheduled on any node before its claims change, or another holder releases
    them.
    """

    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class NodeFit:
    """The pod can run here, with the allocation that each pending claim would get.

    Order: that of `PodPlan.pending`.
    """

    node: str
    results: tuple[AllocationResult, ...] = ()
    steps: int = 0

    def devices(self, parts: Parts) -> dict[str, tuple[str, ...]]:
        """List the devices that the node's ledger is to hold for the claims, by class.

        Shapes: parts — of the shapes that the node has.
        """
        names: dict[str, list[str]] = {}
        for result in self.results:
            for device in devices_of(without_shapes(result, parts), self.node):
                names.setdefault(class_of_device(device.driver, device.device) or "", []).append(device.device)
        return {device_class: tuple(sorted(names[device_class])) for device_class in sorted(names)}


@dataclass(frozen=True)
class NodeMiss:
    """The pod cannot run here."""

    node: str
    outcome: Outcome
    unavailable: frozenset[str] = frozenset()
    """Claims that are allocated elsewhere: what PostFilter may take back."""

    @property
    def is_everywhere(self) -> bool:
        """Say whether no other node needs to be tried, because the request itself is wrong."""
        return isinstance(self.outcome, Fault) and not self.outcome.is_local


@dataclass(frozen=True)
class TakeBack:
    """PostFilter's answer: deallocate this claim, and try again."""

    claim: PodClaim
    why: str


def pre_filter(
    pod: Pod,
    find: Callable[[str], Claim | None],
    *,
    has_own_notes: bool = True,
) -> PodPlan | Blocked:
    """Gather the claims of a pod and decide whether nodes may be filtered for it.

    Shapes: find — the claim of this name in the pod's namespace; has_own_notes — True where an
            attempt in a claim's annotations is the work of another worker, and the claim may have a
            mode. It is False in a cluster, where an attempt only notes the pod that we allocate the
            claim for, and an API server has no modes.
    Order: claims as the pod lists them. All problems are reported, claim by claim.
    Errors: raises ContractError for a pod that cannot be read.
    """
    who = pod.ref
    reasons: list[Reason] = []
    claims: dict[str, PodClaim] = {}
    for use in pod.uses:
        if not use.claim:
            message = (
                f"{who}: resourceClaims {use.entry}: its claim is not made yet from ResourceClaimTemplate "
                f"{who.namespace}/{use.template}"
            )
            reasons.append(
                Reason(code="claim-not-made", message=message, facts={"entry": use.entry, "template": use.template})
            )
            continue
        claim = find(use.claim)
        if claim is None:
            message = f"{who}: resourceClaims {use.entry}: there is no ResourceClaim {who.namespace}/{use.claim}"
            reasons.append(
                Reason(code="claim-missing", message=message, facts={"entry": use.entry, "claim": use.claim})
            )
            continue
        if use.claim in claims:
            continue  # two entries may name one claim
        try:
            pod_claim = _read(use.entry, claim)
            if has_own_notes:
                mode_of(claim.object)  # refuses a mode that does not exist
            problem = _problem(who, pod_claim, is_generated=use.is_generated, has_own_notes=has_own_notes)
        except ContractError as err:
            reasons.append(Reason(code="malformed", message=err.message, facts={"claim": use.claim}))
            continue
        if problem is not None:
            reasons.append(problem)
        claims[use.claim] = pod_claim
    if reasons:
        return Blocked(tuple(reasons))
    return PodPlan(who, tuple(claims.values()))


def static_miss(plan: PodPlan, node: Node, *, refused: Reason | None) -> NodeMiss | None:
    """Do the part of Filter that needs no search: check that the allocated claims are usable on the
    node.

    None when a search is worthwhile.

    Shapes: refused — why this node must not be tried now (it refused the pod a moment ago); None:
            it may be tried.
    """
    away = [pod_claim for pod_claim in plan.allocated if not _is_usable(pod_claim, node)]
    if away:
        reasons = tuple(
            Reason(
                code="claim-elsewhere",
                message=f"node {node.name}: {pod_claim.claim.shown} is allocated for {_where(pod_claim)}",
                facts={"node": node.name, "claim": pod_claim.name},
            )
            for pod_claim in away
        )
        return NodeMiss(node.name, NoFit(reasons, 0), frozenset(pod_claim.name for pod_claim in away))
    return NodeMiss(node.name, NoFit((refused,), 0)) if refused is not None else None


def filter_outcome(plan: PodPlan, node: str, outcome: Outcome) -> NodeFit | NodeMiss:
    """Convert the search's outcome on a node to Filter's answer.

    Errors: raises ValueError when the number of results is not that of the pending claims.
    """
    if not isinstance(outcome, Allocated):
        return NodeMiss(node, outcome)
    if len(outcome.results) != len(plan.pending):
        raise ValueError(f"{plan.pod}: {len(outcome.results)} results for {len(plan.pending)} claims")
    return NodeFit(node, outcome.results, outcome.steps)


def filter_node(
    plan: PodPlan, node: Node, search: Callable[[Node, tuple[PodClaim, ...]], Outcome]
) -> NodeFit | NodeMiss:
    """Say whether the pod can run on a node: its allocated claims are usable there and the others
    can be allocated there together.

    Shapes: search — finds devices for these claims on this node, as `search.allocate` does. It is
            not called when nothing is pending.
    """
    missed = static_miss(plan, node, refused=None)
    if missed is not None:
        return missed
    return filter_outcome(plan, node.name, search(node, plan.pending)) if plan.pending else NodeFit(node.name)


def enough_nodes(nodes: int) -> int:
    """Compute how many nodes that fit are enough to choose among, as kube-scheduler does: all up to
    100, then a percentage that falls to 5 % as nodes grow, and never fewer than 100.

    >>> enough_nodes(8), enough_nodes(1000), enough_nodes(5000)
    (8, 420, 500)
    """
    if nodes <= _LEAST_NODES:
        return nodes
    percent = max(50 - nodes // 125, _LEAST_PERCENT)
    return max(nodes * percent // 100, _LEAST_NODES)


def post_filter(plan: PodPlan, misses: Sequence[NodeMiss]) -> TakeBack | Blocked:
    """Choose the one claim to deallocate when no node fits.

    Blocked when there is none, with the nodes' reasons. A claim qualifies when some node could not
    use it and no pod but this one has reserved it. Exactly one is deallocated at a time, as
    upstream does, because the next try may need no more. Order: the first such claim by name
    (upstream: a random one).
    """
    away = frozenset(name for miss in misses for name in miss.unavailable)
    for claim in sorted(plan.allocated, key=lambda claim: claim.name):
        if claim.name in away and all(user.uid == plan.pod.uid for user in claim.consumers):
            return TakeBack(
                claim, f"{plan.pod} fits on no node as long as {claim.claim.shown} is allocated for {_where(claim)}"
            )
    return Blocked(explain_misses(misses)[1])


def explain_misses(misses: Sequence[NodeMiss]) -> tuple[str, tuple[Reason, ...]]:
    """Name a condition's reason and the reasons behind it: node by node, or the one thing that is
    wrong everywhere.
    """
    return explain_nodes([miss.node for miss in misses], [miss.outcome for miss in misses])


def _read(entry: str, claim: Claim) -> PodClaim:
    """Make sure that all parts of a claim that scheduling needs can be read.

    Errors: raises ContractError.
    """
    wishes = read_alignment_request(claim.spec, claim.shown)
    claim.check_status()
    return PodClaim(entry, claim, wishes)


def _problem(pod: PodRef, pod_claim: PodClaim, *, is_generated: bool, has_own_notes: bool) -> Reason | None:
    """Explain why a pod has to wait because of a claim. None when it need not."""
    claim, name = pod_claim.claim, pod_claim.claim.shown
    facts: dict[str, Fact] = {"claim": pod_claim.name}
    is_mine = any(user.uid == pod.uid for user in pod_claim.consumers)
    if is_generated and not is_made_for(claim.object, pod):
        return Reason(
            code="claim-of-another",
            message=f"{name} was not made for {pod}: another object of that name exists",
            facts=facts,
        )
    if claim.is_deleting:
        return Reason(code="claim-deleting", message=f"{name} is being deleted", facts=facts)
    if claim.deallocation:
        return Reason(code="claim-taken-back", message=f"the allocation of {name} is being taken back", facts=facts)
    if pod_claim.allocation is not None:
        return (
            full_reason(claim.object, len(pod_claim.consumers))
            if not is_mine and len(pod_claim.consumers) >= MAX_CONSUMERS
            else None
        )
    if pod_claim.consumers:
        # Topobus never writes this. If it were allocated now, the reservations of others would hold
        # for devices that they never saw.
        users = tuple(str(user) for user in pod_claim.consumers)
        return Reason(
            code="claim-reserved", message=f"{name} is reserved for {', '.join(users)} and not allocated", facts=facts
        )
    if has_own_notes and claim.attempt is not None:
        return Reason(code="claim-in-flight", message=f"{name} is being allocated", facts=facts)
    return None


def _is_usable(pod_claim: PodClaim, node: Node) -> bool:
    """Say whether an allocated claim can be used on a node, by the claim's node selector. Without a
    selector it can be used anywhere.
    """
    selector = pod_claim.allocation.node_selector if pod_claim.allocation is not None else None
    return selector is None or selector_matches(selector, node)


def _names(pod_claim: PodClaim) -> frozenset[str] | None:
    """Return the names of the nodes that an allocation is bound to. None when it is not bound by
    name.
    """
    selector = pod_claim.allocation.node_selector if pod_claim.allocation is not None else None
    if selector is None or len(selector.node_selector_terms) != 1:
        return None
    for field_ in selector.node_selector_terms[0].match_fields:
        if field_.key == "metadata.name" and field_.operator == "In":
            return frozenset(field_.values)
    return None


def _where(claim: PodClaim) -> str:
    names = _names(claim)
    return f"node {', '.join(sorted(names))}" if names else "other nodes"
