"""The reconciler of one classic driver: advances the driver's claims, and its part of each
negotiation, by one write.

The order of an allocation is: the finalizer and the attempt, the driver's `allocate`, the status.
The order of a deallocation is: `deallocate`, the status, the finalizer. Each step may be repeated,
by this replica after a crash or by another one. A write that loses its compare-and-set is dropped,
since the watch brings the newer object.

Source: k8s.io/dynamic-resource-allocation/controller/controller.go, 1.30.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from topobus.controller.classic.rules import classic_lifecycle, negotiation
from topobus.controller.config import ControllerSettings
from topobus.controller.metrics import ControllerMetrics
from topobus.controller.state.standalone_state import StandaloneState
from topobus.controller.store.nats_store import NatsStore
from topobus.devicekit.classic.classic import ClaimWork, ClassicDriver
from topobus.engine.allocation.explanations import SHOWN_NODES
from topobus.engine.allocation.miss_reasons import summarize
from topobus.engine.claims import lifecycle as conditions
from topobus.engine.claims.reservations import claim_uses
from topobus.engine.claims.stored import ObjectKey, Stored
from topobus.engine.claims.templates import owner_pod_uid
from topobus.formats.kubernetes.classic import classic
from topobus.formats.kubernetes.classic.classic_limits import check_status
from topobus.formats.kubernetes.objects import metadata_of, name_of
from topobus.formats.messages.messages import ApiObject
from topobus.formats.messages.nouns import CLUSTER
from topobus.process.logging import get_logger
from topobus.process.service import Runtime
from topobus.process.work_queue import Again, Done, Result, WorkQueue
from topobus.values.errors import ContractError, PeerUnavailable, TopobusError
from topobus.values.outcome import Reason, Refusal
from topobus.values.timestamps import rfc3339

__all__ = ["ClassicClaimReconciler"]

# A driver's free devices may change unseen, so a negotiation is checked again after a while.
# Upstream waits 30 s (controller.go, "recheckDelay").
_REFRESH_S = 10.0

T = TypeVar("T")
_Work = Callable[[ObjectKey, Stored, Hashable], Awaitable[Result]]


class ClassicClaimReconciler:
    """Reconciles the claims of one driver."""

    def __init__(
        self,
        driver: ClassicDriver,
        settings: ControllerSettings,
        runtime: Runtime,
        state: StandaloneState,
        metrics: ControllerMetrics,
    ) -> None:
        self.driver = driver
        self._name = driver.name
        self._settings = settings
        self._clock = runtime.clock
        self._bus = runtime.bus
        self._state = state
        self._store = NatsStore(runtime.bus, state)
        self._metrics = metrics
        self.queue = WorkQueue(f"classic-{driver.name}", runtime.clock, settings.retry_s, failures=metrics.set_aside)
        """When each of its objects is due."""
        self._log = get_logger().bind(driver=driver.name)

    async def reconcile_all(self) -> None:
        """Advance every object of this driver as far as possible now."""
        looked_at: set[ObjectKey] = set()
        for key, stored in self._state.classic_claims():
            if _may_have_work(stored.value):
                looked_at.add(key)
                await self._bounded(key, (key,), self._claim)
        for key in sorted(self._state.of_kind("podschedulingcontext")):
            looked_at.add(key)
            await self._bounded(key, self._negotiated(key), self._context)
        self.queue.keep(looked_at)

    async def _bounded(self, key: ObjectKey, depends_on: Sequence[ObjectKey], work: _Work) -> None:
        """Do one piece of work, and set its object aside when it fails in an unforeseen way."""
        objects = self._state.objects
        stored = objects.get(key)
        if stored is None:
            return  # deleted while the objects before it were worked on

        async def report(reason: Reason) -> None:
            if key.kind == "resourceclaim":
                await self._set_condition(key, objects.get(key, stored), "Malformed", reason.message)

        revisions = tuple(objects[each_key].revision if each_key in objects else 0 for each_key in depends_on)
        version = (revisions, self._state.supply, self._state.shared_epoch)
        await self.queue.run(
            key, version, partial(self._guarded, key, stored, version, work), name=stored.shown, report=report
        )

    def _negotiated(self, key: ObjectKey) -> tuple[ObjectKey, ...]:
        """Name what a negotiation depends on: its context, the pod, and the pod's claims."""
        pod_key = ObjectKey("pod", key.namespace, key.name)
        pod = self._state.objects.get(pod_key)
        try:
            names = pod.pod.claim_names if pod is not None else ()
        except ContractError:
            names = ()
        return (key, pod_key, *(ObjectKey("resourceclaim", key.namespace, name) for name in names))

    async def _guarded(self, key: ObjectKey, stored: Stored, version: Hashable, work: _Work) -> Result:
        try:
            return await work(key, stored, version)
        except ContractError as err:
            if key.kind == "resourceclaim":
                await self._set_condition(key, self._state.objects.get(key, stored), "Malformed", str(err))
            else:
                self._log.warning("classic.object-malformed", object=stored.shown, error=str(err))
            return None

    async def _claim(self, key: ObjectKey, stored: Stored, version: Hashable) -> Result:
        """Advance a claim by itself: take it back, allocate it at once, or leave it waiting."""
        claim = stored.value
        try:
            status = classic_lifecycle.status_of(claim)
        except ContractError:
            # A claim that cannot be read must be deletable, and the ledgers record what it holds.
            if not stored.metadata.deletion_timestamp:
                raise
            status = classic.ClaimStatus()
        if status.reserved_for or not self._is_for_this_driver(claim, status):
            return Done(version)
        if stored.metadata.deletion_timestamp or status.deallocation_requested:
            await self._give_back(key, stored, status)
            return None
        spec = classic_lifecycle.read_claim(claim)
        if status.allocation is not None:
            return None
        if classic.mode_of(spec) != classic.IMMEDIATE:
            if not status.conditions:
                await self._set_condition(key, stored, classic.WAIT_FOR_FIRST_CONSUMER, "waits for a pod that uses it")
            return Done(version)
        work = await self._work("", claim)
        begun = await self._begin(key, stored, "")
        if begun is None:
            return None
        (outcome,) = await self._allocate([msgspec.structs.replace(work, claim=begun.value)], "")
        await self._settle(key, begun, outcome, None)
        return Again(version=version) if isinstance(outcome, Refusal) else Done(version)

    async def _context(self, key: ObjectKey, stored: Stored, version: Hashable) -> Result:
        """Do this driver's part of one negotiation.

        The context is due again while the negotiation lasts, for a driver's free devices may change
        unseen.
        """
        context = stored.value
        spec = negotiation.read_spec(context)
        pod = self._state.objects.get(ObjectKey("pod", key.namespace, key.name))
        if stored.metadata.deletion_timestamp or not (spec.selected_node or spec.potential_nodes):
            return None
        if pod is None or pod.metadata.deletion_timestamp or owner_pod_uid(context) != pod.uid:
            return None
        pending = self._pending_of(pod.value)
        if not pending:
            return Done(version)
        works: list[ClaimWork] = []
        for entry, claim_key in pending:
            try:
                works.append(await self._work(entry, self._state.objects[claim_key].value))
            except ContractError as err:
                await self._set_condition(claim_key, self._state.objects[claim_key], "Malformed", str(err))
                return None
        named_nodes = [*spec.potential_nodes, *([spec.selected_node] if spec.selected_node else [])]
        nodes = tuple(dict.fromkeys(named_nodes))
        reasons = await self._call("unsuitable_nodes", lambda: self.driver.unsuitable_nodes(pod.value, works, nodes))
        unsuitable = {work.entry: dict(reasons.get(work.entry, {})) for work in works}
        refused: dict[str, Refusal] = {}
        if spec.selected_node and all(spec.selected_node not in unsuitable[work.entry] for work in works):
            refused = await self._allocate_all(pod.value, pending, works, spec.selected_node)
            for entry, refusal in refused.items():
                unsuitable[entry][spec.selected_node] = refusal.reasons[0]
        await self._report(key, stored, nodes, unsuitable)
        for entry, claim_key in pending:
            if nodes and all(node in unsuitable[entry] for node in nodes):
                await self._report_unsuitable(claim_key, nodes, unsuitable[entry])
        # A refused claim is tried again soon, for the driver may make another choice.
        return Again(None if refused else _REFRESH_S, version)

    def _pending_of(self, pod: ApiObject) -> list[tuple[str, ObjectKey]]:
        """List the pod's claims that this driver is to allocate: its own, delayed, without an
        allocation.

        A claim that was generated for another pod is left out.
        """
        pending: list[tuple[str, ObjectKey]] = []
        metadata = metadata_of(pod)
        for use in claim_uses(pod):
            key = ObjectKey("resourceclaim", metadata.namespace or "default", use.claim)
            stored = self._state.objects.get(key)
            if stored is None or not classic.is_classic(stored.value) or stored.metadata.deletion_timestamp:
                continue
            if use.is_generated and owner_pod_uid(stored.value) != metadata.uid:
                continue
            status = classic_lifecycle.status_of(stored.value)
            is_delayed = classic.mode_of(classic_lifecycle.read_claim(stored.value)) == classic.WAIT_FOR_FIRST_CONSUMER
            if (
                is_delayed
                and status.allocation is None
                and self._is_for_this_driver(stored.value, status)
                and (use.entry, key) not in pending
            ):
                pending.append((use.entry, key))
        return pending

    async def _allocate_all(
        self, pod: ApiObject, pending: Sequence[tuple[str, ObjectKey]], works: Sequence[ClaimWork], node: str
    ) -> dict[str, Refusal]:
        """Allocate all claims of the pod on the selected node, and write the outcomes.

        Returns the refusals by entry.
        """
        begun: list[Stored] = []
        for _, claim_key in pending:
            stored = self._state.objects.get(claim_key)
            begun_claim = await self._begin(claim_key, stored, node) if stored is not None else None
            if begun_claim is None:
                return {}
            begun.append(begun_claim)
        prepared = [
            msgspec.structs.replace(work, claim=begun_claim.value)
            for work, begun_claim in zip(works, begun, strict=True)
        ]
        outcomes = await self._allocate(prepared, node)
        refused: dict[str, Refusal] = {}
        for (entry, claim_key), begun_claim, outcome in zip(pending, begun, outcomes, strict=True):
            await self._settle(claim_key, begun_claim, outcome, pod)
            if isinstance(outcome, Refusal):
                refused[entry] = outcome
        return refused

    async def _work(self, entry: str, claim: ApiObject) -> ClaimWork:
        """Collect a claim's class and parameters.

        Errors: raises ContractError when one of them is missing or wrong.
        """
        name = classic_lifecycle.read_claim(claim).resource_class_name
        stored = self._state.objects.get(ObjectKey("resourceclass", CLUSTER, name))
        if stored is None:
            raise ContractError(f"{name_of(claim)}: there is no ResourceClass {name}")
        spec = classic_lifecycle.read_class(stored.value)
        if spec.driver_name != self._name:
            raise ContractError(
                f"{stored.shown} names driver {spec.driver_name}, and {name_of(claim)} is kept by {self._name}"
            )
        if spec.structured_parameters:
            raise ContractError(
                f"{stored.shown}: structuredParameters is true: no driver's controller allocates such a claim",
                next_step="use resource.k8s.io/v1: `topobus migrate` translates what it can",
            )
        of_class = await self._call("get_class_parameters", lambda: self.driver.get_class_parameters(stored.value))
        of_claim = await self._call(
            "get_claim_parameters", lambda: self.driver.get_claim_parameters(claim, stored.value, of_class)
        )
        return ClaimWork(
            entry=entry, claim=claim, resource_class=stored.value, class_parameters=of_class, claim_parameters=of_claim
        )

    async def _begin(self, key: ObjectKey, stored: Stored, node: str) -> Stored | None:
        """Write the finalizer and the attempt, unless the claim has them.

        None when the write lost its compare-and-set.
        """
        begun = classic_lifecycle.with_attempt(stored.value, self._name, node)
        return stored if begun is stored.value else await self._store.write(key, stored.revision, begun)

    async def _allocate(self, works: Sequence[ClaimWork], node: str) -> Sequence[classic.AllocationResult | Refusal]:
        outcomes = await self._call("allocate", lambda: self.driver.allocate(works, node))
        if len(outcomes) != len(works):
            raise PeerUnavailable(
                f"driver {self._name}: allocate gave {len(outcomes)} outcomes for {len(works)} claims"
            )
        return outcomes

    async def _settle(
        self, key: ObjectKey, begun: Stored, outcome: classic.AllocationResult | Refusal, pod: ApiObject | None
    ) -> None:
        """Write an allocation together with its pod, or the reason for a refusal."""
        if isinstance(outcome, Refusal):
            await self._set_condition(key, begun, "DoesNotFit", summarize(outcome.reasons))
            return
        reserved = classic_lifecycle.consumer_of(pod) if pod is not None else None
        done = classic_lifecycle.with_allocation(
            begun.value, self._name, outcome, now=self._now(), reserved_for=reserved
        )
        problems = check_status(classic_lifecycle.status_of(done))
        if problems:
            await self._set_condition(
                key, begun, "Invalid", f"driver {self._name} gave what cannot be written: {problems[0]}"
            )
            return
        if await self._store.write(key, begun.revision, done) is not None:
            self._metrics.decisions.labels("allocated").inc()
            self._log.info("claim.allocated", claim=name_of(done), pod=name_of(pod) if pod is not None else "")

    async def _give_back(self, key: ObjectKey, stored: Stored, status: classic.ClaimStatus) -> None:
        """Take a claim back: first the driver's devices for it, then the status, then the
        finalizer, then the object.
        """
        claim = stored.value
        if status == classic.ClaimStatus(conditions=status.conditions) and not classic_lifecycle.has_protection(
            claim, self._name
        ):
            return
        # Also without an allocation: an attempt may be half done.
        refusal = await self._call("deallocate", lambda: self.driver.deallocate(claim))
        if refusal is not None:
            await self._set_condition(key, stored, "Prepared", summarize(refusal.reasons), kind=conditions.RELEASED)
            return
        cleared = classic_lifecycle.deallocated(claim)
        if cleared != claim:
            written = await self._store.write(key, stored.revision, cleared)
            if written is None:
                return
            stored = written
        self._log.info("claim.deallocated", claim=name_of(claim), had_allocation=status.allocation is not None)
        if metadata_of(claim).deletion_timestamp and classic_lifecycle.has_protection(claim, self._name):
            await self._store.write(
                key, stored.revision, classic_lifecycle.without_protection(stored.value, self._name)
            )

    async def _report(
        self, key: ObjectKey, stored: Stored, nodes: Sequence[str], unsuitable: dict[str, dict[str, Reason]]
    ) -> None:
        """Write the nodes where the claims cannot be allocated, if they changed."""
        newest = self._state.objects.get(key)
        if newest is None or newest.revision != stored.revision:
            return
        unsuitable_nodes = {entry: [node for node in nodes if node in why] for entry, why in unsuitable.items()}
        api_object = negotiation.with_unsuitable(stored.value, unsuitable_nodes)
        if api_object.status != stored.value.status:
            await self._store.write(key, stored.revision, api_object)

    async def _report_unsuitable(self, key: ObjectKey, nodes: Sequence[str], why: dict[str, Reason]) -> None:
        stored = self._state.objects.get(key)
        if stored is None or stored.value.status.get("allocation"):
            return
        shown = [why[node].message for node in nodes[:SHOWN_NODES]]
        more = [f"and {len(nodes) - SHOWN_NODES} more nodes"] if len(nodes) > SHOWN_NODES else []
        await self._set_condition(key, stored, "DoesNotFit", "; ".join([*shown, *more]))

    async def _set_condition(
        self, key: ObjectKey, stored: Stored, reason: str, message: str, *, kind: str = conditions.ALLOCATED
    ) -> None:
        """Write a reason into the claim's condition, unless it is there already."""
        api_object = conditions.with_condition(
            stored.value, is_true=False, reason=reason, message=message, now=self._now(), kind=kind
        )
        if api_object is not stored.value:
            self._log.info("claim.waiting", claim=stored.shown, reason=reason, why=message)
            await self._store.write(key, stored.revision, api_object)

    def _is_for_this_driver(self, claim: ApiObject, status: classic.ClaimStatus) -> bool:
        """Say whether the claim belongs to this driver: by its status, its finalizer, or else its
        class.
        """
        if status.driver_name:
            return status.driver_name == self._name
        if classic_lifecycle.has_protection(claim, self._name):
            return True
        stored = self._state.objects.get(ObjectKey("resourceclass", CLUSTER, str(claim.spec.get("resourceClassName"))))
        return stored is not None and stored.value.spec.get("driverName") == self._name

    async def _call(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Call the driver. Its failures become PeerUnavailable, so the call is tried again.

        Errors: raises ContractError as the driver does, else PeerUnavailable.
        """
        try:
            async with asyncio.timeout(self._settings.classic_call_s):
                return await work()
        except TimeoutError as err:
            raise PeerUnavailable(
                f"driver {self._name}: {what} took longer than {self._settings.classic_call_s:g} s"
            ) from err
        except TopobusError:
            raise
        except (
            Exception
        ) as err:  # boundary: a third party's driver may fail in any way; its claims wait, and other claims are served
            raise PeerUnavailable(f"driver {self._name}: {what} failed: {type(err).__name__}: {err}") from err

    def _now(self) -> str:
        return rfc3339(self._clock.now())


def _may_have_work(claim: ApiObject) -> bool:
    """Say, without parsing the claim, whether it may need its driver besides a negotiation.

    Most claims of a running system do not.
    """
    status = claim.status
    if status.get("reservedFor") and isinstance(status["reservedFor"], list):
        return False
    if claim.metadata.get("deletionTimestamp") or status.get("deallocationRequested"):
        return True
    if status.get("allocation"):
        return not isinstance(status["allocation"], dict)
    return claim.spec.get("allocationMode") == classic.IMMEDIATE or not status.get("conditions")
