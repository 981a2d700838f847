"""`topobus device`: operations on single devices: withhold them, offer them again, clear their
faults, reset them, bind them to their kernel drivers again, test them, and list the withheld ones.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import App, Parameter
from msgspec import Struct
from rich.text import Text

from topobus.bus.bus import Bus
from topobus.cli.exits import ExitCode, UsageError
from topobus.cli.listing.fleet_inventories import list_inventories
from topobus.cli.listing.list_options import LIST_DEFAULTS, ListOptions
from topobus.cli.listing.responding_services import device_service_on, note_waiting, topology_on
from topobus.cli.objects.device_selection import ChosenDevice, Selection, choose_devices
from topobus.cli.options import BUS_DEFAULTS, BusOptions, ClassFilter, NamesSystem, NodeFilter, check_known, open_bus
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.engine.drawing.letters import holders_of
from topobus.formats.messages.catalogue import LEDGER, MAINTENANCE, OPERATE
from topobus.formats.messages.operation_messages import ClassMaintenance, Operated, OperateReply, OperateRequest
from topobus.values.errors import PeerUnavailable, UnderWay
from topobus.values.ledger import Ledger
from topobus.values.maintenance import DeviceOperation, DeviceVerb, Maintenance
from topobus.values.outcome import Refusal
from topobus.values.timestamps import short_time

__all__ = ["Who", "device_app", "operator_name"]

device_app = App(name="device", help="Work on single devices, at once and without any restart.")
device_app.command("topobus.cli.commands.device_report:report", name="report")

# A node decides one after the other. More requests at a time would only wait there.
_AT_A_TIME = 8
_UNCHANGED = {DeviceVerb.FORGIVE: "nothing to forgive", DeviceVerb.RETURN: "nothing to return"}

Names = Annotated[str, Parameter(name="NAME", help="Devices by name. Without any: all that the selectors choose.")]
Why = Annotated[str, Parameter(help="The reason, which lists of devices show.")]
Who = Annotated[str | None, Parameter(help="The name recorded as the requester. Default: user@host.")]
Drain = Annotated[bool, Parameter(help="Evict the pods that have the device by a claim, by a taint.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Which devices are worked on, and who asks for it."""

    node: NodeFilter = None
    device_class: ClassFilter = None
    where: Annotated[
        tuple[str, ...],
        Parameter(
            help="Only where FIELD=VALUE: driver=nvidia, numa_node=1, attributes.NAME=VALUE. Several: all must be true."
        ),
    ] = ()
    who: Who = None
    operation: Annotated[
        str | None, Parameter(help="Operation id of an earlier try whose answer was lost. Its work is not done twice.")
    ] = None


WORK_DEFAULTS = WorkOptions()


class DeviceAnswer(Struct, frozen=True, kw_only=True):
    """The outcome for one device."""

    node: str
    device_class: str
    device: str
    reply: OperateReply | None = None
    """None: it is not known whether it was done."""
    error: str = ""


