"""The five requests that topology answers: place, prefer, adopt, commit, release.

Expected answers are values. Only a peer that does not answer is an error.
"""

from __future__ import annotations

import asyncio

from msgspec import structs

from topobus.bus.bus import Bus
from topobus.engine.alignment.planning.node_view import with_devices
from topobus.engine.alignment.planning.placement import place, prefer
from topobus.engine.alignment.planning.resource_pools import class_of_resource, named_by_class
from topobus.engine.ledger import transitions
from topobus.engine.ledger.adoptions import adopted_cpus, read_adoption
from topobus.engine.ledger.decision_events import decision_id, request_of_devices
from topobus.engine.ledger.transitions import Step
from topobus.engine.ledger.write_limits import (
    complaint_of_devices,
    complaint_of_memory,
    complaint_of_operation,
    complaint_of_pod,
    complaint_of_pods,
    complaint_of_shares,
)
from topobus.formats.messages.catalogue import HINT
from topobus.formats.messages.messages import (
    Adopted,
    AdoptReply,
    AdoptRequest,
    CommitReply,
    CommitRequest,
    DecisionEvent,
    HintsRequest,
    PlaceReply,
    PlaceRequest,
    PreferReply,
    PreferRequest,
    ReleaseReply,
    ReleaseRequest,
)
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.topology.announcer import Announcer
from topobus.topology.ledger_store import Decide, LedgerStore
from topobus.topology.metrics import TopologyMetrics
from topobus.topology.node_inputs import NodeInputs
from topobus.values.dra_names import CPU_CLASS
from topobus.values.errors import ContractError, PeerUnavailable
from topobus.values.idset import NodeSet
from topobus.values.ledger import AllocationPhase, Ledger, OperationRecord, PendingDecision
from topobus.values.outcome import Placement, Refusal, refuse
from topobus.values.pools import resource_split
from topobus.values.request import Owner, PodRequest
from topobus.values.timestamps import rfc3339
from topobus.values.view import NodeView

__all__ = ["AskHandlers"]


