"""`topobus up`: the whole system on this machine until Ctrl-C, on a recorded machine or the real
one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group
from rich.live import Live
from rich.text import Text

from topobus.bus.connection.endpoint import read_url
from topobus.cli.announcements import Announcement, Use
from topobus.cli.config import CliSettings
from topobus.cli.contexts import check_name
from topobus.cli.exits import ExitCode, InputError, UsageError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions, cancel_at
from topobus.cli.render.output import Output
from topobus.cli.render.program_status import log_text, status_line, status_table
from topobus.cli.targets import check_server_url, is_local, refuses
from topobus.cli.users_file import extra_classes
from topobus.devicekit.registry import unserved_drivers
from topobus.local_system.nats_listening import Listening
from topobus.local_system.state_folder import state_folder
from topobus.local_system.supervision import ProgramState, ProgramStatus
from topobus.local_system.system import (
    DEMO_NODE,
    Layout,
    System,
    start_system,
)
from topobus.simulation.machines import PROFILES, RecordedMachine, build
from topobus.values.errors import ConfigError

__all__ = ["follow_system", "ready_text", "up"]


def up(
    *,
    profile: Annotated[
        str | None, Parameter(help=f"A recorded machine: {', '.join(sorted(PROFILES))}. Default: dgx.")
    ] = None,
    root: Annotated[Path | None, Parameter(help="A hardware tree of your own: a folder with sys and proc.")] = None,
    real: Annotated[bool, Parameter(help="This very machine's hardware.")] = False,
    directory: Annotated[
        Path | None,
        Parameter(name="--dir", help="Keep state, logs and sockets here. Default: a fresh folder, removed at the end."),
    ] = None,
    nats: Annotated[str | None, Parameter(help="Use this NATS server instead of starting one.")] = None,
    node: Annotated[
        str | None, Parameter(help="The node's name. Default: demo-node, with --real the host's name.")
    ] = None,
    is_open: Annotated[
        bool,
        Parameter(
            name="--open", help="NATS without users: every user of this machine may do everything. On loopback only."
        ),
    ] = False,
    listen: Annotated[
        str | None,
        Parameter(
            help="Let other machines reach NATS at this address of this machine (0.0.0.0: all), by TLS and with "
            "users. Default: loopback only."
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        Parameter(
            name="--name",
            help="With --listen: a host name or address by which others reach this machine, for its certificate.",
        ),
    ] = None,
    context: Annotated[
        str | None,
        Parameter(help="Name this system for other commands. Default: its folder's name; `local` without --dir."),
    ] = None,
    classes: Annotated[
        list[str] | None,
        Parameter(
            name="--class",
            help="A device class of your own: its installed drivers run in a topobus-device "
            "(docs/how-to/write-a-driver.md). Again for each.",
        ),
    ] = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Start NATS and the eight services and keep them running. Ctrl-C stops everything."""
    if sum((profile is not None, root is not None, real)) > 1:
        raise UsageError("--profile, --root and --real exclude each other", next_step="choose one")
    if profile is not None and profile not in PROFILES:
        raise UsageError(f"unknown profile {profile!r}", next_step=f"known are {', '.join(sorted(PROFILES))}")
    if root is not None and not (root / "sys").is_dir():
        raise InputError(f"--root {root} has no folder sys in it", next_step="give the folder that holds sys and proc")
    if nats is not None:
        check_server_url(nats)
        if is_open:
            _refuse_open(nats)
    own_classes = extra_classes(classes or ())
    listening = _listening(listen, names or [], nats, is_open=is_open)
    name = node or (socket.gethostname().lower() if real else DEMO_NODE)
    if context is not None:
        check_name(context)
    with state_folder(directory) as state:
        announcement = Announcement(wanted=context, state=state, is_kept=directory is not None)
        if root is None and not real:
            hardware = Layout(state=state).machine
            if not hardware.exists():
                build(profile or "dgx", hardware)
        else:
            hardware = (root or Path("/")).absolute()
        return asyncio.run(_up(state, hardware, name, nats, options.output(), listening, announcement, own_classes))


