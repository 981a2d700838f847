"""Options that commands share, and the objects made from them: settings, output, a connected bus,
the selected node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter
from rich.text import Text

from topobus.bus.connection.endpoint import read_url
from topobus.cli.config import CliSettings
from topobus.cli.contexts import ContextFolder, ContextState
from topobus.cli.exits import NotFoundError, UsageError
from topobus.cli.render.output import Output
from topobus.cli.targets import Target, choose_target, refuses
from topobus.formats.messages.catalogue import INVENTORY, MACHINE, REPORTER
from topobus.process.readiness import Readiness
from topobus.values.errors import PeerUnavailable
from topobus.values.names import meant_name

if TYPE_CHECKING:
    from topobus.bus.bus import Bus

__all__ = [
    "BUS_DEFAULTS",
    "OUTPUT_DEFAULTS",
    "BusOptions",
    "ClassFilter",
    "MachineSource",
    "NamesSystem",
    "NodeFilter",
    "OutputOptions",
    "cancel_at",
    "check_known",
    "check_listening",
    "one_of",
    "one_of_classes",
    "open_bus",
    "system_text",
    "the_node",
]


NodeFilter = Annotated[str | None, Parameter(help="Only this node.")]
ClassFilter = Annotated[str | None, Parameter(name="--class", help="Only this device class.")]
MachineSource = Annotated[
    str,
    Parameter(
        name=("--machine", "--root"),
        help="A profile (dgx, gb200 …), a folder with sys and proc (/ is this machine), an archive of one, or JSON "
        "saved by `simulate --save`.",
    ),
]
"""A recorded machine, as `open_machine` reads it."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a command prints."""

    json: Annotated[bool, Parameter(help="Print JSON: one document, or one line per event.")] = False

    def output(self) -> Output:
        """Open the output."""
        return Output(is_json=self.json)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BusOptions(OutputOptions):
    """How a command prints, and where it finds the system."""

    nats: Annotated[str | None, Parameter(help="NATS server of the system, in place of a context.")] = None
    context: Annotated[
        str | None, Parameter(help="The system of this name: `topobus context ls`. Default: the selected one.")
    ] = None
    config: Annotated[Path | None, Parameter(help="Settings file (TOML) with the same keys as the services'.")] = None

    def target(self) -> Target:
        """Choose the system: --nats, --context, the environment's URL, the settings file,
        TOPOBUS_CONTEXT, the selected context, this machine's default port.

        Errors: raises UsageError and ConfigError for what names no system, PeerUnavailable for the
        context of a `topobus up` that ended.
        """
        return choose_target(nats=self.nats, context=self.context, config=self.config, environ=os.environ)

    def settings(self) -> CliSettings:
        """Read file and environment. The flag takes precedence.

        Without a named user, the user is that of the context, or of the `topobus up` that runs at
        the address, if it belongs to this user.
        """
        return self.target().settings


OUTPUT_DEFAULTS = OutputOptions()
BUS_DEFAULTS = BusOptions()


class NamesSystem(Enum):
    """When a command names, before its answer, the system that it uses."""

    ALWAYS = "always"
    """The command writes."""
    IF_SEVERAL = "if-several"
    """This user has another system that may run: an answer must not be taken for the other's."""
    NEVER = "never"
    """The answer names the system itself, or notes are not read."""


@asynccontextmanager
async def open_bus(options: BusOptions, names_system: NamesSystem = NamesSystem.IF_SEVERAL) -> AsyncIterator[Bus]:
    """Connect for one command.

    Errors: raises PeerUnavailable when no server answers in time. The bus itself would wait without
    a limit, as services need it.
    """
    # Imported here: the client of NATS, metrics and logs are a third of a start, and half of the
    # commands need no connection.
    from topobus.bus.bus import Bus
    from topobus.process.logging import setup_logging

    target = options.target()
    is_named = names_system is NamesSystem.ALWAYS or (names_system is NamesSystem.IF_SEVERAL and _has_several())
    if is_named:
        # Unbroken and not faint: it is to be read before the answer.
        options.output().errors.print(Text(target.text), soft_wrap=True)
    settings = target.settings
    setup_logging(settings.log, service="cli")
    # Errors do not repeat the system that the note above names.
    where = "there" if is_named else _place_of(target)
    await check_listening(target, where)
    readiness = Readiness()
    nats, name = settings.nats, "topobus-cli"
    is_reporter = nats.user == REPORTER
    if is_reporter:
        # Outside the account with the streams, where the server has accounts.
        nats, name = msgspec.structs.replace(nats, zone="core"), REPORTER
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            bus = await Bus.connect(nats, name=name, readiness=readiness)
    except TimeoutError as err:
        shown = read_url(settings.nats.url)[1]
        why = readiness.report().get("bus", "").removeprefix(f"waiting for NATS at {shown}").removeprefix(": ")
        raise _no_connection(target, where, why) from err
    try:
        yield bus
    except PeerUnavailable as err:
        problem = "" if is_reporter else await _problem(bus)
        # A user on the wrong system sees it here, or above.
        err.message = _with_system(problem or err.message, "" if is_named else target.text)
        if problem:
            err.next_step = (
                "choose your system with --context NAME or --nats URL: `topobus context ls` lists those that "
                "this user knows"
            )
        raise
    except (UsageError, NotFoundError) as err:
        # The missing object may be in another system.
        err.message = _with_system(err.message, "" if is_named else target.text)
        raise
    finally:
        await bus.close()


