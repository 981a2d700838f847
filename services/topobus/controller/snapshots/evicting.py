"""Evicts the pods of a plan one by one, by the eviction API, and stops as soon as the cluster is not
as the plan was made for it.

After each eviction the cluster is read and the plan made again: what is left must be a part of the
first plan. Nothing keeps a pod that its owner made in its place from the place that became free; it shows in
the next plan, and ends the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from topobus.controller.snapshots.listing import KINDS, Progress, list_objects, take_snapshot
from topobus.controller.snapshots.rules.snapshot import Snapshot
from topobus.controller.store.api import PODS
from topobus.kubernetes.answers import NOT_FOUND, Rejected
from topobus.kubernetes.client import KubernetesClient, object_path
from topobus.values.cluster_answers import Evictions, Move, MovePlan
from topobus.values.errors import PeerUnavailable

__all__ = ["evict_moves"]

_POLL_S = 1.0
# Pods end within 30 s by default (terminationGracePeriodSeconds). After this time another reader may
# know why one does not.
_GONE_S = 120.0
# The claims of a pod that is gone are released by Kubernetes' claim controller within a second or two.
_RELEASED_S = 20.0
_TOO_MANY = 429


async def evict_moves(
    client: KubernetesClient, plan_of: Callable[[Snapshot], MovePlan], progress: Progress
) -> Evictions:
    """Evict the pods of a plan, and wait for each until it is gone.

    Shapes: plan_of — the plan for the cluster as it is then.
    Errors: raises PeerUnavailable. What was evicted before stays so.
    """
    snapshot = await take_snapshot(client, progress)
    plan = now = plan_of(snapshot)
    evicted: list[Move] = []
    stopped = "" if plan.node else "no move helps"
    while now.moves and not stopped:
        stopped = await _evict(client, now.moves[0])
        if not stopped:
            evicted.append(now.moves[0])
            left = {move.uid for move in plan.moves} - {move.uid for move in evicted}
            now, stopped = await _next(client, snapshot, plan_of, left, progress)
    return Evictions(plan=plan, evicted=tuple(evicted), stopped=stopped)


async def _next(
    client: KubernetesClient,
    first: Snapshot,
    plan_of: Callable[[Snapshot], MovePlan],
    left: Collection[str],
    progress: Progress,
) -> tuple[MovePlan, str]:
    """Plan again until only pods of the first plan are left to move, for the claims of a pod that is
    gone are released a moment later. Returns the plan, and why it is another one if it stays so.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _RELEASED_S
    while True:
        # The server's release and gates stay as they were.
        items, unseen = await list_objects(client, KINDS, progress)
        plan = plan_of(msgspec.structs.replace(first, items=items, unseen=unseen))
        strangers = [f"{move.namespace}/{move.name}" for move in plan.moves if move.uid not in left]
        if plan.node and not strangers:
            return plan, ""
        if loop.time() > until_s:
            what = f"now pod {', '.join(strangers)} would have to move" if strangers else "no move helps any more"
            return plan, f"the cluster has changed: {what}"
        await asyncio.sleep(_POLL_S)


async def _evict(client: KubernetesClient, move: Move) -> str:
    """Evict one pod and wait until it is gone. Returns why it was not; empty when it is."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": move.namespace, "name": move.name},
        # Not the next pod of that name.
        "deleteOptions": {"preconditions": {"uid": move.uid}},
    }
    shown = f"pod {move.namespace}/{move.name}"
    path = object_path("v1", PODS.plural, namespace=move.namespace, name=move.name)
    try:
        answer = await client.ask("POST", f"{path}/eviction", body=body)
    except PeerUnavailable as err:
        if err.facts.get("code") != _TOO_MANY:
            raise
        return f"{shown}: a PodDisruptionBudget allows no eviction now"
    if isinstance(answer, Rejected) and answer.code != NOT_FOUND:
        return f"{shown} was not evicted: {answer.message}"
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _GONE_S
    while loop.time() < until_s:
        answer = await client.ask("GET", path)
        if isinstance(answer, Rejected) or (answer.get("metadata") or {}).get("uid") != move.uid:
            return ""
        await asyncio.sleep(_POLL_S)
    return f"{shown} was evicted and has not ended after {_GONE_S:g} s"
