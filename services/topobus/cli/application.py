"""The operator's program: reads the command line, runs one command, ends with a documented exit
code and never with a traceback.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from inspect import iscoroutine
from pathlib import Path

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError
from rich.markup import escape

from topobus.cli.command_words import with_options_behind
from topobus.cli.exits import ExitCode, InputError, UsageError, code_of
from topobus.cli.help.command_data import find_command, read_commands
from topobus.cli.help.overview import COMMANDS, PROGRAM, import_path
from topobus.cli.help.quick import answer_quickly
from topobus.cli.render.output import Output, adapt_streams, error_console
from topobus.values.errors import ContractError, TopobusError

__all__ = ["application", "run"]

# An option as written. A value that begins with a dash is not one.
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?|-[A-Za-z]", re.DOTALL)
_READ_MANIFESTS = ("allocate", "apply", "delete", "diff", "place", "simulate")


def application() -> App:
    """Assemble the program.

    Commands are named by import path, so that only the one that runs is loaded.
    """
    app = App(
        name="topobus",
        version=_version,
        help=PROGRAM,
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for commands in COMMANDS.values():
        for name, text in commands.items():
            app.command(import_path(name), name=name, help=text)
    return app


def _version() -> str:
    from importlib.metadata import version

    return f"topobus {version('topobus')}"


def run(arguments: Sequence[str], *, when_loaded: Callable[[], None] = lambda: None) -> int:
    """Run one command line and return its exit code. `when_loaded` is called after the command is
    loaded and before it runs.
    """
    adapt_streams()
    if answer_quickly(list(arguments)):
        return ExitCode.OK
    arguments = with_options_behind(arguments)
    try:
        command, bound, _ = application().parse_args(
            arguments, exit_on_error=False, print_error=False, error_console=error_console()
        )
        when_loaded()
        answer = command(*bound.args, **bound.kwargs)
        if iscoroutine(answer):
            # Imported here: commands that ask no server need none of it.
            import asyncio

            answer = asyncio.run(answer)
    except CycloptsError as err:
        console = error_console()
        console.print(f"[fail]error:[/fail] {escape(_usage_faults(err, arguments))}")
        console.print(f"  [name]next:[/name] {_help_of(arguments)}")
        return ExitCode.USAGE
    except TopobusError as err:
        err.next_step = err.next_step or _next_step(err, arguments)
        Output().error(err)
        return code_of(err)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout is gone (`| head`) and wants no more. Point stdout elsewhere, or
        # the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as err:  # noqa: BLE001 - boundary: the operator's program, as runtime.run is for a service
        _report_defect(err)
        return ExitCode.INTERNAL
    return int(answer) if isinstance(answer, int) else ExitCode.OK


def _help_of(arguments: Sequence[str]) -> str:
    """Name the help of the command that is meant: for `place --nod x`, that of place."""
    return " ".join(("topobus", *find_command(read_commands(), arguments)[0]["words"].split(), "--help"))


def _usage_faults(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Name every unknown option, and all that are missing.

    The parser itself stops at the first.
    """
    command, _ = find_command(read_commands(), arguments)
    # Imported here, as it loads all of Kubernetes' shapes, and a line without mistakes needs none.
    from topobus.formats.kubernetes.shape import did_you_mean

    names = [name for option in command["options"] for name in option["names"]]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    given = [word.partition("=")[0] for word in own if _OPTION.fullmatch(word)]
    unknown = [name for name in dict.fromkeys(given) if name not in (*names, "--help", "-h", "--version")]
    missing = [
        option["names"]
        for option in command["options"]
        if option["is_required"] and not set(option["names"]) & set(given)
    ]
    faults = [
        f"there is no option {name}{did_you_mean(name, sorted(name for name in names if name.startswith('--')))}"
        for name in unknown
    ]
    if missing:
        faults.append(
            f"missing: {', '.join(next(name for name in names if name.startswith('--')) for names in missing)}"
        )
    is_about_these = bool(unknown) or isinstance(error, MissingArgumentError | UnknownOptionError)
    if is_about_these and faults:
        return "; ".join(faults)
    # Arguments as the help names them: the parser also accepts FOLDER as --folder.
    message = str(error)
    for argument in command["arguments"]:
        message = message.replace(f"parameter --{argument['name'].lower()} ", f"parameter {argument['name']} ")
    return message


def _next_step(error: TopobusError, arguments: Sequence[str]) -> str:
    """Return a next step for an error that has none of its own."""
    if isinstance(error, UsageError):
        return _help_of(arguments)
    if isinstance(error, InputError):
        return (
            f"`{_help_of(arguments)}` lists what is accepted; examples/pods and examples/claims have manifests "
            "to start from"
        )
    if isinstance(error, ContractError):
        if find_command(read_commands(), arguments)[0]["words"] in _READ_MANIFESTS:
            return (
                "correct it there, and run the command again: docs/reference/pods.md and "
                "docs/reference/allocation.md have the fields"
            )
        return "correct the file; where no file was given, `topobus doctor` names what cannot be read"
    return ""


def _report_defect(error: Exception) -> None:
    """Write the traceback into a file for the report. The terminal shows two lines."""
    with tempfile.NamedTemporaryFile("w", prefix="topobus-defect-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    console = error_console()
    console.print(f"[fail]error:[/fail] a defect of topobus: {escape(type(error).__name__)}: {escape(str(error))}")
    console.print(f"  [name]next:[/name] report it with {escape(str(Path(file.name)))}")
