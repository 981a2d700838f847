"""`topobus record`: records a real machine, and checks that the recording reads like the
original.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.status import Status
from rich.text import Text

from topobus.cli.exits import ExitCode, InputError
from topobus.cli.options import OUTPUT_DEFAULTS, OutputOptions
from topobus.cli.pci_names import copy_names
from topobus.cli.render.output import Output
from topobus.process.own_folder import objection_to_folder
from topobus.sysfs.machine import read_machine
from topobus.sysfs.recording import Recording, record
from topobus.sysfs.tree import HardwareSettings, Tree
from topobus.values.machine import Machine

__all__ = ["record_machine"]

_SHOWN_UNREADABLE = 5


def record_machine(
    folder: Annotated[Path, Parameter(help="An empty folder, or one that does not exist yet.")],
    *,
    root: Annotated[
        Path, Parameter(help="The hardware tree to record: a folder with sys and proc; / is this machine.")
    ] = Path("/"),
    options: OutputOptions = OUTPUT_DEFAULTS,
) -> int:
    """Copy what Topobus reads of this machine into FOLDER, which every service and `up --root` can
    then read as if it were the machine.
    """
    output = options.output()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already and not empty", next_step="give a folder that does not exist yet")
    if folder.exists():
        objection = objection_to_folder(folder.stat())
        if objection:
            raise InputError(
                f"{folder} {objection}", next_step="give a folder that does not exist yet, in one of yours"
            )
    source = Tree(HardwareSettings(root=str(root), honours_cpuset=False))
    try:
        done = _record(source, folder, output)
        original = read_machine(source, node="recorded")
        copy_names(original.pci_devices, root, folder)
    except OSError as err:
        raise InputError(
            f"cannot write {err.filename or folder}: {err.strerror}", next_step="give a folder of yours"
        ) from err
    copy = read_machine(Tree(HardwareSettings(root=str(folder), honours_cpuset=False)), node="recorded")
    different = _differences(original, copy)
    _report(output, folder, done, different)
    return ExitCode.NO if different else ExitCode.OK


def _record(source: Tree, folder: Path, output: Output) -> Recording:
    if not output.console.is_terminal or output.is_json:
        return record(source, folder)
    with Status("recording", console=output.console) as status:
        return record(source, folder, on_folder=lambda path: status.update(f"recording {path}"))


def _differences(original: Machine, copy: Machine) -> list[str]:
    """Name the differences between the original and the copy.

    Free memory may have changed meanwhile and is no part of a machine.
    """
    return [name for name in original.__struct_fields__ if getattr(original, name) != getattr(copy, name)]


def _size_text(size_bytes: int) -> str:
    """Write a size in the unit that has a digit before the point.

    >>> _size_text(300), _size_text(40_000), _size_text(5 << 20)
    ('300 B', '39.1 KiB', '5.0 MiB')
    """
    if size_bytes < 1 << 10:
        return f"{size_bytes} B"
    return f"{size_bytes / 1024:.1f} KiB" if size_bytes < 1 << 20 else f"{size_bytes / 1024 / 1024:.1f} MiB"


def _report(output: Output, folder: Path, done: Recording, different: list[str]) -> None:
    output.document(
        {
            "folder": str(folder),
            "files": done.files,
            "links": done.links,
            "size_bytes": done.size_bytes,
            "unreadable": done.unreadable,
            "different": different,
        }
    )
    output.show(Text(f"{folder}: {done.files} files and {done.links} links, {_size_text(done.size_bytes)}"))
    if different:
        output.show(
            Text(
                f"the copy differs from the original in: {', '.join(different)}; did the machine change meanwhile?",
                "fail",
            )
        )
    else:
        output.show(Text("the copy reads like the original", "ok"))
    for path in done.unreadable[:_SHOWN_UNREADABLE]:
        output.show(Text(f"left out: {path}", "warn"))
    if len(done.unreadable) > _SHOWN_UNREADABLE:
        output.show(Text(f"left out: {len(done.unreadable) - _SHOWN_UNREADABLE} more; --json lists them", "warn"))
    output.show(Text("It holds hardware addresses, serial numbers and routes: review it before you share it.", "faint"))
    output.show(Text(f"next: topobus machine --root {folder}; topobus up --root {folder}", "faint"))
