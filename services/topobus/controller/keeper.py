"""The keeper of claims: brings each stored claim one write further until it is allocated, told why not, or gone.

Flows in: the world as the watches see it. Flows out: asks to nodes, compare-and-set writes of claims, decision events. Every step may be repeated, by this
replica after a crash or by another one: operations at nodes have ids made of the claim's uid and the attempt's number, and a write that lost to somebody
else's is dropped, for the watch brings the newer object.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from topobus.contracts import catalogue
from topobus.contracts.codec import encode
from topobus.contracts.kubernetes import limits
from topobus.contracts.kubernetes.objects import metadata_of, name_of, object_parts
from topobus.contracts.kubernetes.resource import AllocationResult, ClaimSpec
from topobus.contracts.kubernetes.wishes import Wishes
from topobus.contracts.messages import ApiObject, DecisionEvent, PlaceReply, PlaceRequest, ReleaseRequest
from topobus.controller.config import ControllerSettings
from topobus.controller.core import claims
from topobus.controller.core.answers import SHOWN_NODES, explain_nodes
from topobus.controller.core.claims import Attempt
from topobus.controller.core.inventory import holders_from_ledger
from topobus.controller.core.misses import KnownMisses
from topobus.controller.core.nearness import Wished, read_wishes
from topobus.controller.core.reasons import summarize
from topobus.controller.core.refusals import Refusals
from topobus.controller.core.selectors import SelectorCompiler
from topobus.controller.core.values import Allocated, AllocationInput, Fault, Mode, NoFit, Outcome
from topobus.controller.core.world import ObjectKey, Stored, World
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.searching import Searcher
from topobus.domain.errors import ContractError, HardwareError, PeerUnavailable
from topobus.domain.outcome import Placement, Reason, Refusal
from topobus.domain.request import Owner
from topobus.runtime.bus import AmbiguousWrite, Conflict
from topobus.runtime.clock import rfc3339
from topobus.runtime.logging import get_logger
from topobus.runtime.service import Runtime

__all__ = ["ClaimKeeper"]


@dataclass(frozen=True)
class _Seen:
    """At which state of the world a claim was last found to be without a way forward."""

    revision: int
    supply: int


class _Member(NamedTuple):
    """A claim that is allocated together with others."""

    key: ObjectKey
    stored: Stored
    spec: ClaimSpec
    wishes: Wishes | None


class ClaimKeeper:
    """Reconciles claims, one at a time."""

    def __init__(
        self, settings: ControllerSettings, runtime: Runtime, world: World, compiler: SelectorCompiler, metrics: ControllerMetrics
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._bus = runtime.bus
        self._world = world
        self._searcher = Searcher(settings, runtime.clock, compiler, metrics)
        self._metrics = metrics
        self._settled: dict[ObjectKey, _Seen] = {}
        self._refusals = Refusals(settings.retry_s)
        self._misses = KnownMisses()
        self._log = get_logger()

    async def reconcile_all(self) -> bool:
        """Bring every claim as far as it goes now; True says that a peer was silent and another try is due after a while."""
        self._forgive()
        is_due = False
        waiting = 0
        for key, _ in self._world.claims():
            stored = self._world.objects.get(key)
            if stored is None:
                continue  # gone while the claims before it were worked on
            try:
                await self._reconcile(key, stored)
            except AmbiguousWrite as err:
                # Neither done nor undone: the watch tells which, and the next round goes on from there.
                self._log.warning("claim.write-ambiguous", claim=name_of(stored.value), error=str(err))
                is_due = True
            except (PeerUnavailable, HardwareError) as err:
                self._log.warning("claim.peer-silent", claim=name_of(stored.value), error=str(err))
                is_due = True
            except ContractError as err:
                await self._tell(key, stored, "Malformed", (Reason(code="malformed", message=str(err)),))
            waiting += not self._is_allocated(stored.value)
        self._metrics.waiting.set(waiting)
        self._settled = {key: seen for key, seen in self._settled.items() if key in self._world.objects}
        return is_due or self._refusals.is_waiting

    def _forgive(self) -> None:
        """Let refused devices be tried again when their time has come."""
        stored = self._world.objects

        def is_done(key: Hashable) -> bool:
            found = stored.get(key) if isinstance(key, ObjectKey) else None
            return found is None or self._is_allocated(found.value)

        for key in self._refusals.forgive(now_s=self._runtime.clock.monotonic(), is_done=is_done):
            self._settled = {one: seen for one, seen in self._settled.items() if one != key}

    async def release_gone(self, gone: ApiObject) -> bool:
        """Let go of what a claim held that somebody deleted without asking; the deletion is the evidence.

        Gives False when a node still has it prepared: to be tried again when the ledger changes.
        Errors: raises PeerUnavailable.
        """
        owner = claims.owner_of(gone)
        held = [(node, ledger) for node, ledger in sorted(self._world.ledgers.items()) if owner.key in ledger.allocations]
        answers = [await self._release(owner, node, f"release-{owner.uid}-gone-{ledger.sequence}") for node, ledger in held]
        return not any(answers)

    async def _reconcile(self, key: ObjectKey, stored: Stored) -> None:
        claim = stored.value
        if object_parts(claim) != key._asdict():
            raise ContractError(f"{name_of(claim)} is stored under {key.kind} {key.namespace}/{key.name}: wanted its own name there")
        if metadata_of(claim).deletion_timestamp:
            await self._finish(key, stored)
            return
        if claims.status_of(claim).allocation is not None:
            return
        attempt = claims.attempt_of(claim)
        if attempt is None:
            found = await self._begin(key, stored)
            if found is None:
                return
            stored, attempt = found
        await self._commit(key, stored, attempt)

    async def _begin(self, key: ObjectKey, stored: Stored) -> tuple[Stored, Attempt] | None:
        """Search for devices and write the attempt down; None when there is no way forward now, or somebody else wrote first."""
        claim = stored.value
        seen = _Seen(stored.revision, self._world.supply)
        if self._settled.get(key) == seen:
            return None
        missing = self._world.missing_mates(claim)
        if missing:
            message = f"waits for {', '.join(missing)}, which the same pod wants: its claims are served together"
            await self._tell(key, stored, "WaitsForClaims", (Reason(code="waits-for-claims", message=message, facts={"claims": missing}),))
            return None
        members = self._together(key, stored)
        nodes = self._world.nodes_for(claim)
        refused: list[Outcome] = []
        for node in nodes:
            outcome = await self._look(node, members)
            if isinstance(outcome, Allocated):
                problem = next((str(one) for result in outcome.results for one in limits.check_allocation(result)), None)
                if problem is None:
                    return await self._attempt(node, members, outcome)
                outcome = Fault(Reason(code="result-too-large", message=f"node {node}: {problem}"), outcome.steps)
            refused.append(outcome)
            if isinstance(outcome, Fault) and not outcome.is_local:
                refused = [outcome]  # wrong on every node: the others would only repeat it
                break
        for index, node in enumerate(nodes[: min(SHOWN_NODES, len(refused))]):
            if isinstance(refused[index], NoFit):
                # What is remembered may be another claim's miss, of some time ago: people are told how it is for this one, now.
                refused[index] = await self._search(node, members)
        self._settled[key] = seen
        reason, reasons = explain_nodes(nodes, refused)
        await self._tell(key, stored, reason, reasons)
        return None

    def _together(self, key: ObjectKey, stored: Stored) -> list[_Member]:
        """List the claims to be allocated at once: this one, and those of its pod that wait, too.

        Errors: raises ContractError when the first cannot be read; another that cannot is told so in its own turn.
        """
        members = [_member(key, stored)]
        if self._world.holds_devices(stored.value):
            return members
        for mate_key, mate in self._world.mates(stored.value):
            try:
                is_waiting = claims.allocation_of(mate.value) is None and not metadata_of(mate.value).deletion_timestamp
                if is_waiting and not self._world.holds_devices(mate.value):
                    members.append(_member(mate_key, mate))
            except ContractError:
                continue
        return members

    def _input(self, node: str, members: list[_Member]) -> AllocationInput:
        excluded = {device: why for one in members for device, why in self._refusals.devices(one.key).items()}
        wanted = [(one.stored.value, one.spec) for one in members]
        return self._world.input_for(node, wanted, mode=self._settings.mode, excluded=excluded)

    async def _attempt(self, node: str, members: list[_Member], outcome: Allocated) -> tuple[Stored, Attempt] | None:
        """Write an attempt into each claim; gives the first one's. The others are committed in their own turn."""
        made: list[tuple[Stored, Attempt] | None] = []
        for one, result in zip(members, outcome.results, strict=True):
            claim = one.stored.value
            allocation = claims.with_uuids(result, metadata_of(claim).uid)
            attempt = Attempt(number=claims.number_of(claim) + 1, node=node, allocation=allocation, wishes=one.wishes)
            written = await self._write(one.key, one.stored, claims.with_attempt(claim, attempt))
            made.append((written, attempt) if written is not None else None)
        return made[0]

    async def _look(self, node: str, members: list[_Member]) -> Outcome:
        """Search one node, unless the like of these claims is known not to fit there."""
        is_plain = self._settings.mode is Mode.CORRECTED and not any(
            self._refusals.devices(one.key) or self._world.holds_devices(one.stored.value) or one.wishes is not None for one in members
        )
        asked = tuple(encode(one.spec) for one in members)
        freedom = self._world.freedom_of(node)
        known = self._misses.find(asked, node, freedom) if is_plain else None
        if known is not None:
            return known
        outcome = await self._search(node, members)
        if is_plain and isinstance(outcome, NoFit):
            self._misses.remember(asked, node, freedom, outcome)
        return outcome

    async def _search(self, node: str, members: list[_Member]) -> Outcome:
        given = self._input(node, members)
        if all(one.wishes is None for one in members):
            return await self._searcher.search(given)
        wished = [Wished(one.stored.value, one.wishes) for one in members]
        return await self._searcher.search_near(given, wished, self._world.view_of(node))

    async def _commit(self, key: ObjectKey, stored: Stored, attempt: Attempt) -> None:
        """Have the node's ledger take the attempt, and write the status; a refusal drops the attempt, and the next round searches anew."""
        claim = stored.value
        op_id = f"allocate-{metadata_of(claim).uid}-{attempt.number}"
        reply = await self._place(claim, attempt, op_id)
        if reply is not None and isinstance(reply.result, Refusal) and not await self._holds_already(claim, attempt):
            self._metrics.decisions.labels("refused-by-node").inc()
            why = summarize(reply.result.reasons)
            self._log.info("claim.refused", claim=name_of(claim), node=attempt.node, op_id=op_id, why=why)
            # Where the node forbids what the claim wishes, no other of its devices helps.
            is_forbidden = any(one.code == "policy-forbidden" for one in reply.result.reasons)
            devices = self._world.devices_of(attempt.node) if is_forbidden else claims.devices_of(attempt.allocation, attempt.node)
            self._refusals.remember(key, devices, why, now_s=self._runtime.clock.monotonic())
            dropped = await self._write(key, stored, claims.without_attempt(claim))
            if dropped is not None:
                await self._tell(key, dropped, "RefusedByNode", reply.result.reasons)
            return
        now = rfc3339(self._runtime.clock.now())
        written = await self._write(key, stored, claims.with_allocation(claim, attempt.allocation, now=now))
        if written is None:
            return
        self._metrics.decisions.labels("allocated").inc()
        names = [one.device for one in attempt.allocation.devices.results]
        self._log.info("claim.allocated", claim=name_of(claim), node=attempt.node, devices=names, op_id=op_id)
        result = reply.result if reply is not None else None
        await self._announce(claim, attempt.node, op_id, result, reply.ledger_sequence if reply is not None else 0)

    async def _place(self, claim: ApiObject, attempt: Attempt, op_id: str) -> PlaceReply | None:
        """Ask the node to hold the devices; None when none of them is the node's topology's to hold."""
        request = claims.placement_request(claim, attempt.allocation, attempt.node, attempt.wishes)
        if request is None:
            return None
        return await self._bus.ask(
            catalogue.PLACE, PlaceRequest(op_id=op_id, pod=request), timeout_s=self._settings.ask_timeout_s, node=attempt.node
        )

    async def _holds_already(self, claim: ApiObject, attempt: Attempt) -> bool:
        """Say whether the ledger shows this very attempt as done: a node keeps only the newest operations, the ledger keeps what is held.

        What the claim holds otherwise, from an attempt that nobody remembers, is let go.
        """
        owner = claims.owner_of(claim)
        entry = await self._bus.get(catalogue.LEDGER, node=attempt.node)
        if entry is None or owner.key not in entry.value.allocations:
            return False
        held = {one for one, holder in holders_from_ledger(entry.value, self._world.cpu_devices(attempt.node)).items() if holder == owner}
        wanted = set(claims.devices_of(attempt.allocation, attempt.node))
        if held == wanted:
            return True
        await self._release(owner, attempt.node, f"release-{owner.uid}-stale-{entry.value.sequence}")
        return False

    async def _finish(self, key: ObjectKey, stored: Stored) -> None:
        """Let go of a claim that is to be deleted: first its devices, then the finalizer, then the object."""
        claim = stored.value
        owner = claims.owner_of(claim)
        nodes = {node for node, ledger in self._world.ledgers.items() if owner.key in ledger.allocations}
        try:
            attempt = claims.attempt_of(claim)
            allocation = claims.status_of(claim).allocation
        except ContractError:
            attempt, allocation = None, None  # a claim that nobody can read must be deletable; the ledgers say what it holds
        if attempt is not None:
            nodes.add(attempt.node)
        nodes |= _nodes_of(allocation) & set(self._world.nodes())
        for node in sorted(nodes):
            # The revision makes a later release another operation: another replica may have placed in between.
            refusal = await self._release(owner, node, f"release-{owner.uid}-{stored.revision}")
            if refusal is not None:
                await self._wait_for_release(key, stored, f"node {node}: {summarize(refusal.reasons)}")
                return
        freed = claims.without_protection(claim)
        if not claims.is_finished(freed):
            if freed != claim:
                await self._write(key, stored, freed)
            return
        if freed != claim and await self._write(key, stored, freed) is None:
            return
        await self._bus.delete(catalogue.OBJECT, **key._asdict())
        self._metrics.decisions.labels("released").inc()
        self._log.info("claim.released", claim=name_of(claim), nodes=sorted(nodes))

    async def _release(self, owner: Owner, node: str, op_id: str) -> Refusal | None:
        """Ask a node to let go; it refuses while containers may be using the devices, and only the node can know."""
        held = self._world.ledgers[node].allocations.get(owner.key) if node in self._world.ledgers else None
        if held is not None and held.is_prepared:
            return Refusal(reasons=(Reason(code="prepared", message=f"{owner} is prepared: its devices are let go when that is undone"),))
        request = ReleaseRequest(op_id=op_id, owner=owner)
        return (await self._bus.ask(catalogue.RELEASE, request, timeout_s=self._settings.ask_timeout_s, node=node)).refusal

    async def _wait_for_release(self, key: ObjectKey, stored: Stored, message: str) -> None:
        """Say in the claim why it is still there."""
        if claims.has_condition(stored.value, reason="Prepared", message=message, kind=claims.RELEASED):
            return
        self._log.info("claim.release-waiting", claim=name_of(stored.value), why=message)
        now = rfc3339(self._runtime.clock.now())
        told = claims.with_condition(stored.value, is_true=False, reason="Prepared", message=message, now=now, kind=claims.RELEASED)
        await self._write(key, stored, told)

    async def _tell(self, key: ObjectKey, stored: Stored, reason: str, reasons: tuple[Reason, ...]) -> None:
        """Put the reasons into the claim's condition, once."""
        claim = stored.value
        message = "; ".join(one.message for one in reasons)
        if claims.has_condition(claim, reason=reason, message=message):
            return
        self._metrics.decisions.labels("refused").inc()
        if reason == "Malformed":
            self._metrics.malformed.inc()
        self._log.info("claim.waiting", claim=name_of(claim), reason=reason, why=message)
        now = rfc3339(self._runtime.clock.now())
        told = claims.with_condition(claim, is_true=False, reason=reason, message=message, now=now)
        written = await self._write(key, stored, told)
        if written is None:
            return
        if key in self._settled:
            self._settled[key] = _Seen(written.revision, self._settled[key].supply)
        await self._announce(claim, catalogue.CLUSTER, f"refuse-{metadata_of(claim).uid}-{written.revision}", Refusal(reasons=reasons), 0)

    async def _write(self, key: ObjectKey, stored: Stored, value: ApiObject) -> Stored | None:
        """Write a claim if nobody else did; the world learns it at once, so that the next claim sees what this one took."""
        written = await self._bus.compare_and_set(catalogue.OBJECT, value, stored.revision, **key._asdict())
        if isinstance(written, Conflict):
            self._log.debug("claim.write-lost", claim=name_of(value), revision=stored.revision)
            return None
        made = Stored(written.revision, value)
        self._world.put_object(key, made)
        return made

    async def _announce(self, claim: ApiObject, node: str, op_id: str, outcome: Placement | Refusal | None, sequence: int) -> None:
        """Publish the decision; the claim itself is the truth, so an event that cannot be published is only logged."""
        event = DecisionEvent(
            id=op_id,
            verb="allocate",
            node=node,
            op_id=op_id,
            time=rfc3339(self._runtime.clock.now()),
            owner=claims.owner_of(claim),
            outcome=outcome,
            ledger_sequence=sequence,
        )
        try:
            await self._bus.publish(catalogue.DECISION, event, event_id=op_id, node=node)
        except PeerUnavailable as err:
            self._log.warning("decision.unpublished", op_id=op_id, error=str(err))

    def _is_allocated(self, claim: ApiObject) -> bool:
        return bool(claim.status.get("allocation"))


def _member(key: ObjectKey, stored: Stored) -> _Member:
    spec = claims.read_claim(stored.value)
    return _Member(key, stored, spec, read_wishes(spec, name_of(stored.value)))


def _nodes_of(allocation: AllocationResult | None) -> set[str]:
    """Name the nodes whose devices an allocation has: our pools are named like their nodes."""
    return {one.pool for one in allocation.devices.results} if allocation is not None else set()
