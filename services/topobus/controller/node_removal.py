"""Removes the records of a node that is gone: its keys in every bucket, and the present state of
its devices.

A key is deleted at the revision that was read, so a value that a service writes meanwhile stays.
Each device gets a last event. FORGET is refused while a service of the node answers, or listens
without answering. Unless it is forced, it is also refused while the node's ledger has an owner or
an operator withholds a device. The machine is deleted first, so an interrupted removal leaves a
node without a machine. The ledger is deleted last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from topobus.bus.bus import AmbiguousWrite, Bus, Conflict, Entry, Received, Unreadable
from topobus.bus.server_config.up_subjects import up_nouns
from topobus.engine.health.silence import Answered, Silent, SilentBecause
from topobus.formats.messages.catalogue import DECISION, FORGET, HINT, INVENTORY, LEDGER, LINK, PREFER
from topobus.formats.messages.device_classes import DEVICE_SERVICES
from topobus.formats.messages.forget_messages import ForgetReply, ForgetRequest, ForgottenKey, KeyOutcome
from topobus.formats.messages.messages import DisagreementEvent, HealthEvent
from topobus.formats.messages.nouns import CLUSTER, Ask, Event, State
from topobus.formats.messages.operation_messages import ClassMaintenance
from topobus.process.clock import Clock
from topobus.process.logging import get_logger
from topobus.values.errors import PeerUnavailable
from topobus.values.ledger import Ledger
from topobus.values.node_text import counted, first_of
from topobus.values.outcome import Reason, Refusal
from topobus.values.timestamps import rfc3339

__all__ = ["NodeRemoval"]

# A service that is well answers within milliseconds. One that listens and does not answer may be
# starting, or hang.
_PATIENCE_S = 2.0
# Servers before this release do not report that another account has no listener: such a request
# waits for its whole time-out.
_REPORTS_ABSENCE_ELSEWHERE = (2, 10, 0)
_SHOWN = 16


@dataclass(frozen=True)
class _Key:
    """A key and the one bucket in which it was found."""

    bucket: State[Any]
    parts: dict[str, str]
    revision: int
    value: Any
    """The newest value that can be read, or None."""

    def with_outcome(self, outcome: KeyOutcome, why: str = "") -> ForgottenKey:
        """Add the outcome of the deletion."""
        return ForgottenKey(bucket=self.bucket.bucket, key=self.bucket.key(**self.parts), outcome=outcome, why=why)


class NodeRemoval:
    """Answers FORGET."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def begin(self) -> None:
        """Answer from now on, one request at a time."""
        await self._bus.answer(FORGET, self.forget, concurrency=1, node=CLUSTER)

    async def forget(self, request: ForgetRequest) -> ForgetReply:
        """Remove the records of a node, or return why not. A repeated request continues with what
        is left.

        Errors: raises PeerUnavailable when the records cannot be read, or when it cannot be found
        out whether the node is gone. Nothing was removed then.
        """
        node = request.node
        keys = await self._keys_of(node)
        events = [
            (event, received)
            for event in _events()
            for received in await self._bus.present(event, node=node)
            if not _is_over(received)
        ]
        counts = {event.stream: sum(1 for each, _ in events if each is event) for event in _events()}
        present = ForgetReply(
            node=node, keys=tuple(key.with_outcome(KeyOutcome.PRESENT) for key in keys), events=counts
        )
        if not keys and not events:
            return present
        refusal = await self._why_not_gone(node, keys)
        if refusal is None and not request.is_forced:
            refusal = _why_not_given_up(node, keys)
        if refusal is not None or request.is_dry_run:
            return structs.replace(present, refusal=refusal)
        outcomes = await self._remove(keys)
        if all(key.outcome is KeyOutcome.REMOVED for key in outcomes):
            for event, received in events:
                await self._end(event, received)
        else:
            counts = {}
        get_logger().info(
            "node.forgotten",
            of=node,
            removed=sum(key.outcome is KeyOutcome.REMOVED for key in outcomes),
            left=[f"{key.bucket}/{key.key}" for key in outcomes if key.outcome is not KeyOutcome.REMOVED][:_SHOWN],
            events=counts,
            is_forced=request.is_forced,
        )
        return ForgetReply(node=node, keys=outcomes, events=counts)

    async def _keys_of(self, node: str) -> list[_Key]:
        """Find the keys that name a node, each in its bucket, in the order of deletion."""
        keys = []
        for state in _states():
            for bucket in state.buckets():
                # The common bucket may have what a relay wrote of a class with a bucket of its own.
                alone: State[Any] = State(**{**vars(bucket), "classes_apart": ()})
                for parts in await self._bus.keys(alone, node=node):
                    stored = await self._bus.get_or_last(alone, **parts)
                    if stored is not None:
                        keys.append(_Key(alone, parts, stored.revision, _readable(stored)))
        return keys

    async def _why_not_gone(self, node: str, keys: Sequence[_Key]) -> Refusal | None:
        """Ask for signs of life of the node's services.

        The connection of a dead service is closed, and its server reports that the subject has no
        listener.
        """
        classes = sorted(
            {*DEVICE_SERVICES, *(key.parts["device_class"] for key in keys if key.bucket.name == INVENTORY.name)}
        )
        asked: list[tuple[str, Ask[Any, Any], dict[str, str]]] = [("topology", PREFER, {}), ("relay", LINK, {})]
        asked += [(device_class, HINT, {"device_class": device_class}) for device_class in classes]
        signs = await asyncio.gather(
            *(self._bus.is_answered(ask, timeout_s=_PATIENCE_S, node=node, **parts) for _, ask, parts in asked)
        )
        if Silent(because=SilentBecause.NO_BUS) in signs:
            raise PeerUnavailable(f"it is not known whether node {node} is gone: NATS went away", next_step="ask again")
        answers = {name: sign for (name, _, _), sign in zip(asked, signs, strict=True)}
        alive = tuple(name for name, sign in answers.items() if isinstance(sign, Answered))
        in_our_account = (
            ("topology", "relay") if self._bus.server_version < _REPORTS_ABSENCE_ELSEWHERE else tuple(answers)
        )
        hanging = tuple(name for name in in_our_account if answers[name] == Silent(because=SilentBecause.TIMEOUT))
        reasons = []
        if alive:
            message = (
                f"node {node} is not gone: {', '.join(alive)} answers there, and would write again what is removed"
            )
            reasons.append(Reason(code="node-alive", message=message, facts={"node": node, "services": alive}))
        if hanging:
            message = (
                f"node {node} may not be gone: {', '.join(hanging)} listens there, and did not answer for "
                f"{_PATIENCE_S:g} s"
            )
            reasons.append(Reason(code="node-alive", message=message, facts={"node": node, "services": hanging}))
        return Refusal(reasons=tuple(reasons)) if reasons else None

    async def _remove(self, keys: Sequence[_Key]) -> tuple[ForgottenKey, ...]:
        """Delete key by key at the revisions that were read.

        Stops at the first key that was written meanwhile, for then the node is not gone.
        """
        outcomes: list[ForgottenKey] = []
        for key in keys:
            if outcomes and outcomes[-1].outcome is not KeyOutcome.REMOVED:
                outcomes.append(key.with_outcome(KeyOutcome.KEPT, "not tried: a key before it is left"))
                continue
            try:
                conflict = await self._bus.compare_and_delete(key.bucket, key.revision, **key.parts)
            except AmbiguousWrite as err:
                outcomes.append(key.with_outcome(KeyOutcome.UNKNOWN, err.message))
            except PeerUnavailable as err:
                outcomes.append(key.with_outcome(KeyOutcome.KEPT, err.message))
            else:
                is_kept = isinstance(conflict, Conflict)
                outcomes.append(
                    key.with_outcome(KeyOutcome.KEPT, "somebody wrote it just now: a service of the node runs")
                    if is_kept
                    else key.with_outcome(KeyOutcome.REMOVED)
                )
        return tuple(outcomes)

    async def _end(self, event: Event[Any], received: Received[Any]) -> None:
        """Publish that a device's present state is over. Subscribers that start later begin with
        the newest event of each device.
        """
        now = rfc3339(self._clock.now())
        value = received.value
        ended = (
            structs.replace(
                value,
                previous=value.health.state,
                generation=value.generation + 1,
                is_removed=True,
                affected=(),
                pods=(),
                time=now,
            )
            if isinstance(value, HealthEvent)
            else structs.replace(value, is_over=True, time=now)
        )
        event_id = f"forget-{'-'.join(received.parts.values())}-{received.sequence}"
        await self._bus.publish(event, ended, event_id=event_id, **received.parts)


