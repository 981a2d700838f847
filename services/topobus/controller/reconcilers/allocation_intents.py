"""Intents: what is about to be allocated to a pod's claims, written down, made true, or taken back.

Two replicas cannot give a device twice: an intent counts from the version at which it was written, and it is acted upon only when the copy shows everything up to that
version and the devices are still free of all that came before; of two intents the later one sees the earlier and is withdrawn. A status is written only onto
the very version that has the intent, so whatever somebody wrote in between is looked at first.

Flows in: a pod's plan and the fit that was chosen. Flows out: writes of claims, asks to nodes.
"""

from __future__ import annotations

from enum import Enum

from topobus.contracts.messages import ApiObject
from topobus.controller.allocation.miss_reasons import summarize
from topobus.controller.allocation.values import DeviceId, GaveUp
from topobus.controller.claims import gated_claims
from topobus.controller.claims.gate import has_gate, version_of
from topobus.controller.claims.gated_claims import GateAttempt
from topobus.controller.claims.lifecycle import (
    devices_of,
    number_of,
    owner_of,
    with_uuids,
)
from topobus.controller.claims.stored import Stored
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.reconcilers.decision_publisher import DecisionPublisher
from topobus.controller.reconcilers.node_choice import NodeChooser
from topobus.controller.reconcilers.node_ledgers import NODE_FAILED, Held, NodeLedgers, Overtaken
from topobus.controller.scheduling.decisions import NodeFit, PodClaim, PodPlan
from topobus.controller.state.api_server_state import ApiServerState, Key
from topobus.controller.state.refusal_backoff import RefusalBackoff
from topobus.controller.store.api import CLAIMS, PODS
from topobus.controller.store.api_server_store import ApiServerWriter
from topobus.controller.store.informers import Informer
from topobus.domain.errors import PeerUnavailable
from topobus.domain.outcome import Reason, Refusal
from topobus.kubernetes.api.resource import AllocationResult
from topobus.runtime.clock import Clock
from topobus.runtime.logging import get_logger

__all__ = ["Intents", "Progress"]


class Progress(Enum):
    """How a commit went."""

    ON = "on"
    """Something was written, or is another now: look again."""
    LATER = "later"
    """The copy is not far enough yet."""
    COSTLY = "costly"
    """It takes more than a short search to see whether the devices may still be had."""