def _no_connection(target: Target, where: str, why: str) -> PeerUnavailable:
    from topobus.bus.connection.nats_errors import is_refused_login

    user = target.settings.nats.user
    if is_refused_login(why):
        return PeerUnavailable(
            f"the NATS server {where} does not let us in {f'as user {user!r}' if user else 'without a user'}: {why}",
            next_step="name the user and the file of the password: TOPOBUS_CLI__NATS__USER, "
            "TOPOBUS_CLI__NATS__PASSWORD_FILE. Commands of the user who "
            "runs `topobus up` need neither; its file is nats-users/cli/password in the state folder",
        )
    if "certificate" in why:
        return PeerUnavailable(
            f"the NATS server {where} is not trusted: {why}",
            next_step="name the file of the authority that signed it (TOPOBUS_CLI__NATS__TLS_CA_FILE), and the "
            "server as its certificate does; "
            "`topobus keys show FOLDER` at the server shows its names and until when it is valid",
        )
    return PeerUnavailable(
        f"no NATS server answers {where} within {target.settings.connect_timeout_s:g} s{why and f': {why}'}",
        next_step=target.next_step,
    )


def cancel_at(*signals: int) -> None:
    """Let signals cancel the present task, as Ctrl-C does: the ordinary end of a command that
    follows something.
    """
    me = asyncio.current_task()
    assert me is not None
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, me.cancel)


async def check_listening(target: Target, where: str = "") -> None:
    """Check that a server listens, before anything waits for an answer.

    Shapes: where — how an error names the place; empty: by its URL, and where that comes from.
    Errors: raises PeerUnavailable when every server refuses connections.
    """
    if await refuses(target.settings.nats.url):
        raise PeerUnavailable(
            f"no NATS server listens {where or _place_of(target)}: connection refused", next_step=target.next_step
        )


def _place_of(target: Target) -> str:
    return f"at {target.url} (from {target.source})"


def _has_several() -> bool:
    """Say whether more than one of this user's systems may run. One that was added by hand may."""
    return sum(context.state is not ContextState.STOPPED for context in ContextFolder().all()) > 1


def _with_system(message: str, system: str) -> str:
    return f"{message} ({system})" if system else message


def system_text(options: BusOptions) -> str:
    """Name the system that a command uses, without passwords, and where the address comes from."""
    return options.target().text


async def _problem(bus: Bus) -> str:
    """Return that the server belongs to no Topobus system when it has none of its streams.

    Empty when it has some, or when that cannot be found out.
    """
    try:
        differences = await bus.inspect()
    except PeerUnavailable:
        return ""
    # Imported here: only a failed command needs it, and it loads all of doctor's checks.
    from topobus.cli.rules.checkup import MISSING

    return (
        "this NATS server has no Topobus streams: it is not the server of a Topobus system"
        if differences and set(differences.values()) == {MISSING}
        else ""
    )


async def the_node(bus: Bus, wanted: str | None) -> str:
    """Choose the node: the one named, else the only one there is.

    Errors: raises PeerUnavailable when no node reports, NotFoundError when the name is unknown,
    UsageError when several could be meant.
    """
    nodes = [entry.parts["node"] for entry in await bus.list(MACHINE)]
    if not nodes:
        raise PeerUnavailable(
            "no node reports a machine", next_step="is topobus-discovery running there? `topobus doctor` reports it"
        )
    if wanted is None and len(nodes) > 1:
        raise UsageError(
            f"{len(nodes)} nodes report a machine: {', '.join(nodes[:10])}", next_step="choose one with --node NAME"
        )
    return one_of("node", wanted or nodes[0], nodes)


async def check_known(
    bus: Bus, *, node: str | None, device_class: str | None = None, also: Collection[str] = ()
) -> None:
    """Check names that filter a stream of events, where a misspelt name looks like silence.

    Before any node has reported, every name is accepted.
    Shapes: also — words that name no class of devices, and are right.
    Errors: raises NotFoundError that lists what exists. Cost: only the keys are read.
    """
    if node is None and device_class is None:
        return
    places = await bus.keys(INVENTORY)
    nodes = {parts["node"] for parts in places} | {parts["node"] for parts in await bus.keys(MACHINE)}
    if node is not None and nodes:
        one_of("node", node, nodes)
    if device_class is not None and places:
        one_of_classes(device_class, {parts["device_class"] for parts in places}.union(also))


def one_of_classes(wanted: str, classes: Iterable[str]) -> str:
    """Check a class of devices against those that services have.

    Errors: raises NotFoundError that lists what exists. For a class whose driver is installed here,
    it gives the step to serve the class.
    """
    try:
        return one_of("device class", wanted, classes)
    except NotFoundError as err:
        # Imported here: entry points are searched only for a class that no service has.
        from topobus.devicekit.registry import unserved_drivers

        drivers = [
            driver for driver in unserved_drivers(()) if driver.device_class == wanted and driver.is_served_elsewhere
        ]
        if not drivers:
            raise
        raise NotFoundError(
            f"no service of device class {wanted!r} runs; its driver "
            f"{' and '.join(driver.name for driver in drivers)} is installed",
            next_step=drivers[0].next_step,
        ) from err


def one_of(what: str, wanted: str, nodes: Iterable[str]) -> str:
    """Check a name against those that exist.

    Errors: raises NotFoundError that lists what exists.
    """
    names = sorted(set(nodes))
    if wanted in names:
        return wanted
    listed = f"known are {', '.join(names[:12]) or 'none'}{' …' if len(names) > 12 else ''}"
    # Two words of three letters that differ in one are not misspellings of each other: an npu is no
    # gpu.
    near = get_close_matches(wanted.lower(), names, n=3, cutoff=0.7) or list(filter(None, [meant_name(wanted, names)]))
    raise NotFoundError(
        f"unknown {what} {wanted!r}", next_step=f"did you mean {' or '.join(near)}? {listed}" if near else listed
    )
