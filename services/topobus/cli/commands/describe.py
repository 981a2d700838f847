"""`topobus describe`: one object with its devices, its users, its decisions, and the reason why it
waits.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from topobus.bus.bus import Bus
from topobus.cli.commands.holders import allocations_of_pod, holder_listing
from topobus.cli.commands.inventory import read_ledgers
from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.listing.list_options import Namespace
from topobus.cli.listing.responding_services import as_of_now
from topobus.cli.objects.applying import find_object, parts_of, plain_object
from topobus.cli.objects.kinds import plural_of, read_target
from topobus.cli.options import BUS_DEFAULTS, BusOptions, open_bus
from topobus.cli.render.description import describe as put_together
from topobus.cli.render.description import view
from topobus.cli.render.output import Output, TextOrJson
from topobus.cli.render.tables import claim_names
from topobus.formats.messages.catalogue import ALIGNMENT, DECISION, INVENTORY, LEDGER, OBJECT
from topobus.formats.messages.messages import ApiObject, DecisionEvent
from topobus.values.ledger import Allocation
from topobus.values.request import OwnerKind

__all__ = ["describe"]

# Decisions searched for those of one object: as many as a busy system makes in some minutes.
_LOOKED_THROUGH = 2000


async def describe(
    *target: Annotated[
        str, Parameter(name="KIND NAME", help="Such as claim fast, pod trainer, deviceclass gpu.example.com.")
    ],
    namespace: Namespace = "default",
    output: TextOrJson = "text",
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Show all about one object: state, devices with NUMA node and health, users, decisions, and
    why a claim or pod waits.
    """
    kinds, names = read_target(target, verb="describe")
    if len(kinds) != 1 or len(names) != 1:
        raise UsageError(
            "wanted exactly one object to describe",
            next_step=f"write `topobus describe {plural_of(kinds[0])[:-1]} NAME`",
        )
    (kind,), (name,) = kinds, names
    out = Output(is_json=options.json or output == "json")
    async with open_bus(options) as bus:
        parts = parts_of(kind, namespace, name)
        try:
            api_object = await find_object(bus, parts)
        except NotFoundError:
            held = (
                allocations_of_pod((await read_ledgers(bus)).values(), parts["namespace"], parts["name"])
                if kind == "Pod"
                else []
            )
            if not held:
                raise
            return _describe_unstored(held, parts, out)
        plain = plain_object(api_object)
        claims = await _claims_of(bus, api_object) if kind == "Pod" else {}
        nodes = {device.node for device in put_together(api_object, plain, (), (), (), claims).devices}
        inventories = await as_of_now(
            bus, [entry.value for entry in await bus.list(INVENTORY) if entry.parts["node"] in nodes]
        )
        own_shapes = {
            entry.value.node: entry.value.own_shapes
            for entry in await bus.list(ALIGNMENT)
            if entry.parts["node"] in nodes
        }
        ledgers = [entry.value for entry in await bus.list(LEDGER)]
        events: list[DecisionEvent] = [received.value for received in await bus.last(DECISION, limit=_LOOKED_THROUGH)]
    description = put_together(api_object, plain, inventories, ledgers, events, claims, own_shapes)
    out.document(description)
    out.show(view(api_object, description))
    return ExitCode.OK


async def _claims_of(bus: Bus, pod: ApiObject) -> dict[str, ApiObject]:
    """Read a pod's claims, by the names that it has for them."""
    namespace = str(pod.metadata.get("namespace") or "default")
    stored = {
        name: await bus.get(OBJECT, kind="resourceclaim", namespace=namespace, name=claim)
        for name, claim in claim_names(pod).items()
        if claim
    }
    return {name: entry.value for name, entry in stored.items() if entry is not None}


def _describe_unstored(held: list[tuple[str, Allocation]], parts: dict[str, str], output: Output) -> int:
    """Show what a pod holds that has no stored object: `topobus place` placed it, or kubelet knows
    it.
    """
    if output.is_json:
        output.document(
            {"stored": False, "holders": [{"node": node, "allocation": allocation} for node, allocation in held]}
        )
        return ExitCode.OK
    name = f"{parts['namespace']}/{parts['name']}"
    is_placed = any(allocation.owner.kind is OwnerKind.POD for _, allocation in held)
    output.show(
        f"pod {name}: {'placed by `topobus place`' if is_placed else 'run by kubelet'}, not stored",
        holder_listing(held),
    )
    if is_placed:
        output.note(f"`topobus release pod {name}` releases its devices")
    return ExitCode.OK
