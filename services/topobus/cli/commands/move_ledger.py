"""`topobus move-ledger`: copies a node's ledger from one NATS server to another, before the node's
services switch to that.

The value is copied unchanged, and the source stays as it is. Nothing is overwritten: a server that
has another ledger of the node keeps it, and the command reports that.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import msgspec
from cyclopts import Parameter

from topobus.bus.bus import Bus, Conflict
from topobus.cli.config import CliSettings
from topobus.cli.exits import ExitCode
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus
from topobus.formats.messages.catalogue import LEDGER
from topobus.formats.messages.codec import encode
from topobus.process.config import load_settings
from topobus.values.errors import PeerUnavailable

__all__ = ["move_ledger"]


async def move_ledger(
    node: Annotated[str, Parameter(name="NODE", help="The node whose ledger moves. Its services must be stopped.")],
    /,
    *,
    to: Annotated[
        str,
        Parameter(
            help="The NATS server that the node's services will use, as its own user topology where it has users."
        ),
    ],
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Copy a node's ledger to another NATS server, while the node's services are stopped."""
    output = options.output()
    # The ledger has one writer: with users, the target accepts it only from that writer's user.
    settings = load_settings(CliSettings, "topology", file=options.config, environ=_without_url(os.environ))
    target_settings = msgspec.structs.replace(settings.nats, url=to, provisioner="topology")
    async with open_bus(options, NamesSystem.ALWAYS) as source:
        entry = await source.get(LEDGER, node=node)
        if entry is None:
            raise PeerUnavailable(
                f"the server has no ledger of node {node}",
                next_step="name the server that the node's services used with --nats",
            )
        async with asyncio.timeout(settings.connect_timeout_s), Bus.session(target_settings, name="topology") as target:
            await target.provision()
            outcome = await target.compare_and_set(LEDGER, entry.value, 0, node=node)
            there = await target.get(LEDGER, node=node)
        again = await source.get(LEDGER, node=node)
    if there is None or encode(there.value) != encode(entry.value):
        raise PeerUnavailable(
            f"{to} has another ledger of node {node}, and it stays as it is",
            next_step="see which of them is right: topobus inventory --nats …",
        )
    if again is None or again.revision != entry.revision:
        raise PeerUnavailable(
            f"the ledger of node {node} changed meanwhile",
            next_step="stop topobus-topology on the node, and delete the copy",
        )
    output.document({"node": node, "to": to, "sequence": entry.value.sequence, "owners": len(entry.value.allocations)})
    done = "was there already" if isinstance(outcome, Conflict) else "copied"
    output.show(
        f"ledger of node {node}: {done}, {len(entry.value.allocations)} owners (sequence {entry.value.sequence})"
    )
    return ExitCode.OK


def _without_url(environ: os._Environ[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.endswith("__NATS__URL")}
