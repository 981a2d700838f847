"""`topobus forget node`: removes the records of nodes that are gone, from every bucket."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.bus.bus import Bus, NobodyThere
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.fleet_inventories import nodes_without_a_machine
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus
from topobus.cli.render.answers import reason_lines
from topobus.cli.render.output import Output
from topobus.formats.messages.catalogue import FORGET
from topobus.formats.messages.forget_messages import ForgetReply, ForgetRequest, KeyOutcome
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.errors import PeerUnavailable
from topobus.values.node_text import counted

__all__ = ["forget_app"]

forget_app = App(name="forget", help="Remove what is stored about nodes that are gone.")

_VERBS = {
    KeyOutcome.PRESENT: "is there",
    KeyOutcome.REMOVED: "removed",
    KeyOutcome.KEPT: "kept",
    KeyOutcome.UNKNOWN: "not confirmed: it may be removed or not",
}


@forget_app.command(name="node")
async def forget_node(
    *nodes: Annotated[str, Parameter(name="NODE", help="The node; several may be named.")],
    without_machine: Annotated[
        bool,
        Parameter(
            help="All nodes that have inventories and no machine: discovery never ran there, or another program "
            "invented them."
        ),
    ] = False,
    is_dry_run: Annotated[
        bool, Parameter(name="--dry-run", help="Print what would be removed; remove nothing.")
    ] = False,
    force: Annotated[
        bool,
        Parameter(
            help="Also when the node's ledger holds devices, or an operator has withheld devices there: these entries "
            "are lost."
        ),
    ] = False,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Remove machine, inventories, ledger and all else that names a node, once its services have
    ended.

    If owners hold devices there, it asks first.
    """
    if bool(nodes) == without_machine:
        raise UsageError(
            "wanted nodes: NODE, or --without-machine for all that have no machine",
            next_step="such as `topobus forget node n38 --dry-run`",
        )
    output = options.output()
    replies: list[ForgetReply] = []
    async with open_bus(options, NamesSystem.IF_SEVERAL if is_dry_run else NamesSystem.ALWAYS) as bus:
        for node in dict.fromkeys(nodes or await nodes_without_a_machine(bus)):
            reply = await _ask(bus, ForgetRequest(node=node, is_dry_run=is_dry_run, is_forced=force))
            replies.append(reply)
            _show(output, reply, is_dry_run=is_dry_run)
    if not replies:
        output.note("every node that has inventories has a machine")
    output.document({"forgotten": replies} | ({"dry_run": True} if is_dry_run else {}))
    outcomes = {key.outcome for reply in replies for key in reply.keys}
    if KeyOutcome.UNKNOWN in outcomes:
        raise PeerUnavailable(
            "NATS did not confirm all of it", next_step="give the same command again: it removes what is still there"
        )
    return (
        ExitCode.NO
        if KeyOutcome.KEPT in outcomes or any(reply.refusal is not None for reply in replies)
        else ExitCode.OK
    )


async def _ask(bus: Bus, request: ForgetRequest) -> ForgetReply:
    try:
        return await bus.ask(FORGET, request, node=CLUSTER)
    except NobodyThere as err:
        raise PeerUnavailable(
            f"nothing was removed of node {request.node}: no controller of this release runs, which would do it",
            next_step="start topobus-controller; after an update, the new one",
        ) from err
    except PeerUnavailable as err:
        next_step = "nothing is removed twice: give the same command again"
        raise PeerUnavailable(
            f"{err.message}; what was removed of node {request.node} is not known", next_step=next_step
        ) from err


def _show(output: Output, reply: ForgetReply, *, is_dry_run: bool) -> None:
    """Print the outcome of one node, bucket by bucket."""
    events = {stream: count for stream, count in reply.events.items() if count}
    if not reply.keys and not events:
        output.show(Text.assemble((f"node {reply.node}", "name"), ": nothing is stored about it"))
        return
    is_refused = reply.refusal is not None
    is_done = not is_refused and not is_dry_run
    verdict = "is not forgotten" if is_refused else "would be forgotten (dry run)" if is_dry_run else "forgotten"
    if is_done and any(key.outcome is not KeyOutcome.REMOVED for key in reply.keys):
        verdict = "is not forgotten as a whole"
    output.show(Text.assemble((f"node {reply.node}", "name"), f" {verdict}"))
    for (bucket, outcome, why), count in Counter((key.bucket, key.outcome, key.why) for key in reply.keys).items():
        keys = " ".join(key.key for key in reply.keys if (key.bucket, key.outcome, key.why) == (bucket, outcome, why))
        verb = "would be removed" if is_dry_run and not is_refused else _VERBS[outcome]
        output.show(
            Text.assemble(
                f"  {bucket}  ",
                (keys if count < 8 else f"{count} keys", "faint"),
                f"  {verb}{f': {why}' if why else ''}",
            )
        )
    for stream, count in events.items():
        verb = "ended" if is_done else "would be ended" if not is_refused else "stands"
        output.show(Text(f"  {stream}  present state of {counted(count, 'device')}  {verb}"))
    if reply.refusal is not None:
        output.show(*reason_lines(reply.refusal.reasons))
        if all(reason.code != "node-alive" for reason in reply.refusal.reasons):
            output.note(
                "release what is held (`topobus holders --node "
                + reply.node
                + "`), or add --force: what is named above is lost then"
            )
        else:
            output.note(f"end the services of {reply.node} first: what they write comes back within seconds")
