"""Finds programs of NVIDIA's driver in the driver root, with the driver's libraries that they load,
and runs them.

Paths are those that this process sees. Where the root is not this process's own, its folder of
libraries is not searched as a whole: it also has the host's C library, which fits another loader
than that of this process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from msgspec import Struct

from topobus.gpu.driver_root.driver_files import SEARCHED_ROOTS, DriverFiles, find_driver_files
from topobus.gpu.driver_root.host_files import HostFiles
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.errors import HardwareError
from topobus.values.outcome import Refusal, refuse

__all__ = ["SEARCH_PATH", "FoundPrograms", "failure", "run_program", "search_programs"]

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the programs."""
_FOLDERS = ("usr/bin", "bin", "usr/sbin", "sbin", "usr/local/bin")
# The end of a program's output, in characters, that an error quotes.
_QUOTED = 300


class FoundPrograms(Struct, frozen=True, kw_only=True):
    """Programs of one driver root."""

    paths: dict[str, str]
    """By name."""
    libraries: dict[str, str] = {}
    """By name: the driver's own libraries, where the loader of this process does not find them by
    itself."""


def search_programs(
    settings: DriverFilesSettings, version: str, wanted: tuple[str, ...], code: str
) -> FoundPrograms | Refusal:
    """Find programs in the configured root, in that of the driver's files, or in the first of the
    usual ones that has them all.

    Errors: refuses with `code`, and names what the nearest root lacks.
    Cost: where the root is not this process's own, that of `find_driver_files`.
    """
    # The driver's files are searched even where containers get none of them (`bring`).
    searched = (
        find_driver_files(settings, version) if version and (settings.root or settings.host_root != "/") else None
    )
    files = searched if isinstance(searched, DriverFiles) else None
    roots = (settings.root,) if settings.root else (files.root,) if files is not None else SEARCHED_ROOTS
    host = settings.host_root.rstrip("/")
    missing = wanted
    for root in roots:
        view = HostFiles(settings.host_root, root)
        paths = {name: host + path for name in wanted if (path := _find(view, name))}
        if len(paths) == len(wanted):
            is_own = not host and view.root == "/"
            libraries = files.libraries if files is not None and not is_own else ()
            return FoundPrograms(
                paths=paths,
                libraries={name: host + library.host_path for library in libraries for name in library.names},
            )
        missing = min(missing, tuple(name for name in wanted if name not in paths), key=len)
    text = (
        f"{', '.join(missing)} of NVIDIA's driver: not below {', '.join(roots)}; install the driver's programs on "
        "the node, or name their folder in hardware.driver_files.root"
    )
    return refuse(code, text, missing=missing, roots=tuple(roots))


def run_program(
    command: Sequence[str],
    variables: Mapping[str, str],
    limit_s: float,
    *,
    stdin: bytes = b"",
    stdout: int | BinaryIO = subprocess.PIPE,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, whatever its exit status. Its errors are part of its output.

    Errors: raises HardwareError when it cannot be started, or takes too long.
    """
    try:
        return subprocess.run(
            command,
            env=dict(variables),
            timeout=limit_s,
            check=False,
            cwd="/",
            stdout=stdout,
            stderr=subprocess.STDOUT,
            input=stdin,
        )
    except subprocess.TimeoutExpired as err:
        raise HardwareError(f"{' '.join(command)} did not end within {limit_s:.3g} s", path=command[0]) from err
    except OSError as err:
        raise HardwareError(f"{command[0]} cannot be started: {err.strerror or err}", path=command[0]) from err


def failure(command: Sequence[str], status: int, output: str) -> str:
    """Describe how a program failed, with the end of its output."""
    text = " ".join(output.split())[-_QUOTED:] or "none"
    return f"{' '.join(command)} ended with status {status}; its output: {text}"


def _find(view: HostFiles, name: str) -> str:
    return next((path for folder in _FOLDERS if view.is_file(path := view.real(f"{folder}/{name}"))), "")