def _states() -> Iterator[State[Any]]:
    """Yield the states of a node: its machine first, its ledger last."""
    states = [noun for noun in up_nouns() if isinstance(noun, State) and noun is not LEDGER]
    yield from (*states, LEDGER)


def _events() -> Iterator[Event[Any]]:
    """Yield the events whose newest message is a present state. Decisions are past events."""
    yield from (noun for noun in up_nouns() if isinstance(noun, Event) and noun is not DECISION)


def _is_over(received: Received[Any]) -> bool:
    value = received.value
    return (
        value.is_removed if isinstance(value, HealthEvent) else isinstance(value, DisagreementEvent) and value.is_over
    )


def _readable(stored: Entry[Any] | Unreadable[Any]) -> Any:
    """Give a value, or the newest that can be read in place of one that cannot."""
    if isinstance(stored, Unreadable):
        return stored.last.value if stored.last is not None else None
    return stored.value


def _why_not_given_up(node: str, keys: Sequence[_Key]) -> Refusal | None:
    """Name what is lost with a node's records: the owners in its ledger, and the devices that an
    operator withholds.
    """
    holders = sorted(
        str(allocation.shown)
        for key in keys
        if isinstance(key.value, Ledger)
        for allocation in key.value.allocations.values()
    )
    withheld = sorted(device for key in keys if isinstance(key.value, ClassMaintenance) for device in key.value.devices)
    reasons = []
    if holders:
        message = (
            f"by the ledger of node {node} {counted(len(holders), 'owner')} "
            f"{'holds' if len(holders) == 1 else 'hold'} something there: "
            f"{first_of(holders, _SHOWN)}; these entries would be lost"
        )
        reasons.append(
            Reason(
                code="node-holds",
                message=message,
                facts={"node": node, "owners": tuple(holders[:_SHOWN]), "count": len(holders)},
            )
        )
    if withheld:
        message = (
            f"an operator has withheld {counted(len(withheld), 'device')} of node {node}: "
            f"{first_of(withheld, _SHOWN)}; they would be offered again when the node comes back"
        )
        reasons.append(
            Reason(
                code="node-keeps-back",
                message=message,
                facts={"node": node, "devices": tuple(withheld[:_SHOWN]), "count": len(withheld)},
            )
        )
    return Refusal(reasons=tuple(reasons)) if reasons else None
