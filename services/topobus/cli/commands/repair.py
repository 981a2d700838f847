"""`topobus repair`: lists repairs by policy, explains what becomes of a device, and pauses them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

from cyclopts import App, Parameter
from msgspec import structs
from rich.text import Text

from topobus.bus.bus import Bus, Conflict
from topobus.cli.commands.device import Who, operator_name
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.fleet_inventories import list_inventories
from topobus.cli.listing.list_options import LIST_DEFAULTS, ListOptions
from topobus.cli.objects.device_selection import Selection, choose_devices
from topobus.cli.options import BUS_DEFAULTS, BusOptions, NamesSystem, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.engine.ledger.operation_faults import complaint_of_texts
from topobus.engine.repair.fleet import Fleet, codes_of, rule_for
from topobus.engine.repair.plan import is_paused, obstacle
from topobus.formats.messages.catalogue import LEDGER, MAINTENANCE, REPAIR
from topobus.formats.messages.codec import decode
from topobus.formats.messages.messages import RepairState
from topobus.formats.messages.nouns import CLUSTER
from topobus.values.repair import Place, Repair, RepairPause, RepairPolicy, RepairRule
from topobus.values.timestamps import rfc3339, short_time

__all__ = ["repair_app", "repair_listing"]

repair_app = App(name="repair", help="Repairs by policy: what is done about sick devices without a person.")

# Controllers write the same document, a few times a second at most.
_TRIES = 20
_LONGEST_PAUSE = timedelta(days=366)


@repair_app.command(name="list")
async def list_repairs(*, listing: ListOptions = LIST_DEFAULTS, options: BusOptions = BUS_DEFAULTS) -> int:
    """List the repairs under way and the devices that they left to a person."""
    lister = listing.lister(is_json=options.json)
    async with open_bus(options) as bus:

        async def collect() -> list[Listing]:
            return [repair_listing(await _read(bus))]

        if lister.options.watch:
            return await lister.follow(bus, [(REPAIR, {})], collect)
        state = await _read(bus)
    if is_paused(state, time.time()) and state.pause is not None:
        lister.output().note(_paused(state.pause))
    lister.show(
        [repair_listing(state)],
        lambda rows: {"repairs": [row.document for row in rows], "pause": state.pause},
        empty="no device is under repair",
        thing="repair",
    )
    return ExitCode.OK


@repair_app.command(name="explain")
async def explain(
    device: Annotated[str, Parameter(name="DEVICE", help="A device by name.")],
    *,
    node: Annotated[str | None, Parameter(help="Its node, where several have one of that name.")] = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Explain which rule applies to a device, at which step its repair is, or why none begins."""
    output, now_s = options.output(), time.time()
    async with open_bus(options) as bus:
        inventories = [entry.value for entry in (await list_inventories(bus))[0]]
        (chosen,) = choose_devices(Selection(names=(device,), node=node), inventories)
        place: Place = (chosen.node, chosen.device_class, chosen.device)
        state = await _read(bus)
        maintenances = {
            (entry.value.node, entry.value.device_class): entry.value for entry in await bus.list(MAINTENANCE)
        }
        ledger = await bus.get(LEDGER, node=chosen.node)
    fleet = Fleet(
        {(each.node, each.device_class): each for each in inventories},
        {chosen.node: ledger.value} if ledger is not None else {},
        maintenances,
    )
    policy = decode(state.policy, RepairPolicy, where="policy of repairs") if state.policy else RepairPolicy()
    repair = next((repair for repair in state.under_way if repair.place == place), None)
    now = fleet.device(place)
    named = rule_for(policy, now) if now is not None else None
    rule: RepairRule | None = named
    codes = codes_of(named, now) if named is not None and now is not None else ()
    if repair is not None:
        rule, codes = repair.rule, repair.codes
    reason = obstacle(policy, state, fleet, place, now_s)
    holders = fleet.holders(place)
    output.document({"device": chosen, "rule": rule, "repair": repair, "reason": reason, "holders": holders})
    output.show(Text.assemble((chosen.device, "name"), f" of node {chosen.node}"))
    if rule is not None:
        output.show(Text(f"  rule {rule.name} for {', '.join(codes)}"))
        for index, step in enumerate(rule.steps):
            is_now = repair is not None and not repair.why and index == repair.step
            output.show(Text(f"  {'>' if is_now else ' '} {index + 1}. {step}", "warn" if is_now else ""))
    if repair is not None:
        output.show(Text(f"  {repair.what} since {_moment(repair.step_s)}: {repair.text}"))
    output.show(Text(f"  held by {', '.join(holders)}" if holders else "  held by nobody"))
    if reason is not None:
        output.show(Text.assemble(f"  {reason.message}", (f"  [{reason.code}]", "faint")))
    elif is_paused(state, now_s) and state.pause is not None:
        output.show(Text(f"  {_paused(state.pause)}"))
    return ExitCode.OK