def _listening(listen: str | None, names: list[str], nats: str | None, *, is_open: bool) -> Listening:
    """Read where NATS must listen."""
    if listen is None:
        if names:
            raise UsageError("--name is for a server that others reach", next_step="add --listen ADDRESS")
        return Listening(is_open=is_open)
    if nats is not None:
        raise UsageError(
            "--listen is for a server that this command starts, and --nats names another one",
            next_step="leave one of them out",
        )
    try:
        address = str(ipaddress.ip_address(listen.strip("[]")))
        listening = Listening(address=address, names=tuple(names), is_open=is_open)
    except ValueError as err:
        raise UsageError(
            f"--listen: got {listen!r}, wanted an address of this machine",
            next_step="give 0.0.0.0 for all, and host names by --name",
        ) from err
    if is_open and listening.has_tls:
        raise UsageError(
            f"--open leaves the users out, on this machine's loopback interface only, and --listen {listen} "
            "lets other machines in",
            next_step="leave one of them out: everyone who reaches a NATS without users may do everything",
        )
    if names and not listening.has_tls:
        raise UsageError(
            f"--listen {listen} admits no other machine, so its server has no certificate", next_step="leave --name out"
        )
    return listening


def _refuse_open(nats: str) -> None:
    """Refuse `--open` for a server that others may reach.

    A server on loopback keeps its users.
    """
    if not is_local(nats):
        raise UsageError(
            f"--open is for a server on this machine's loopback interface, got {read_url(nats)[1]}",
            next_step="leave --open out, and name the server's users: docs/how-to/secure-nats.md",
        )


