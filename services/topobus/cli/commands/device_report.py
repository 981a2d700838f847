"""`topobus device report`: report how a device is, as a program beside its driver sees it.

With NATS' login `verdicts` it reads nothing: that login may only report.
"""

from __future__ import annotations

import socket
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus, the_node
from topobus.formats.messages.catalogue import REPORT, REPORTER
from topobus.formats.messages.report_messages import ReportRequest, Taken
from topobus.values.dra_names import DRIVER, class_of_device
from topobus.values.health import Dimension
from topobus.values.names import is_dns_label
from topobus.values.verdict import Verdict, VerdictState

__all__ = ["report"]


async def report(
    name: Annotated[
        str, Parameter(name="NAME", help="The device's name, PCI address or UUID. Without: all of --class.")
    ] = "",
    /,
    *,
    source: Annotated[str, Parameter(help="Who says it, as health.sources of the service lists it: dcgm, dcgm/pcie.")],
    state: Annotated[VerdictState, Parameter(help="What it says. healthy takes back what it said before.")],
    dimension: Annotated[Dimension, Parameter(help="The part of the device that it is about.")] = Dimension.COMPUTE,
    code: Annotated[str, Parameter(help="The source's own code of what it saw.")] = "",
    why: Annotated[str, Parameter(help="What it saw, for people.")] = "",
    observed_at: Annotated[str, Parameter(help="When it saw it, as RFC 3339. Default: now.")] = "",
    node: Annotated[str | None, Parameter(help="The device's node. Default: the only one, or this machine.")] = None,
    device_class: Annotated[
        str | None, Parameter(name="--class", help="The device's class. Default: that in its name.")
    ] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Report how a device is. Its service takes that as far as it trusts the source."""
    verdict = Verdict(
        source=source, device=name, dimension=dimension, state=state, code=code, message=why, observed_at=observed_at
    )
    device_class = device_class or _class_of(name)
    output, settings = options.output(), options.settings()
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        if settings.nats.user == REPORTER:
            node = node or settings.node or socket.gethostname().lower()
        else:
            node = await the_node(bus, node)
        reply = await bus.ask(REPORT, ReportRequest(verdict=verdict), node=node, device_class=device_class)
    output.document({"node": node, "device_class": device_class, "reply": reply})
    if isinstance(reply.result, Taken):
        about = ", ".join(reply.result.devices) or "no device yet"
        words = "taken" if reply.result.is_newest else "nothing new"
        output.show(Text(f"{words}: {verdict.source} says {verdict.state} of {about}"))
    else:
        for reason in reply.result.reasons:
            output.show(Text(f"refused: {reason.message}"))
    return ExitCode.OK if isinstance(reply.result, Taken) else ExitCode.NO


def _class_of(name: str) -> str:
    device_class = class_of_device(DRIVER, name) if is_dns_label(name) else None
    if device_class is None or device_class == name:
        raise UsageError(
            f"the class of {name or 'all devices'} is not clear from its name",
            next_step="name it, for example --class gpu",
        )
    return device_class
