"""`topobus decisions`: the last decisions, newest last, or the decisions from now on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Mapping
from typing import Annotated

from cyclopts import Parameter, validators
from rich.text import Text

from topobus.bus.bus import Bus, Start
from topobus.cli.exits import ExitCode
from topobus.cli.listing.list_options import LIST_DEFAULTS, Lister, ListOptions
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NodeFilter, cancel_at, check_known, open_bus
from topobus.cli.render.gaps import Gaps
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.formats.messages.catalogue import DECISION, LEDGER
from topobus.formats.messages.messages import OUTCOME, DecisionEvent
from topobus.values.ledger import Holders
from topobus.values.outcome import Refusal
from topobus.values.request import Owner, OwnerKind
from topobus.values.timestamps import short_time

__all__ = ["decision_listing", "decisions"]


async def decisions(
    *,
    node: NodeFilter = None,
    limit: Annotated[
        int, Parameter(help="At most this number, the newest.", validator=validators.Number(gte=1, lte=4096))
    ] = 20,
    follow: Annotated[bool, Parameter(help="Then print each new one; the same as -w.")] = False,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List decisions: what was requested for which owner, and the answer."""
    lister = listing.lister(is_json=options.json)
    parts = {"node": node} if node is not None else {}
    async with open_bus(options) as bus:
        await check_known(bus, node=node)
        recent = await bus.last(DECISION, limit=limit, **parts)
        if not (follow or listing.watch):
            events = [received_event.value for received_event in recent]
            lister.show(
                [decision_listing(events, await _users(bus, events))],
                lambda rows: {"decisions": [row.document for row in rows]},
                empty="no decision yet",
                thing="decision",
            )
            return ExitCode.OK
        cancel_at(signal.SIGTERM)
        seen = recent[0].sequence if recent else 0
        gaps = Gaps(lister.output(), "decisions", is_stored=True)

        def note_replaced() -> None:
            nonlocal seen
            # Sequences start again.
            seen = 0
            gaps.note_replaced()

        with contextlib.suppress(asyncio.CancelledError), gaps.telling(bus):
            following = bus.follow(DECISION, start=Start.ALL, on_waiting=None, on_replaced=note_replaced, **parts)
            async with contextlib.aclosing(following) as received_events:
                async for received in received_events:
                    if received.sequence >= seen:
                        _show_new(lister, received.value)
    return ExitCode.OK


def _show_new(lister: Lister, event: DecisionEvent) -> None:
    row = _row(event, event.user or event.owner)
    if not lister.selector.selects(row.labels):
        return
    if not lister.is_text:
        lister.show_row(lister.output(), row)
        return
    head = Text.assemble(
        (f"{short_time(event.time)}  ", "faint"), (event.id, "name"), f"  {event.text} at {event.node}: "
    )
    lister.output().show(head + _answer(event))


def decision_listing(events: Iterable[DecisionEvent], users: Mapping[str, Owner]) -> Listing:
    """List decisions in their order. `users` maps decisions of kubelet's allocations to their pods.

    An operator's request has one row, which shows its outcome once that is decided.
    """
    events = list(events)
    ended = {event.op_id for event in events}
    events = [event for event in events if not (event.is_begun and f"{event.op_id}{OUTCOME}" in ended)]
    return Listing(
        columns=(
            Column(title="time", fit=Fit.NAME),
            Column(title="decision", fit=Fit.ID),
            Column(title="what"),
            Column(title="answer"),
            Column(title="node", fit=Fit.NAME, is_wide=True),
            Column(title="operation", fit=Fit.ID, is_wide=True),
        ),
        rows=tuple(_row(event, event.user or users.get(event.id) or event.owner) for event in events),
    )


def _row(event: DecisionEvent, who: Owner) -> Row:
    has_device = event.operation is not None or event.repair is not None
    what = event.text if has_device else f"{event.verb} {who}"
    is_refused = isinstance(event.outcome, Refusal)
    return Row(
        name=event.id,
        cells=(short_time(event.time), Text(event.id, "name"), what, _answer(event), event.node, event.op_id or "-"),
        document=event,
        labels={
            "node": event.node,
            "verb": event.verb,
            "kind": who.kind.value,
            "namespace": who.namespace,
            "name": who.name,
            "answer": "refused" if is_refused else "placed" if event.outcome is not None else event.answer,
            "dry-run": str(event.is_dry_run).lower(),
        },
    )


async def _users(bus: Bus, events: Iterable[DecisionEvent]) -> dict[str, Owner]:
    """Find the pods of what kubelet has allocated and still holds, by decision: the event is
    written before the pod's name is known.
    """
    owners: dict[str, Owner] = {}
    for node in sorted({event.node for event in events if event.owner.kind is OwnerKind.DEVICE_PLUGIN}):
        ledger = await bus.get(LEDGER.read_as(Holders), node=node)
        for allocation in ledger.value.allocations.values() if ledger is not None else ():
            if allocation.user is not None:
                owners[allocation.decision_id] = allocation.user
    return owners


def _answer(event: DecisionEvent) -> Text:
    text = Text(event.answer, "fail" if isinstance(event.outcome, Refusal) else "ok")
    if event.is_dry_run:
        text.append(" (dry run)", "faint")
    return text