async def _up(
    state: Path,
    hardware: Path,
    node: str,
    nats: str | None,
    output: Output,
    listening: Listening,
    announcement: Announcement,
    classes: Sequence[str],
) -> int:
    cancel_at(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    output.show(Text(f"node {node}, hardware {hardware}, state {state}", "faint"))
    name = ""
    for driver in unserved_drivers(classes):
        help_text = (
            f"no service runs for it: topobus up --class {driver.device_class}"
            if driver.is_served_elsewhere
            else driver.why
        )
        output.note(f"driver {driver.name} of class {driver.device_class} is installed; {help_text}")
    try:
        if nats is not None and await refuses(nats):
            output.note(f"waiting for NATS at {read_url(nats)[1]}: connection refused")
        async with start_system(
            state,
            hardware_root=hardware,
            node=node,
            nats_url=nats,
            listening=listening,
            classes=classes,
            say=output.note,
        ) as system:
            if hardware != Path("/"):
                system.supervisor.attend(_play(hardware, system, output.note))
            with announcement.made(system, output.note) as use:
                name = use.name
                await follow_system(system, output, use)
    except asyncio.CancelledError:
        # Ctrl-C and SIGTERM are how this command ends. By now everything is stopped.
        output.show(Text("stopped; nothing is left running", "faint"))
        if name and announcement.is_kept:
            output.show(Text(f"what was logged: topobus logs --context {name}", "faint"))
    return ExitCode.OK


# Time to open another terminal and to type a command, and to see everything recovered (a device is
# watched for 30 s after a fault).
_BEFORE_FAULTS_S, _BETWEEN_FAULTS_S = 20.0, 60.0


async def _play(
    hardware: Path, system: System, say: Callable[[str], None], wait: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Play the faults that a recorded machine's profile scripts, again and again, with a pause
    first so that the user can open another terminal.
    """
    try:
        machine = RecordedMachine.open(hardware)
    except ConfigError:
        # A user's own tree has no profile and so no script.
        return
    if not machine.profile.faults:
        return
    async for statuses in system.supervisor.changes(at_least_every_s=1.0):
        if _is_ready(statuses):
            break
    name = machine.profile.name
    say(
        f"profile {name} scripts {len(machine.profile.faults)} faults; they begin in {_BEFORE_FAULTS_S:g} s, "
        "and come again until Ctrl-C: "
        "`topobus top` or `topobus health watch` in another terminal shows them"
    )
    await wait(_BEFORE_FAULTS_S)
    await machine.play(wait=wait, say=say)
    while True:
        say(f"the faults of profile {name} are over; those that heal come again in {_BETWEEN_FAULTS_S:g} s")
        await wait(_BETWEEN_FAULTS_S)
        await machine.play_again(wait=wait, say=say)


async def follow_system(system: System, output: Output, use: Use) -> None:
    """Show the state of the programs while they run, and once all are ready how to use them."""
    if output.console.is_terminal and not output.is_json:
        with Live(console=output.console, auto_refresh=False) as live:
            is_announced = False
            async for statuses in system.supervisor.changes(at_least_every_s=1.0):
                if _is_ready(statuses) and not is_announced:
                    is_announced = True
                    # Above the table and unbroken at any width: a live display cuts lines in two,
                    # and a command to copy must be one line.
                    live.console.print(ready_text(system, statuses, use), soft_wrap=True)
                foot = (
                    Text("all ready; Ctrl-C stops everything", "ok")
                    if _is_ready(statuses)
                    else ready_text(system, statuses, use)
                )
                live.update(Group(status_table(statuses), foot), refresh=True)
        return
    seen: dict[str, tuple[ProgramState, int | None]] = {}
    was_ready = False
    async for statuses in system.supervisor.changes(at_least_every_s=1.0):
        for status in statuses:
            if seen.get(status.name) == (status.state, status.pid):
                continue
            seen[status.name] = (status.state, status.pid)
            output.line(
                {
                    "service": status.name,
                    "state": status.state,
                    "pid": status.pid,
                    "restarts": status.restarts,
                    "last_log": log_text(status.last_line),
                }
            )
            output.show(Text(status_line(status)))
        is_ready = _is_ready(statuses)
        if is_ready != was_ready:
            was_ready = is_ready
            subscriber = {"user": "user", "password_file": str(system.password_file("user"))}
            elsewhere = {"nats": system.url_elsewhere, "tls_ca_file": system.tls_ca_file}
            output.line(
                {
                    "system": "ready" if is_ready else "not-ready",
                    "node": system.node,
                    "nats": read_url(system.nats_url)[1],
                    "context": use.name or None,
                    "subscriber": subscriber if system.has_users else None,
                    "elsewhere": elsewhere if system.url_elsewhere else None,
                }
            )
            output.show_line(ready_text(system, statuses, use))


def _is_ready(statuses: tuple[ProgramStatus, ...]) -> bool:
    return all(status.state is ProgramState.READY for status in statuses)


def ready_text(system: System, statuses: tuple[ProgramStatus, ...], use: Use) -> Text:
    """Return how far the start is, and how to use the system once it runs.

    Each command is on a line of its own, to be copied.
    """
    if not _is_ready(statuses):
        ready = sum(status.state is ProgramState.READY for status in statuses)
        return Text(f"{ready} of {len(statuses)} ready; Ctrl-C stops everything", "warn")
    text = Text("all ready, as context ", "ok") if use.name else Text("all ready", "ok")
    text.append(use.name, "name")
    text.append(".", "ok")
    is_elsewhere = bool(use.name) and not use.is_selected
    if is_elsewhere:
        text.append(
            f"\nCommands go to {use.selected or 'another system'} until you run: topobus context use {use.name}",
            "title",
        )
    text.append(" In another terminal:\n" if not is_elsewhere else "\nIn another terminal:\n", "ok")
    if not use.name and system.nats_url != CliSettings().nats.url:
        text.append(f"  export TOPOBUS_ALL__NATS__URL={read_url(system.nats_url)[1]}\n", "title")
    text.append(f"  topobus machine --context {use.name}" if is_elsewhere else "  topobus machine", "title")
    text.append(f"\nWhat the services log: {_logs_of(system, use)}", "faint")
    text.append("\nCtrl-C stops everything", "faint")
    if system.url_elsewhere:
        text.append(_hint_elsewhere(system), "faint")
    elif system.has_users:
        server = system.nats_url.replace("nats://", f"nats://user:$(cat {system.password_file('user')})@")
        text.append(f"\nA subscriber of your own, as NATS' user `user`: NATS_URL={server}", "faint")
    return text


def _logs_of(system: System, use: Use) -> str:
    """Name the command that shows the logs of a running system.

    Without a context, their folder.
    """
    if not use.name:
        return str(system.layout.logs)
    return "topobus logs --follow" if use.is_selected else f"topobus logs --follow --context {use.name}"


def _hint_elsewhere(system: System) -> str:
    """Return what another machine needs to connect."""
    ca_file = Path(system.tls_ca_file).name if system.tls_ca_file else ""
    files = [name for name in (system.tls_ca_file, str(system.password_file("cli"))) if name]
    trust = f" TOPOBUS_CLI__NATS__TLS_CA_FILE={ca_file}" if ca_file else ""
    return (
        f"\nFrom another machine: copy {' and '.join(files)} there, then"
        f"\nexport TOPOBUS_ALL__NATS__URL={system.url_elsewhere}{trust} TOPOBUS_CLI__NATS__USER=cli "
        "TOPOBUS_CLI__NATS__PASSWORD_FILE=password"
        f"\nOther users (a subscriber is `user`): {system.layout.nats_users}/USER/password"
    )
