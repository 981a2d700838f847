"""`topobus hints watch`: the hint lists that device services and topology send from now on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NodeFilter, cancel_at, check_known, open_bus
from topobus.cli.render.answers import hints_text
from topobus.cli.render.gaps import Gaps
from topobus.formats.messages.catalogue import HINTS
from topobus.formats.messages.messages import HintsEvent
from topobus.values.timestamps import short_time

__all__ = ["hints_app", "hints_lines"]

hints_app = App(name="hints", help="Which NUMA nodes device services and topology prefer, as they publish it.")


@hints_app.command(name="watch")
async def watch(
    *,
    node: NodeFilter = None,
    device_class: Annotated[
        str | None, Parameter(name="--class", help="Only this class; memory and hugepages are class memory.")
    ] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Follow hints from now on. They are not stored: earlier ones are only in the decisions, and a
    line reports missed ones.
    """
    output = options.output()
    parts = {key: value for key, value in (("node", node), ("device_class", device_class)) if value is not None}
    cancel_at(signal.SIGTERM)
    async with open_bus(options) as bus:
        await check_known(bus, node=node, device_class=device_class, also=("memory",))
        output.note(f"listening at {HINTS.pattern(**parts)}")
        gaps = Gaps(output, "hints", is_stored=False)
        with contextlib.suppress(asyncio.CancelledError), gaps.telling(bus):
            async with contextlib.aclosing(bus.listen(HINTS, on_missed=gaps.note_missed, **parts)) as notices:
                async for given in notices:
                    output.line(given)
                    for line in hints_lines(given):
                        output.show(line)
    return ExitCode.OK


def hints_lines(given: HintsEvent) -> list[Text]:
    """Write one notice: which service gave hints for what, and a line for each list."""
    head = Text.assemble(
        (f"{short_time(given.time)}  ", "faint"), (f"{given.node}/{given.device_class}", "name"), f"  by {given.by}"
    )
    if given.owner is not None:
        head.append(f"  for {given.owner}")
    if given.op_id:
        head.append(f"  operation {given.op_id}", "faint")
    if given.is_dry_run:
        head.append("  (dry run)", "faint")
    lines = [head]
    for listed in given.lists:
        where = f"{listed.container}: " if listed.container else ""
        more = f" and at most {listed.omitted} more" if listed.omitted else ""
        lines.append(Text(f"    {where}{listed.resource}  {hints_text(listed.hints)}{more}"))
    if given.omitted_lists:
        lines.append(Text(f"    and {given.omitted_lists} lists of further containers", "faint"))
    return lines
