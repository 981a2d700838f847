"""`topobus profile`: recorded machines on disk, to run the system on and to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from topobus.cli.exits import ExitCode, InputError, NotFoundError, UsageError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.simulation.machines import PROFILES, RecordedMachine, build, load_profile
from topobus.values.errors import ConfigError

__all__ = ["profile_app"]

profile_app = App(name="profile", help="Recorded machines: list, build, break and play them.")

Folder = Annotated[
    Path,
    Parameter(help="The machine's folder, as `topobus profile build` or `topobus up --dir` made it (there: machine)."),
]
Address = Annotated[str, Parameter(help="A PCI address, 0000:18:00.0; all below it goes with it.")]
Cpu = Annotated[int, Parameter(help="The CPU's number.")]


@profile_app.command(name="list")
def list_profiles(*, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """List the machines that come with Topobus."""
    titles = {name: load_profile(name).title for name in PROFILES}
    output = options.output()
    output.document({"profiles": titles})
    for name, title in titles.items():
        output.show(Text.assemble((f"{name:12} ", "name"), title))
    return ExitCode.OK


@profile_app.command(name="build")
def build_machine(
    profile: Annotated[str, Parameter(help="A machine of `topobus profile list`, or a TOML file.")],
    folder: Annotated[Path, Parameter(help="Where its tree is written; a new folder.")],
    *,
    has_device_nodes: Annotated[
        bool,
        Parameter(name="--device-nodes", help="Make real device nodes below dev, for a container runtime (as root)."),
    ] = False,
    is_if_absent: Annotated[
        bool, Parameter(name="--if-absent", help="Leave a machine that is there already as it is.")
    ] = False,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Write a machine's tree into a folder: topobus up --root FOLDER runs on it."""
    if is_if_absent and (folder / "sys").is_dir():
        return _print_machine(options, folder, "there is a machine already")
    try:
        made = build(profile, folder, has_device_nodes=has_device_nodes)
    except ConfigError as err:
        raise InputError(err.message, next_step=err.next_step or "topobus profile list") from err
    return _print_machine(options, made.root, made.profile.title)


@profile_app.command(name="play")
async def play(
    folder: Folder,
    *,
    speed: Annotated[float, Parameter(help="How many times as fast as in the profile.")] = 1.0,
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Play the faults that the machine's profile scripts, until the last of them."""
    if not speed > 0:
        raise UsageError(f"--speed: got {speed:g}, wanted more than 0", next_step="1 plays as fast as the profile")
    output = options.output()
    machine = _opened(folder)
    if not machine.profile.faults:
        return _print_machine(options, folder, f"profile {machine.profile.name} scripts no faults")

    def say(step: str) -> None:
        output.line({"folder": str(folder), "done": step})
        output.show(Text(step))

    await machine.play(speed=speed, say=say)
    return ExitCode.OK


@profile_app.command(name="remove")
def remove(folder: Folder, address: Address, *, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """Take a PCI function off the bus, as a kernel would."""
    return _change(options, folder, f"{address} is off the bus", lambda machine: machine.remove_pci(address))


@profile_app.command(name="restore")
def restore(folder: Folder, address: Address, *, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """Bring back a PCI function that was taken off."""
    return _change(options, folder, f"{address} is back", lambda machine: machine.restore_pci(address))


@profile_app.command(name="offline")
def offline(folder: Folder, cpu: Cpu, *, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """Take a CPU offline."""
    return _change(
        options, folder, f"CPU {cpu} is offline", lambda machine: machine.set_cpu_online(cpu, is_online=False)
    )


@profile_app.command(name="online")
def online(folder: Folder, cpu: Cpu, *, options: OutputOptions = OUTPUT_DEFAULTS) -> int:
    """Bring a CPU online again."""
    return _change(options, folder, f"CPU {cpu} is online", lambda machine: machine.set_cpu_online(cpu, is_online=True))


def _opened(folder: Path) -> RecordedMachine:
    try:
        return RecordedMachine.open(folder)
    except ConfigError as err:
        raise InputError(err.message, next_step="topobus profile build dgx FOLDER makes one") from err


def _change(options: OutputOptions, folder: Path, done: str, change: Callable[[RecordedMachine], None]) -> int:
    machine = _opened(folder)
    try:
        change(machine)
    except (ConfigError, ValueError) as err:
        raise NotFoundError(str(err), next_step=f"topobus machine --root {folder} shows what there is") from err
    return _print_machine(options, folder, done)


def _print_machine(options: OutputOptions, folder: Path, what: str) -> int:
    output = options.output()
    output.document({"folder": str(folder), "done": what})
    output.show(Text(f"{folder}: {what}"))
    return ExitCode.OK