class Intents:
    """Writes intents and makes them true."""

    def __init__(
        self,
        settings: ControllerSettings,
        clock: Clock,
        world: ApiServerState,
        writer: ApiServerWriter,
        claims: Informer,
        ledgers: NodeLedgers,
        chooser: NodeChooser,
        decisions: DecisionPublisher,
        metrics: ControllerMetrics,
    ) -> None:
        self.refusals: RefusalBackoff[DeviceId] = RefusalBackoff(settings.retry_s)
        """Devices that nodes refused, by the pod's uid."""
        self._call_s = settings.cluster.call_s
        self._grace_s = settings.cluster.retry_s
        self._written: set[tuple[str, int]] = set()
        self._met: dict[tuple[str, int], float] = {}
        self._clock = clock
        self._world = world
        self._writer = writer
        self._claims = claims
        self._ledgers = ledgers
        self._chooser = chooser
        self._decisions = decisions
        self._metrics = metrics
        self._log = get_logger()

    def find(self, plan: PodPlan) -> list[tuple[PodClaim, GateAttempt]]:
        """List the pending claims for which something is intended and still to be done."""
        found: list[tuple[PodClaim, GateAttempt]] = []
        for pod_claim in plan.pending:
            note = self._world.book.note(_key(plan, pod_claim))
            if note is not None and note.node and not self._world.is_taken_back(_key(plan, pod_claim)):
                found.append((pod_claim, note))
        return found

    async def clear(self, plan: PodPlan) -> bool:
        """Have ledgers let go of what the pending claims hold from before; False when a node refuses.

        Errors: raises PeerUnavailable.
        """
        for pod_claim in plan.pending:
            if await self._ledgers.release(pod_claim.claim.object, f"before-{number_of(pod_claim.claim.object) + 1}") is not None:
                return False
        return True

    async def write(self, plan: PodPlan, fit: NodeFit, refused: tuple[str, ...]) -> None:
        """Write down what each pending claim is to get; ends early when a claim is another by now."""
        for pod_claim, result in zip(plan.pending, fit.results, strict=True):
            claim = self._world.claims.get(_key(plan, pod_claim))
            if claim is None:
                return
            note = GateAttempt(
                number=number_of(claim) + 1,
                node=fit.node,
                allocation=with_uuids(result, owner_of(claim).uid),
                wishes=pod_claim.wishes,
                pod=plan.pod.uid,
                refused=refused[-gated_claims.MAX_REFUSED_NODES :],
            )
            if await self._writer.claim(_key(plan, pod_claim), gated_claims.intent_patch(claim, gated_claims.shortened(note))) is None:
                return
            self._written.add((owner_of(claim).uid, note.number))

    async def commit(self, plan: PodPlan, intents: list[tuple[PodClaim, GateAttempt]], *, is_cheap: bool = False) -> Progress | Refusal:
        """Make intents true: see what came before them, have the node hold the devices, write the statuses; a Refusal is the node's.

        Shapes: is_cheap — only if a short search shows that the devices may still be had.
        """
        if self.are_anothers(intents):
            return Progress.LATER
        newest = max(version_of(self._world.claims[_key(plan, pod_claim)]) for pod_claim, _ in intents)
        if not await self._claims.reached(newest, self._call_s):
            return Progress.LATER
        node = intents[0][1].node
        bound_to = await self._bound_to(plan)
        if bound_to not in ("", node):
            # Somebody bound it while this was intended: on the intended node it can never start.
            self._log.info("pod.bound-elsewhere", pod=str(plan.pod), node=bound_to, intended=node)
            await self.withdraw(plan, plan.pending)
            return Progress.ON
        devices = {
            DeviceId(granted_device.driver, granted_device.pool, granted_device.device)
            for _, note in intents
            for granted_device in note.allocation.devices.results
        }
        fit = await self._chooser.still_fits(plan, node, devices, self._world.book.later_intents(newest), is_cheap=is_cheap)
        if isinstance(fit, GaveUp):
            return Progress.COSTLY
        if fit is None:
            self._log.info("pod.overtaken", pod=str(plan.pod), node=node)
            await self.withdraw(plan, plan.pending)
            return Progress.ON
        placed: list[Held] = []
        for pod_claim, note in intents:
            held = await self._hold(plan, pod_claim, note)
            if isinstance(held, Refusal):
                await self._give_way(plan, note, held)
                return held
            if isinstance(held, Overtaken):
                return Progress.ON
            placed.append(held)
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        written: list[tuple[ApiObject, GateAttempt, Held]] = []
        for (pod_claim, note), held, result in zip(intents, placed, fit.results, strict=True):
            claim = self._world.claims.get(_key(plan, pod_claim))
            if claim is None or version_of(claim) > newest or self._world.book.note(_key(plan, pod_claim)) != note:
                break
            patch = gated_claims.allocation_patch(claim, gated_claims.lengthened(note, result), plan.pod, now=now)
            if isinstance(patch, Reason):
                refusal = Refusal(reasons=(patch,))
                await self._give_way(plan, note, refusal)
                return refusal
            if await self._writer.claim(_key(plan, pod_claim), patch, part="status") is None:
                break
            self._metrics.decisions.labels("allocated").inc()
            names = [granted.device for granted in note.allocation.devices.results]
            self._log.info("claim.allocated", claim=pod_claim.claim.shown, node=node, devices=names, attempt=note.number, pod=str(plan.pod))
            self._written.discard((owner_of(claim).uid, note.number))
            written.append((claim, note, held))
        # Not before: a bus that is slow must not keep a pod half served.
        for claim, note, held in written:
            owner, op_id = owner_of(claim), f"allocate-{owner_of(claim).uid}-{note.number}"
            await self._decisions.publish(
                "allocate", owner, held.placement, op_id=op_id, node=note.node, ledger_sequence=held.ledger_sequence
            )
        return Progress.ON

    async def _bound_to(self, plan: PodPlan) -> str:
        """Name the node that the pod has by now; empty while it has none. Behind a gate nobody can bind it, so it is read only when its gate is open."""
        key = (plan.pod.namespace, plan.pod.name)
        stored = self._world.pods.get(key)
        pod = stored.value if stored is not None else None
        if pod is None or not has_gate(pod):
            pod = await self._writer.refresh(PODS, key)
        return str(pod.spec.get("nodeName") or "") if pod is not None else ""

    def are_anothers(self, intents: list[tuple[PodClaim, GateAttempt]]) -> bool:
        """Say whether another replica is at work on this: who wrote an intent gets a moment to make it true, and only then others go on for it."""
        now_s = self._clock.monotonic()
        for pod_claim, note in intents:
            key = (pod_claim.claim.uid, note.number)
            if key not in self._written and now_s - self._met.setdefault(key, now_s) < self._grace_s:
                return True
        for pod_claim, note in intents:
            self._met.pop((pod_claim.claim.uid, note.number), None)
        return False

    def refused_nodes(self, pod: Stored, plan: PodPlan) -> tuple[str, ...]:
        """List the nodes on which kube-scheduler could not place the pod; while the gate is closed it has not tried, and where the pod is bound it could."""
        if has_gate(pod.value) or pod.pod.node:
            return ()
        found: dict[str, None] = {}
        for pod_claim in plan.pending:
            note = self._world.book.note(_key(plan, pod_claim))
            if note is not None and note.pod == plan.pod.uid:
                found |= dict.fromkeys((*note.refused, note.node) if note.node else note.refused)
        return tuple(found)

    def forget(self) -> None:
        """Forget what was remembered of intents that are no more."""
        living = self._world.book.pending()
        self._written &= living
        self._met = {key: since for key, since in self._met.items() if key in living}

    async def withdraw(self, plan: PodPlan, claims: tuple[PodClaim, ...], *, is_final: bool = False, refused: tuple[str, ...] = ()) -> None:
        """Take intents back; the note of a pod whose gate is open stays, without an intent, so that its claims are still known as ours.

        Shapes: refused — nodes that such a note is to name as those on which kube-scheduler could not place the pod.
        """
        pod = self._world.pods.get((plan.pod.namespace, plan.pod.name))
        is_open = pod is not None and not has_gate(pod.value) and not is_final
        for pod_claim in claims:
            claim = self._world.claims.get(_key(plan, pod_claim))
            note = self._world.book.note(_key(plan, pod_claim))
            if claim is None or note is None or claim.status.get("allocation"):
                continue
            kept = GateAttempt(
                number=note.number,
                node="",
                allocation=AllocationResult(),
                pod=plan.pod.uid,
                refused=refused[-gated_claims.MAX_REFUSED_NODES :],
            )
            if is_open and note == kept:
                continue
            patch = gated_claims.intent_patch(claim, kept) if is_open else gated_claims.withdrawal_patch(claim)
            await self._writer.claim(_key(plan, pod_claim), patch)

    async def _hold(self, plan: PodPlan, pod_claim: PodClaim, note: GateAttempt) -> Held | Refusal | Overtaken:
        key = _key(plan, pod_claim)

        async def is_newest() -> bool:
            newest = await self._writer.refresh(CLAIMS, key)
            return newest is not None and not newest.status.get("allocation") and self._world.book.note(key) == note

        try:
            return await self._ledgers.hold(pod_claim.claim.object, note, is_newest)
        except PeerUnavailable as err:
            # It may be held by now; whatever comes of it, the node's gateway lets go of what no claim's status says.
            code = "node-failed" if err.facts.get("code") == NODE_FAILED else "node-silent"
            message = str(err) if code == NODE_FAILED else f"node {note.node}: its ledger does not answer: {err}"
            return Refusal(reasons=(Reason(code=code, message=message, facts={"node": note.node}),))

    async def _give_way(self, plan: PodPlan, note: GateAttempt, refusal: Refusal) -> None:
        """Take back what was begun on a node that refuses, and keep away from the devices for a while."""
        why = summarize(refusal.reasons)
        self._metrics.decisions.labels("refused-by-node").inc()
        self._log.info("claim.refused", pod=str(plan.pod), node=note.node, why=why)
        is_all = any(reason.code in ("policy-forbidden", "node-silent", NODE_FAILED) for reason in refusal.reasons)
        table = self._world.stock.table_of(note.node)
        device_ids = [candidate.id for candidate in table.candidates if self._world.is_topobus_device(note.node, candidate.id)]
        refused = device_ids if is_all else devices_of(note.allocation, note.node)
        self.refusals.remember(plan.pod.uid, refused, why, now_s=self._clock.monotonic())
        await self.withdraw(plan, plan.pending)
        for pod_claim in plan.pending:
            try:
                await self._ledgers.release(pod_claim.claim.object, f"refused-{note.number}")
            except PeerUnavailable as err:
                self._log.warning("ledger.silent", node=note.node, error=str(err))


def _key(plan: PodPlan, pod_claim: PodClaim) -> Key:
    return plan.pod.namespace, pod_claim.name