@repair_app.command(name="pause")
async def pause(
    *,
    duration: Annotated[timedelta | None, Parameter(name="--for", help="Such as 2h. Without it: until resume.")] = None,
    why: Annotated[str, Parameter(help="The reason, which the list shows.")] = "",
    who: Who = None,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Pause all repairs: none begins, and none goes on."""
    if duration is not None and not timedelta(0) < duration <= _LONGEST_PAUSE:
        raise UsageError(
            f"--for is {duration}, wanted more than nothing and at most {_LONGEST_PAUSE.days} days",
            next_step="such as --for 2h; without --for the pause lasts until `topobus repair resume`",
        )
    now_s = time.time()
    until_s = now_s + duration.total_seconds() if duration is not None else None
    paused = RepairPause(who=who or operator_name(), why=why, since_s=now_s, until_s=until_s)
    until = f" until {_moment(until_s)}" if until_s is not None else " until `topobus repair resume`"
    return await _change(paused, f"repairs are paused{until}", options)


@repair_app.command(name="resume")
async def resume(*, who: Who = None, options: BusOptions = BUS_DEFAULTS) -> int:
    """End a pause: repairs go on where they were."""
    now_s = time.time()
    ended = RepairPause(who=who or operator_name(), since_s=now_s, until_s=now_s)
    return await _change(ended, "repairs go on", options)


async def _change(pause: RepairPause, done: str, options: BusOptions) -> int:
    """Write a pause into the document. Another writer may be first: then read it again."""
    # The document has all repairs, and one text that is too long would make it unreadable.
    if complaint := complaint_of_texts(pause.why, pause.who):
        raise UsageError(complaint, next_step="give one line of printable text with --why and --who")
    output = options.output()
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        for _ in range(_TRIES):
            entry = await bus.get(REPAIR, fleet=CLUSTER)
            document, revision = (entry.value, entry.revision) if entry is not None else (RepairState(), 0)
            changed = structs.replace(document, pause=pause)
            if not isinstance(await bus.compare_and_set(REPAIR, changed, revision, fleet=CLUSTER), Conflict):
                output.document({"pause": pause})
                output.show(Text(done))
                return ExitCode.OK
    output.note("the controllers wrote the document of repairs each time before this command could: give it again")
    return ExitCode.NO


async def _read(bus: Bus) -> RepairState:
    entry = await bus.get(REPAIR, fleet=CLUSTER)
    return entry.value if entry is not None else RepairState()


def repair_listing(state: RepairState) -> Listing:
    """List repairs under way first, then devices that are left to a person."""
    left = tuple(repair for repair in state.repairs if repair.is_left)
    return Listing(
        columns=(
            Column(title="device", fit=Fit.NAME),
            Column(title="node", fit=Fit.NAME),
            Column(title="now", fit=Fit.NAME),
            Column(title="since", fit=Fit.NAME, gives_way=True),
            Column(title="rule"),
            Column(title="evidence"),
            Column(title="why"),
            Column(title="repair", fit=Fit.ID, is_wide=True),
        ),
        rows=tuple(map(_row, (*state.under_way, *left))),
    )


def _row(repair: Repair) -> Row:
    rule = repair.rule.name
    return Row(
        name=repair.device,
        cells=(
            Text(repair.device, "name"),
            repair.node,
            Text(repair.what, "fail" if repair.is_left else "warn"),
            _moment(repair.step_s),
            rule,
            ", ".join(repair.codes),
            repair.text,
            repair.id,
        ),
        document=repair,
        labels={"node": repair.node, "class": repair.device_class, "name": repair.device, "rule": rule},
    )


def _paused(pause: RepairPause) -> str:
    until = f" until {_moment(pause.until_s)}" if pause.until_s is not None else ""
    why = f": {pause.why}" if pause.why else ""
    return f"repairs are paused by {pause.who} since {_moment(pause.since_s)}{until}{why}"


def _moment(seconds: float) -> str:
    return short_time(rfc3339(datetime.fromtimestamp(seconds, UTC)))
