"""`topobus context`: names for a user's systems."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.bus.connection.endpoint import read_url
from topobus.cli.contexts import Context, ContextFolder, ContextState, check_name
from topobus.cli.exits import ExitCode, NotFoundError, UsageError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.cli.render.listing import Column, Fit, Listing, Row
from topobus.cli.render.output import Output
from topobus.cli.targets import check_server_url, refuses

__all__ = ["context_app"]

context_app = App(name="context", help="Name the systems that commands talk to, and choose one.")

# Blocks begin with a name, and so does the star, where it is wide enough for a table.
_COLUMNS = (
    Column(title="", fit=Fit.NAME),
    Column(title="name", fit=Fit.NAME),
    Column(title="state", fit=Fit.NAME),
    Column(title="nats", fit=Fit.NAME),
    Column(title="node", fit=Fit.NAME, gives_way=True),
    Column(title="folder", fit=Fit.NAME, gives_way=True),
)
_STYLES = {ContextState.RUNNING: "ok", ContextState.STOPPED: "warn", ContextState.ADDED: "faint"}


@context_app.command(name="ls")
async def ls(*, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """List the contexts. The selected one has a star."""
    folder = ContextFolder()
    output = options.output()
    selected = folder.selected()
    contexts = folder.all()
    listening = await _listening(contexts)
    if output.is_json:
        output.document({"contexts": [_fields(context, selected, listening.get(context.name)) for context in contexts]})
        return ExitCode.OK
    if not contexts:
        output.note(
            "there are no contexts: `topobus up` makes one, `topobus context add` names a system that runs elsewhere"
        )
        return ExitCode.OK
    rows = [
        Row(
            cells=(
                "*" if context.name == selected else "",
                Text(context.name, "name"),
                Text(f"{context.state}, no NATS", "fail")
                if listening.get(context.name) is False
                else Text(context.state, _STYLES[context.state]),
                context.nats,
                context.node or "-",
                Text(context.state_dir or "-", "faint"),
            )
        )
        for context in contexts
    ]
    output.show(Listing(columns=_COLUMNS, rows=tuple(rows), all_of_it="--json has all"))
    return ExitCode.OK


@context_app.command(name="use")
async def use(
    name: Annotated[str | None, Parameter(help="The context that commands use from now on.")] = None,
    /,
    *,
    none: Annotated[bool, Parameter(help="Select none: commands go to nats://127.0.0.1:4222.")] = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Select a context for all commands of this user."""
    folder = ContextFolder()
    output = options.output()
    if (name is None) is not none:
        raise UsageError("give the name of a context, or --none", next_step="topobus context ls")
    if name is None:
        folder.select("")
        output.note("no context is selected")
        return ExitCode.OK
    context = folder.named(name)
    folder.select(name)
    await _print_context(output, context, name)
    return ExitCode.OK


@context_app.command(name="show")
async def show(
    name: Annotated[str | None, Parameter(help="A context. Default: the selected one.")] = None,
    /,
    *,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Show one context: where it is, and the files of its login."""
    folder = ContextFolder()
    selected = folder.selected()
    if name is None and not selected:
        raise NotFoundError(
            "no context is selected", next_step="topobus context use NAME, or name one: topobus context show NAME"
        )
    await _print_context(options.output(), folder.named(name or selected), selected)
    return ExitCode.OK


@context_app.command(name="add")
async def add(
    name: Annotated[str, Parameter(help="The new context.")],
    /,
    *,
    nats: Annotated[str, Parameter(help="URL of the system's NATS server.")],
    user: Annotated[str, Parameter(help="NATS user, mostly `cli`.")] = "",
    password_file: Annotated[Path | None, Parameter(help="File with that user's password.")] = None,
    tls_ca_file: Annotated[Path | None, Parameter(help="Authority that signed the server's certificate, PEM.")] = None,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Name a system that this user did not start with `topobus up`.

    The selection stays, but the first context is selected.
    """
    folder = ContextFolder()
    check_name(name)
    check_server_url(nats)
    if "@" in nats:
        raise UsageError("--nats: a context holds no password", next_step="give --user NAME --password-file FILE")
    if bool(user) != (password_file is not None):
        raise UsageError("--user and --password-file belong together", next_step="give both, or neither")
    before = folder.get(name)
    if before is not None and before.state is not ContextState.ADDED:
        raise UsageError(
            f"context {name} is that of a `topobus up` in {before.state_dir}", next_step="choose another name"
        )
    context = Context(
        name=name,
        nats=nats,
        user=user,
        password_file=_path(password_file),
        tls_ca_file=_path(tls_ca_file),
    )
    folder.put(context)
    if folder.get(folder.selected()) is None:
        folder.select(name)
    await _print_context(options.output(), context, folder.selected())
    return ExitCode.OK


@context_app.command(name="rm")
def rm(
    *names: Annotated[str, Parameter(help="Contexts to remove; their systems keep running.")],
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Remove contexts. Nothing of their systems is stopped or removed."""
    folder = ContextFolder()
    if not names:
        raise UsageError("no context is named", next_step="topobus context ls")
    for name in names:
        folder.named(name)
    for name in names:
        folder.remove(name)
        options.output().note(f"context {name} is forgotten")
    return ExitCode.OK


async def _listening(contexts: Sequence[Context]) -> dict[str, bool]:
    """Map the contexts whose `topobus up` runs to whether their NATS server listens.

    Those that were added may be far away, and are not asked.
    """
    running = [context for context in contexts if context.state is ContextState.RUNNING]
    refused = await asyncio.gather(*(refuses(context.nats) for context in running))
    return {context.name: not is_refused for context, is_refused in zip(running, refused, strict=True)}


async def _print_context(output: Output, context: Context, selected: str) -> None:
    fields = _fields(context, selected, (await _listening([context])).get(context.name))
    output.document(fields)
    for key, value in fields.items():
        if value not in ("", None):
            # Users copy paths from here.
            output.show_line(Text(f"{key.replace('_', ' '):<18}{_shown(value)}"))


def _fields(context: Context, selected: str, is_listening: bool | None) -> dict[str, str | bool | None]:
    return {
        "name": context.name,
        "is_selected": context.name == selected,
        "state": context.state.value,
        "nats": read_url(context.nats)[1],
        "is_nats_listening": is_listening,
        "node": context.node,
        "state_dir": context.state_dir,
        "user": context.user,
        "password_file": context.password_file,
        "tls_ca_file": context.tls_ca_file,
    }


def _shown(value: str | bool | None) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"


def _path(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())
