"""The operator's program: reads the command line, runs one command, ends with a documented exit code and never with a traceback."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape

from topobus.cli.command_groups import CommandGroup
from topobus.cli.command_words import with_options_behind
from topobus.cli.exits import ExitCode, InputError, UsageError, code_of
from topobus.cli.help.overview import COMMANDS, PROGRAM
from topobus.cli.help.quick import answer_quickly
from topobus.cli.render.output import Output, adapt_streams, error_console
from topobus.domain.errors import ContractError, TopobusError

__all__ = ["application", "run"]

_READ_MANIFESTS = (["allocate"], ["apply"], ["claim"], ["delete"], ["diff"], ["place"], ["simulate"])


def application() -> CommandGroup:
    """Assemble the program. Commands are named by import path, so that only the one that runs is loaded."""
    program = CommandGroup("topobus", PROGRAM)
    for commands in COMMANDS.values():
        for name, path, text in commands:
            program.add(f"topobus.cli.{path}", name, text)
    return program


def run(arguments: Sequence[str], *, when_loaded: Callable[[], None] = lambda: None) -> int:
    """Run one command line and give its exit code; `when_loaded` is called between the loading of the command and its run."""
    adapt_streams()
    if answer_quickly(list(arguments)):
        return ExitCode.OK
    arguments = with_options_behind(arguments)
    try:
        call = application().read(arguments)
        when_loaded()
        answer = call()
    except TopobusError as err:
        err.next_step = err.next_step or _next_step(err, arguments)
        Output().error(err)
        return code_of(err)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout is gone (`| head`): what it wanted it has. Point stdout away, or the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as err:  # noqa: BLE001 - boundary: the operator's program, as runtime.run is for a service
        _report_defect(err)
        return ExitCode.INTERNAL
    return int(answer) if isinstance(answer, int) else ExitCode.OK


def _next_step(error: TopobusError, arguments: Sequence[str]) -> str:
    """Say what to do where the error itself does not: it has said what is wrong, and where."""
    if isinstance(error, UsageError):
        return " ".join(("topobus", *application().words_of(arguments), "--help"))
    if isinstance(error, InputError):
        return f"`topobus {' '.join((*application().words_of(arguments), '--help'))}` says what is read; examples/pods and examples/claims have manifests to start from"
    if isinstance(error, ContractError):
        if application().words_of(arguments)[:1] in _READ_MANIFESTS:
            return "correct it there, and run the command again: docs/reference/pods.md and docs/reference/allocation.md have the fields"
        return "correct the file; where no file was given, `topobus doctor` names what cannot be read"
    return ""


def _report_defect(error: Exception) -> None:
    """Keep the traceback in a file for the report; the terminal gets two lines."""
    with tempfile.NamedTemporaryFile("w", prefix="topobus-defect-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    console = error_console()
    console.print(f"[fail]error:[/fail] a defect of topobus: {escape(type(error).__name__)}: {escape(str(error))}")
    console.print(f"  [name]next:[/name] report it with {escape(str(Path(file.name)))}")