@device_app.command(name="maintain")
async def maintain(
    *names: Names,
    why: Why,
    drain: Drain = False,
    work: WorkOptions = WORK_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Withhold devices: no new owner gets them, and present owners keep them.

    `topobus device return` ends it.
    """
    return await _operate(DeviceVerb.MAINTAIN, names, why, work, options, is_draining=drain)


@device_app.command(name="exclude")
async def exclude(
    *names: Names,
    why: Why,
    drain: Drain = False,
    work: WorkOptions = WORK_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """Withhold devices, which look to new owners as if they did not exist.

    `topobus device return` ends it.
    """
    return await _operate(DeviceVerb.EXCLUDE, names, why, work, options, is_draining=drain)


def _add_command(verb: DeviceVerb, help_text: str) -> None:
    async def command(
        *names: Names, why: Why = "", work: WorkOptions = WORK_DEFAULTS, options: BusOptions = BUS_DEFAULTS
    ) -> int:
        return await _operate(verb, names, why, work, options)

    device_app.command(command, name=verb.value, help=help_text)


_add_command(DeviceVerb.RETURN, "End maintenance or exclusion: devices are offered again.")
_add_command(DeviceVerb.FORGIVE, "Let sticky faults heal like others. The evidence stays in the decision event.")
_add_command(
    DeviceVerb.RESET, "Reset devices that no owner holds: by their driver, else the PCI function by the kernel."
)
_add_command(DeviceVerb.REBIND, "Have the kernel's driver release devices that no owner holds, and take them again.")
_add_command(
    DeviceVerb.BURN_IN,
    "Test withheld devices that no owner holds: by their driver, and by the program of the setting `burn_in.command`.",
)


@device_app.command(name="list")
async def list_withheld(
    *,
    node: NodeFilter = None,
    device_class: ClassFilter = None,
    listing: ListOptions = LIST_DEFAULTS,
    options: BusOptions = BUS_DEFAULTS,
) -> int:
    """List the withheld devices: by whom, why, since when, and who holds them still."""
    lister = listing.lister(is_json=options.json)
    async with open_bus(options) as bus:
        await check_known(bus, node=node, device_class=device_class)

        async def collect() -> list[Listing]:
            withheld = [
                entry.value
                for entry in await bus.list(MAINTENANCE)
                if node in (None, entry.value.node) and device_class in (None, entry.value.device_class)
            ]
            ledgers = (
                {entry.parts["node"]: entry.value for entry in await bus.list(LEDGER)}
                if any(each.devices for each in withheld)
                else {}
            )
            return [withheld_listing(withheld, ledgers)]

        if lister.options.watch:
            return await lister.follow(bus, [(MAINTENANCE, {}), (LEDGER, {})], collect)
        listings = await collect()
    lister.show(
        listings,
        lambda rows: {"devices": [row.document for row in rows]},
        empty="no device is withheld",
        thing="withheld device",
    )
    return ExitCode.OK


async def _operate(
    verb: DeviceVerb,
    names: tuple[str, ...],
    why: str,
    work: WorkOptions,
    options: BusOptions,
    *,
    is_draining: bool = False,
) -> int:
    _check_texts(why, work.who or "")
    selection = Selection(names=names, node=work.node, device_class=work.device_class, where=work.where)
    operation = partial(DeviceOperation, verb=verb, why=why, who=work.who or operator_name(), is_draining=is_draining)
    op_id = work.operation or str(uuid.uuid4())
    output = options.output()
    async with open_bus(options, NamesSystem.ALWAYS) as bus:
        inventories = [entry.value for entry in (await list_inventories(bus))[0]]
        if not inventories:
            raise PeerUnavailable(
                "no device service has published an inventory", next_step="`topobus doctor` reports what is missing"
            )
        withheld = [entry.value for entry in await bus.list(MAINTENANCE)] if verb is DeviceVerb.RETURN else []
        chosen = choose_devices(selection, inventories, withheld)
        turns = asyncio.Semaphore(_AT_A_TIME)
        noted: set[str] = set()
        silent: dict[tuple[str, str], str] = {}

        def say(text: str) -> None:
            if text not in noted:
                noted.add(text)
                output.note(text)

        async def ask(device: ChosenDevice) -> DeviceAnswer:
            wanted = operation(device_class=device.device_class, device=device.device)
            service = (device.node, device.device_class)
            async with turns:
                # All devices of a hanging service, one after the other, would take minutes. After
                # the first wait the user knows.
                answer = (
                    _unknown(device, f"not asked any more: {silent[service]}")
                    if service in silent
                    else await _ask(
                        bus, device, OperateRequest(op_id=_op_id(op_id, device), operation=wanted), say, op_id
                    )
                )
            if answer.reply is None:
                silent.setdefault(service, answer.error)
            return answer

        answers = await asyncio.gather(*map(ask, chosen))
    output.document({"operation": op_id, "verb": verb, "devices": answers})
    output.show(_answers(verb, answers))
    unknown = [answer for answer in answers if answer.reply is None]
    if unknown:
        raise PeerUnavailable(
            f"it is not known whether it was done for {', '.join(answer.device for answer in unknown[:10])}: "
            f"{unknown[0].error}",
            next_step=f"ask again with --operation {op_id}: what is done is not done twice; `topobus doctor` "
            "reports which service is missing",
        )
    return ExitCode.NO if any(isinstance(_result(answer), Refusal) for answer in answers) else ExitCode.OK


def _check_texts(why: str, who: str) -> None:
    for option, text in (("--why", why), ("--who", who)):
        if not text.isprintable():
            # A node would refuse it device by device, with its own words for what is written here.
            raise UsageError(
                f"{option} is {text!r}, wanted one line of printable text, because lists show it",
                next_step="leave out line breaks and control characters",
            )


async def _ask(
    bus: Bus, device: ChosenDevice, request: OperateRequest, say: Callable[[str], None], op_id: str
) -> DeviceAnswer:
    """Ask one node until its work has ended. A silent one must not hide the others' answers."""
    peers = [topology_on(device.node), device_service_on(device.node, device.device_class)]
    while True:
        try:
            reply = await note_waiting(bus, bus.ask(OPERATE, request, node=device.node), peers, say)
            break
        except UnderWay:
            say(f"it goes on without this command, and the same with --operation {op_id} has its result")
        except PeerUnavailable as err:
            return _unknown(device, err.message)
    return DeviceAnswer(node=device.node, device_class=device.device_class, device=device.device, reply=reply)


def _unknown(device: ChosenDevice, error: str) -> DeviceAnswer:
    return DeviceAnswer(node=device.node, device_class=device.device_class, device=device.device, error=error)


def _op_id(operation: str, device: ChosenDevice) -> str:
    """Give each device of one command an operation of its own, the same when the command is
    repeated.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{operation} {device.node} {device.device_class} {device.device}"))


def operator_name() -> str:
    """Name the requester as `user@host`."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # No list of users names this one.
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def _result(answer: DeviceAnswer) -> Operated | Refusal | None:
    return answer.reply.result if answer.reply is not None else None


def _answers(verb: DeviceVerb, answers: Sequence[DeviceAnswer]) -> Listing:
    columns = (
        Column(title="device", fit=Fit.NAME),
        Column(title="node", fit=Fit.NAME),
        Column(title=verb.value, fit=Fit.NAME),
        Column(title="now"),
    )
    return Listing(columns=columns, rows=tuple(_answer_row(verb, answer) for answer in answers))


def _answer_row(verb: DeviceVerb, answer: DeviceAnswer) -> Row:
    result = _result(answer)
    head = (Text(answer.device, "name"), answer.node)
    if result is None:
        return Row(cells=(*head, Text("not known", "warn"), answer.error))
    if isinstance(result, Refusal):
        return Row(cells=(*head, Text("refused", "fail"), result.why))
    done = Text("done", "ok") if result.is_changed else Text(_UNCHANGED.get(verb, "was so before"), "faint")
    return Row(cells=(*head, done, _state(result.health.state.value, result.maintenance)))


def _state(health: str, maintenance: Maintenance | None) -> str:
    return f"{health}, {_what(maintenance)}" if maintenance is not None else f"{health}, offered"


def _what(maintenance: Maintenance) -> str:
    words = "excluded" if maintenance.verb is DeviceVerb.EXCLUDE else "under maintenance"
    return f"{words}, draining" if maintenance.is_draining else words


def withheld_listing(withheld: Sequence[ClassMaintenance], ledgers: Mapping[str, Ledger]) -> Listing:
    """List devices that an operator withholds."""
    return Listing(
        columns=(
            Column(title="device", fit=Fit.NAME),
            Column(title="node", fit=Fit.NAME),
            Column(title="what"),
            Column(title="since", fit=Fit.NAME, gives_way=True),
            Column(title="who", fit=Fit.NAME),
            Column(title="why"),
            Column(title="held by", fit=Fit.NAME),
            Column(title="class", fit=Fit.NAME, is_wide=True),
        ),
        rows=tuple(
            _withheld_row(each, name, maintenance, ledgers)
            for each in withheld
            for name, maintenance in sorted(each.devices.items())
        ),
    )


def _withheld_row(
    withheld: ClassMaintenance, name: str, maintenance: Maintenance, ledgers: Mapping[str, Ledger]
) -> Row:
    node, device_class = withheld.node, withheld.device_class
    holder = holders_of(ledgers.get(node)).by_device.get((device_class, name))
    return Row(
        name=name,
        cells=(
            Text(name, "name"),
            node,
            _what(maintenance),
            short_time(maintenance.since),
            maintenance.who,
            maintenance.why or "-",
            holder.name if holder else "-",
            device_class,
        ),
        document={"node": node, "device_class": device_class, "device": name, "maintenance": maintenance},
        labels={
            "node": node,
            "class": device_class,
            "name": name,
            "verb": maintenance.verb.value,
            "who": maintenance.who,
        },
    )