class AskHandlers:
    """Handlers of the five requests.

    Errors: each raises ContractError for a request out of bounds.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        node: str,
        inputs: NodeInputs,
        store: LedgerStore,
        announcer: Announcer,
        clock: Clock,
        metrics: TopologyMetrics,
        hint_timeout_s: float,
    ) -> None:
        self._bus = bus
        self._node = node
        self._inputs = inputs
        self._store = store
        self._announcer = announcer
        self._clock = clock
        self._metrics = metrics
        self._hint_timeout_s = hint_timeout_s
        # One plan at a time, before the ledger's lock is taken. So a release, an adoption or a
        # commit waits for two plans at most: the one being made and the next one.
        self._planning = asyncio.Lock()

    async def place(self, asked: PlaceRequest) -> PlaceReply:
        """Place a pod, or return a refusal with its reasons. A dry run writes nothing.

        Errors: raises PeerUnavailable.
        """
        began = self._clock.monotonic()
        _accept(
            complaint_of_operation(asked.op_id, asked.pod.owner)
            or complaint_of_pod(asked.pod)
            or complaint_of_devices(asked.besides)
        )
        if asked.is_dry_run:
            return await self._dry_run(asked, began)

        async def decide(ledger: Ledger) -> Step:
            view = await self._view(ledger, asked.pod, asked.op_id)
            outcome = await asyncio.to_thread(place, view, asked.pod)
            pending = self._pending(ledger, asked.pod.owner, asked.pod, view)
            if isinstance(outcome, Refusal):
                return _refused(ledger, "place", asked.op_id, outcome, pending)
            return transitions.reserve(
                ledger,
                op_id=asked.op_id,
                request=asked.pod,
                placement=outcome,
                decision_id=decision_id(ledger, asked.op_id),
                phase=AllocationPhase.RESERVED if asked.is_reservation else AllocationPhase.COMMITTED,
                pending=pending,
            )

        async with self._planning:
            step = await self._change("place", asked.op_id, asked.pod.owner, decide, began)
        record = step.record
        reused = _reused(asked.op_id, record, "place", asked.pod.owner)
        outcome = reused or transitions.placed_by(self._store.ledger, record)
        return PlaceReply(
            decision_id=record.decision_id, node=self._node, result=outcome, ledger_sequence=self._store.ledger.sequence
        )

    async def prefer(self, asked: PreferRequest) -> PreferReply:
        """Choose the best of the available devices. It never refuses."""
        began = self._clock.monotonic()
        try:
            view = self._inputs.view(self._store.ledger)
        except PeerUnavailable:
            # kubelet treats an error as fatal for the pod, so a choice by name without alignment is
            # better than none.
            rest = sorted(set(asked.available) - set(asked.must_include), reverse=asked.is_from_end)
            rest.sort(key=lambda name: name in asked.withheld)
            chosen = (*asked.must_include, *rest)[: max(asked.size, len(asked.must_include))]
            return PreferReply(devices=tuple(chosen), reason="by name: the machine is not known yet")
        devices, reason = prefer(
            view,
            asked.device_class,
            asked.available,
            asked.must_include,
            asked.size,
            withheld=asked.withheld,
            is_from_end=asked.is_from_end,
        )
        self._count("prefer", "placed", began)
        get_logger().debug(
            "devices.preferred", device_class=asked.device_class, size=asked.size, devices=devices, reason=reason
        )
        return PreferReply(devices=devices, reason=reason)

    async def adopt(self, asked: AdoptRequest) -> AdoptReply:
        """Record what kubelet or a claim decided.

        Refused when a live pod or claim holds one of the devices.
        """
        began = self._clock.monotonic()
        _accept(
            complaint_of_operation(asked.op_id, asked.owner)
            or complaint_of_devices(asked.devices)
            or complaint_of_shares(asked.shares)
            or complaint_of_memory(asked.memory)
            or complaint_of_pods(asked.pods, asked.container)
        )
        if not asked.names_pods_of:
            await self._inputs.wait_listed(asked.devices, asked.shared)

        async def decide(ledger: Ledger) -> Step:
            if asked.names_pods_of:
                return transitions.name_pods(
                    ledger,
                    op_id=asked.op_id,
                    owner=asked.owner,
                    decision_id=asked.names_pods_of,
                    pods=asked.pods,
                    container=asked.container,
                )
            made = decision_id(ledger, asked.op_id)
            request = request_of_devices(
                asked.owner, asked.devices, asked.shared, asked.shares, is_shared=asked.is_shared
            )
            pending = self._pending(ledger, asked.owner, request, None)
            view, cpus = self._inputs.bare_view(), self._inputs.inventories.get(CPU_CLASS)
            taken = read_adoption(asked, ledger, view, cpus.devices if cpus is not None else ())
            step: Step | Refusal = (
                taken
                if isinstance(taken, Refusal)
                else transitions.adopt(
                    ledger, taken.adoption, op_id=asked.op_id, decision_id=made, groups=taken.groups, pending=pending
                )
            )
            return _refused(ledger, "adopt", asked.op_id, step, pending) if isinstance(step, Refusal) else step

        record = (await self._change("adopt", asked.op_id, asked.owner, decide, began)).record
        reused = _reused(asked.op_id, record, "adopt", asked.owner)
        cpus = adopted_cpus(asked, self._store.ledger, record) if reused is None else reused
        if isinstance(cpus, Refusal):
            return AdoptReply(result=cpus)
        adopted = Adopted(
            decision_id=record.decision_id,
            ledger_sequence=self._store.ledger.sequence,
            displaced=record.displaced,
            cpus=cpus,
        )
        return AdoptReply(result=adopted)

    async def commit(self, asked: CommitRequest) -> CommitReply:
        """Commit a reservation. Refused when it no longer exists."""
        began = self._clock.monotonic()
        _accept(complaint_of_operation(asked.op_id, asked.owner))

        async def decide(ledger: Ledger) -> Step:
            made, pending = decision_id(ledger, asked.op_id), self._pending(ledger, asked.owner, None, None)
            step = transitions.commit(ledger, op_id=asked.op_id, owner=asked.owner, decision_id=made, pending=pending)
            return _refused(ledger, "commit", asked.op_id, step, pending) if isinstance(step, Refusal) else step

        record = (await self._change("commit", asked.op_id, asked.owner, decide, began)).record
        refusal = _reused(asked.op_id, record, "commit", asked.owner)
        if refusal is None and isinstance(record.outcome, Refusal):
            refusal = record.outcome
        return CommitReply(refusal=refusal, ledger_sequence=self._store.ledger.sequence)

    async def release(self, asked: ReleaseRequest) -> ReleaseReply:
        """Release what an owner holds. It is no error when the owner holds nothing. Devices that
        are prepared stay allocated.

        Errors: raises ContractError for an operation id that was used for another operation.
        """
        began = self._clock.monotonic()
        _accept(complaint_of_operation(asked.op_id, asked.owner))

        async def decide(ledger: Ledger) -> Step:
            held = ledger.allocations.get(asked.owner.key)
            pending = structs.replace(
                self._pending(ledger, asked.owner, None, None), user=held.user if held is not None else None
            )
            step = transitions.release(
                ledger,
                op_id=asked.op_id,
                owner=asked.owner,
                decision_id=decision_id(ledger, asked.op_id),
                is_undone=asked.is_undone,
                keeps_devices=asked.keeps_devices,
                only=asked.decision_id,
                pending=pending,
            )
            if isinstance(step, Refusal):
                # The refusal is not stored, because it changes nothing, and the same operation
                # succeeds as soon as the preparation is undone.
                return Step(
                    ledger=ledger,
                    record=OperationRecord(verb="release", owner_key=asked.owner.key, outcome=step),
                    is_repeat=True,
                )
            return step

        record = (await self._change("release", asked.op_id, asked.owner, decide, began)).record
        reused = _reused(asked.op_id, record, "release", asked.owner)
        if reused is not None:
            raise ContractError(reused.reasons[0].message)
        refusal = record.outcome if isinstance(record.outcome, Refusal) else None
        return ReleaseReply(refusal=refusal, devices=record.devices, ledger_sequence=self._store.ledger.sequence)

    async def _dry_run(self, asked: PlaceRequest, began: float) -> PlaceReply:
        ledger = self._store.ledger
        who = asked.pod.owner
        view = with_devices(
            await self._view(ledger, asked.pod, asked.op_id),
            f"claim/{who.namespace}/claims-of-{who.name}/-",
            asked.besides,
        )
        async with self._planning:
            # Threads are few, and a dry run's plan must not take the one that a decision needs.
            outcome = await asyncio.to_thread(place, view, asked.pod)
        made = decision_id(ledger, asked.op_id, is_dry_run=True)
        self._announcer.publish_dry_run(
            DecisionEvent(
                id=made,
                verb="place",
                node=self._node,
                op_id=asked.op_id,
                time=rfc3339(self._clock.now()),
                owner=asked.pod.owner,
                request=asked.pod,
                view=view,
                outcome=outcome,
                ledger_sequence=ledger.sequence,
                is_dry_run=True,
            )
        )
        self._count("dry-run", "refused" if isinstance(outcome, Refusal) else "placed", began)
        return PlaceReply(decision_id=made, node=self._node, result=outcome, ledger_sequence=ledger.sequence)

    async def _change(self, verb: str, op_id: str, owner: Owner, decide: Decide, began: float) -> Step:
        """Decide and write. When the operation is already recorded, return its record."""

        async def decide_once(ledger: Ledger) -> Step:
            operation_record = transitions.recorded_operation(ledger, op_id)
            return (
                await decide(ledger)
                if operation_record is None
                else Step(ledger=ledger, record=operation_record, is_repeat=True)
            )

        step = await self._store.change(decide_once)
        if step.is_repeat:
            get_logger().debug("operation.repeated", op_id=op_id, verb=verb)
            return step
        self._announcer.wake()
        self._log(verb, op_id, owner, step.record, began)
        return step

    def _log(self, verb: str, op_id: str, owner: Owner, record: OperationRecord, began: float) -> None:
        is_refused = isinstance(record.outcome, Refusal)
        self._count(verb, "refused" if is_refused else "done", began)
        facts = {
            "owner": owner.key,
            "op_id": op_id,
            "decision_id": record.decision_id,
            "elapsed_ms": round((self._clock.monotonic() - began) * 1000, 3),
        }
        if isinstance(record.outcome, Refusal):
            codes = [reason.code for reason in record.outcome.reasons]
            self._metrics.refusals.labels(verb, codes[0] if codes else "").inc()
            get_logger().info(
                {"place": "pod.refused", "adopt": "adoption.refused"}.get(verb, "reservation.refused"),
                reasons=codes,
                **facts,
            )
        elif isinstance(record.outcome, Placement):
            placed = [
                {
                    "container": container.name,
                    "numa_nodes": str(container.numa_nodes),
                    "cpus": str(container.cpus),
                    "devices": container.devices,
                }
                for container in record.outcome.containers
            ]
            get_logger().info("pod.placed", containers=placed, **facts)
        elif verb == "adopt":
            get_logger().info("devices.adopted", displaced=[each_owner.key for each_owner in record.displaced], **facts)
        elif verb == "commit":
            get_logger().info("reservation.committed", **facts)
        else:
            get_logger().info("devices.released", devices=record.devices, **facts)

    def _count(self, verb: str, outcome: str, began: float) -> None:
        self._metrics.decisions.labels(verb, outcome).inc()
        self._metrics.decision_s.labels(verb).observe(self._clock.monotonic() - began)

    def _pending(
        self, ledger: Ledger, owner: Owner, request: PodRequest | None, view: NodeView | None
    ) -> PendingDecision:
        return PendingDecision(
            owner=owner,
            time=rfc3339(self._clock.now()),
            ledger_sequence=ledger.sequence + 1,
            request=request,
            view=view,
        )

    async def _view(self, ledger: Ledger, pod: PodRequest, op_id: str) -> NodeView:
        """Return the node as the plan uses it, with the hints of services that give their own."""
        view = self._inputs.view(ledger)
        pod = named_by_class(view, pod)
        asks = sorted(
            {
                (device.device_class, device.count)
                for container in pod.containers
                for device in container.devices
                if not device.names
                and device.count > 0
                and self._has_custom_hints(class_of_resource(view, device.device_class))
            }
        )
        if not asks:
            return view
        async with asyncio.TaskGroup() as group:
            answers = {ask: group.create_task(self._hints(view, op_id, *ask)) for ask in asks}
        custom: dict[str, tuple[tuple[NodeSet | None, bool], ...]] = {}
        silent: set[str] = set()
        for (resource, count), task in answers.items():
            hints = task.result()
            if hints is None:
                silent.add(resource)
            else:
                custom[f"{resource}/{count}"] = hints
        return structs.replace(view, custom_hints=custom, silent_classes=tuple(sorted(silent)))

    def _has_custom_hints(self, device_class: str) -> bool:
        inventory = self._inputs.inventories.get(device_class)
        return inventory is not None and inventory.has_custom_hints

    async def _hints(
        self, view: NodeView, op_id: str, resource: str, count: int
    ) -> tuple[tuple[NodeSet | None, bool], ...] | None:
        """Request one service's hints. None when it did not answer in time."""
        device_class = class_of_resource(view, resource)
        held = view.held_devices.get(device_class, {})
        offered = resource_split(view.devices.get(device_class, ()), tuple(view.devices)).get(resource, ())
        available = tuple(device.name for device in offered if device.is_allocatable and device.name not in held)
        try:
            reply = await self._bus.ask(
                HINT,
                HintsRequest(op_id=op_id, count=count, available=available),
                timeout_s=self._hint_timeout_s,
                node=self._node,
                device_class=device_class,
            )
        except (PeerUnavailable, ContractError) as err:
            self._metrics.silent_hints.labels(device_class).inc()
            get_logger().warning("hints.missing", device_class=device_class, error=str(err))
            return None
        # "No opinion" is one hint without nodes, which is compatible with every other hint.
        return ((None, True),) if reply.hints is None else tuple((hint.nodes, hint.preferred) for hint in reply.hints)


def _accept(complaint: str) -> None:
    if complaint:
        raise ContractError(complaint)


def _refused(ledger: Ledger, verb: str, op_id: str, refusal: Refusal, pending: PendingDecision) -> Step:
    """Store a refusal as the operation's answer."""
    return transitions.record_refusal(
        ledger,
        op_id=op_id,
        verb=verb,
        owner=pending.owner,
        decision_id=decision_id(ledger, op_id),
        refusal=refusal,
        pending=pending,
    )


def _reused(op_id: str, record: OperationRecord, verb: str, owner: Owner) -> Refusal | None:
    """Refuse an operation id that was used for another operation or owner: its stored answer would
    give one owner's devices to another.
    """
    if (record.verb, record.owner_key) == (verb, owner.key):
        return None
    message = (
        f"operation {op_id} was a {record.verb} for {record.owner_key}, not a {verb} for {owner.key}: choose "
        "another op_id"
    )
    return refuse("operation-reused", message, op_id=op_id, verb=record.verb)
