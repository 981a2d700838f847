"""`topobus decisions`: the last decisions, newest last, or the decisions from now on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable
from typing import Annotated

from cyclopts import Parameter, validators
from rich import box
from rich.table import Table
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.answers import short_time, summary
from topobus.contracts.catalogue import DECISION, LEDGER
from topobus.contracts.messages import DecisionEvent
from topobus.domain.ledger import Holders
from topobus.domain.outcome import Refusal
from topobus.domain.request import Owner, OwnerKind
from topobus.runtime.bus import Bus, Start

__all__ = ["decisions"]


def decisions(
    *,
    node: Annotated[str | None, Parameter(help="Only this node.")] = None,
    limit: Annotated[int, Parameter(help="At most so many, the newest.", validator=validators.Number(gte=1, lte=4096))] = 20,
    follow: Annotated[bool, Parameter(negative="", help="Then go on with each new one.")] = False,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List decisions: what was asked for whom and what the answer was."""
    return asyncio.run(_decisions(node, limit, follow, options))


async def _decisions(node: str | None, limit: int, is_following: bool, options: BusOptions) -> int:
    output = options.output()
    parts = {"node": node} if node is not None else {}
    async with open_bus(options) as bus:
        recent = await bus.last(DECISION, limit=limit, **parts)
        if output.is_json and not is_following:
            output.document({"decisions": [received_event.value for received_event in recent]})
        elif not is_following:
            table = Table(box=box.SIMPLE_HEAD, header_style="title")
            # An id is there to be copied: it never breaks, however long the rest is.
            table.add_column("time", no_wrap=True)
            table.add_column("decision", no_wrap=True)
            table.add_column("what", overflow="fold")
            table.add_column("answer", overflow="fold")
            users = await _users(bus, [received_event.value for received_event in recent])
            for received_event in recent:
                event = received_event.value
                who = event.user or users.get(event.id) or event.owner
                what = operation_text(event) or f"{event.verb} {who}"
                table.add_row(short_time(event.time), Text(event.id, "name"), what, _answer(event))
            output.show(table if recent else Text("no decision yet", "faint"))
        if not is_following:
            return ExitCode.OK
        me = asyncio.current_task()
        assert me is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
        seen = recent[0].sequence if recent else 0
        with contextlib.suppress(asyncio.CancelledError):
            async with contextlib.aclosing(bus.follow(DECISION, start=Start.ALL, on_waiting=None, **parts)) as events:
                async for received in events:
                    if received.sequence < seen:
                        continue
                    if output.is_json:
                        output.line(received.value)
                    else:
                        event = received.value
                        head = Text.assemble(
                            (f"{short_time(event.time)}  ", "faint"),
                            (event.id, "name"),
                            f"  {operation_text(event) or f'{event.verb} {event.user or event.owner}'} at {event.node}: ",
                        )
                        output.show(head + _answer(event))
    return ExitCode.OK


async def _users(bus: Bus, events: Iterable[DecisionEvent]) -> dict[str, Owner]:
    """Find the pods of what kubelet has allocated and still holds, by decision: the event is older than the pod's name is known."""
    owners: dict[str, Owner] = {}
    for node in sorted({event.node for event in events if event.owner.kind is OwnerKind.DEVICE_PLUGIN}):
        ledger = await bus.get(LEDGER.read_as(Holders), node=node)
        for allocation in ledger.value.allocations.values() if ledger is not None else ():
            if allocation.user is not None:
                owners[allocation.decision_id] = allocation.user
    return owners


def operation_text(event: DecisionEvent) -> str:
    """Say what an operator did with a device, who and why; empty for other decisions."""
    operation = event.operation
    if operation is None:
        return ""
    why = f" ({operation.why})" if operation.why else ""
    return f"{event.verb} {operation.device} by {operation.who}{why}"


def _answer(event: DecisionEvent) -> Text:
    text = Text(summary(event.outcome), "fail" if isinstance(event.outcome, Refusal) else "ok")
    if event.is_dry_run:
        text.append(" (dry run)", "faint")
    return text
