"""The operator's program: reads the command line, runs one command, ends with a documented exit code and never with a traceback."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.markup import escape

from topobus.cli.command_words import with_options_behind
from topobus.cli.exits import ExitCode, code_of
from topobus.cli.render.output import Output, adapt_streams, error_console
from topobus.domain.errors import TopobusError

__all__ = ["application", "run"]

# Name, where it is below topobus.cli, and what the overview says of it; in the order of a first walk through the system.
_COMMANDS = (
    ("demo", "demo:demo", "The whole story in under a minute: start, place, refuse, kubelet, claim, fault."),
    ("up", "commands.up:up", "Start NATS and the eight services and keep them running; Ctrl-C stops everything."),
    ("machine", "commands.machine:machine", "Draw a machine: sockets, NUMA nodes, CPUs, devices, and who holds what."),
    ("inventory", "commands.inventory:inventory", "List devices: where they sit, how they are, who holds them."),
    ("pods", "commands.pods:pods", "List pods: container, resource, devices, NUMA node and health, as kubelet tells it."),
    ("place", "commands.place:place", "Place a pod and say where and why, or why not and what would have to be freed."),
    ("simulate", "commands.simulate:simulate", "Plan pods on a recorded machine, without any server."),
    ("release", "commands.place:release_app", "Let go of what an owner holds."),
    ("apply", "commands.objects:apply", "Create or replace objects of the stand-alone API: classes, claims, pods, in Kubernetes' YAML."),
    ("get", "commands.objects:get", "List objects, or show those named: topobus get claims, pods, deviceclasses."),
    ("describe", "commands.describe:describe", "All about one object: devices, users, decisions, and why a claim waits."),
    ("delete", "commands.objects:delete", "Delete objects; what holds devices lets go of them first."),
    ("allocate", "commands.allocate:allocate", "Say where claims would be allocated, or why not, without writing anything."),
    ("claim", "commands.claim:claim_app", "Short for apply, get and delete of claims."),
    (
        "nodeallocationstates",
        "commands.nodeallocationstates:nodeallocationstates",
        "Allocatable, allocated and prepared devices, as classic DRA has it.",
    ),
    ("migrate", "commands.migrate:migrate", "Turn classic DRA manifests into structured ones."),
    ("oci", "commands.oci:oci_app", "Print a container's OCI spec with its devices, as kubelet and a runtime would make it."),
    ("health", "commands.health:health_app", "How devices are, and how they are from now on."),
    ("device", "commands.device:device_app", "Work on single devices: maintain, exclude, return, forgive, reset, list."),
    ("decisions", "commands.decisions:decisions", "What was decided lately."),
    ("explain", "commands.explain:explain", "Take one decision apart and replay it offline."),
    ("record", "commands.record:record_machine", "Copy this machine's hardware tree, to read, test and break it elsewhere."),
    ("keys", "commands.keys:keys_app", "Make, change and show the passwords of NATS' users."),
    (
        "move-ledger",
        "commands.move_ledger:move_ledger",
        "Copy a node's ledger to another NATS server, while the node's services are stopped.",
    ),
    ("context", "commands.context:context_app", "Name the systems that commands talk to, and choose one."),
    ("doctor", "commands.doctor:doctor", "Check a deployment, with a next step for each finding."),
)


def application() -> App:
    """Assemble the program. Commands are named by import path, so that only the one that runs is loaded."""
    app = App(
        name="topobus",
        version=f"topobus {version('topobus')}",
        help="Place pods on GPUs, NICs, FPGAs and CPUs that sit close to each other.",
        help_epilogue="Exit codes: 0 yes, 1 no, 2 usage, 65 bad content, 66 no such file, 69 unavailable, 70 our defect, 74 hardware, 78 setting.",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, path, text in _COMMANDS:
        app.command(f"topobus.cli.{path}", name=name, help=text)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    adapt_streams()
    arguments = with_options_behind(arguments)
    try:
        answer = application()(arguments, exit_on_error=False, print_error=False, error_console=error_console())
    except CycloptsError as err:
        console = error_console()
        console.print(f"[fail]error:[/fail] {escape(str(err))}")
        console.print(f"  [name]next:[/name] topobus {' '.join((*_command_of(arguments), '--help'))}")
        return ExitCode.USAGE
    except TopobusError as err:
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


def _command_of(arguments: Sequence[str]) -> list[str]:
    """Take the leading words: for `place --nod x` the help that is meant is place's."""
    words: list[str] = []
    app = application()
    for word in arguments:
        if word.startswith("-") or word not in app:
            break
        words.append(word)
        app = app[word]
    return words


def _report_defect(error: Exception) -> None:
    """Keep the traceback in a file for the report; the terminal gets two lines."""
    with tempfile.NamedTemporaryFile("w", prefix="topobus-defect-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    console = error_console()
    console.print(f"[fail]error:[/fail] a defect of topobus: {escape(type(error).__name__)}: {escape(str(error))}")
    console.print(f"  [name]next:[/name] report it with {escape(str(Path(file.name)))}")
