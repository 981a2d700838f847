"""Console script `topobus-gpu-hook`: an OCI hook (createContainer) that makes a container's loader
find the driver's libraries.

It reads the container's state from its standard input, as a runtime writes it. It writes the
container's /etc/ld.so.cache with the libraries of a folder, and with the image's compatibility
libraries where they serve this driver better. For musl's loader it writes the path file. It runs as
root in the container's mount namespace, before the container's program. So it trusts nothing of the
container: it executes no program, follows no link out of the root, and reads numbers of files with
limits. It does not need the service.

With the compatibility libraries of a CUDA image a newer CUDA runs on an older driver's kernel
module. Libraries older than the driver's own would only lose abilities of the driver.
Source: OCI runtime specification, config.md (createContainer hooks) and runtime.md (state); musl,
ldso/dynlink.c (path file); CUDA Compatibility guide, "Forward Compatibility"; the note of libcuda
names the drivers that it serves, and without a note a greater major version counts.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from topobus.gpu.driver_root import loader_cache
from topobus.gpu.driver_root.container_root import ContainerRoot
from topobus.gpu.driver_root.elf import AARCH64, X86_64, Elf, read_elf

__all__ = ["HookError", "main", "update_loader"]

_STATE_BYTES, _CONFIG_BYTES, _CACHE_BYTES, _PATHS_BYTES = 1 << 20, 1 << 24, 1 << 24, 1 << 16
# A driver's folder has fewer than a hundred names, CUDA's compatibility folder about ten.
_NAMES_LIMIT = 2000
_GLIBC_LOADERS = {X86_64: "/lib64/ld-linux-x86-64.so.2", AARCH64: "/lib/ld-linux-aarch64.so.1"}
_MUSL_NAMES = {X86_64: "x86_64", AARCH64: "aarch64"}
# Where musl looks without a path file.
_MUSL_FOLDERS = "/lib:/usr/local/lib:/usr/lib"
_LISTS = "/etc/ld.so.conf.d"
_COMPATIBILITY_FOLDER = "/usr/local/cuda/compat"
"""Where images of NVIDIA have them."""
_LIBRARY = re.compile(r"libcuda\.so\.(\d+(?:\.\d+)+)")


class HookError(Exception):
    """Raised when the container must not start. The runtime shows its message."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the state and update the container's loaders.

    Exits with 1 and a line with the reason when the container must not start.
    """
    parser = argparse.ArgumentParser(
        prog="topobus-gpu-hook",
        description="OCI hook (createContainer): let a container's loader find a driver's libraries.",
    )
    parser.add_argument("--folder", required=True, help="folder in the container that has the libraries")
    parser.add_argument("--driver-version", required=True, help="version of the loaded kernel module")
    options = parser.parse_args(arguments)
    try:
        update_loader(_root_path(sys.stdin.buffer.read(_STATE_BYTES)), options.folder, options.driver_version)
    except HookError as err:
        sys.exit(f"topobus-gpu-hook: {err}")


def update_loader(root_path: str, folder: str, driver_version: str) -> None:
    """Extend the files that the container's loaders read.

    Errors: raises HookError when the folder is missing or no short absolute path, or when a
    loader's file cannot be read or written.
    """
    if not folder.startswith("/") or posixpath.normpath(folder) != folder or re.search(r"[\s:]", folder):
        raise HookError(f"--folder is {folder!r}, wanted an absolute path in the container, in its shortest form")
    try:
        with ContainerRoot(root_path) as root:
            libraries, machine = _libraries(root, folder)
            if not libraries:
                raise HookError(
                    f"{folder} in the container has no libraries; the runtime did not mount the driver's files"
                )
            compatible = _compatibility_libraries(root, driver_version)
            if root.exists(_GLIBC_LOADERS[machine]):
                folders = [*([_COMPATIBILITY_FOLDER] if compatible else []), folder]
                _extend_cache(root, {**libraries, **compatible}, machine, folders)
            if root.exists(f"/lib/ld-musl-{_MUSL_NAMES[machine]}.so.1"):
                _extend_musl(root, folder, _MUSL_NAMES[machine])
    except OSError as err:
        raise HookError(
            f"the container's root {root_path}: {err.filename or ''}: {err.strerror}; where a container's "
            "root cannot be written set hardware.driver_files.loader to variable"
        ) from err


def _root_path(data: bytes) -> str:
    """Find the container's root folder: the state names the bundle, and the bundle's configuration
    names the root.
    """
    try:
        bundle = json.loads(data)["bundle"]
        with open(posixpath.join(bundle, "config.json"), "rb") as file:  # noqa: PTH123 - nothing of pathlib is needed at each start of a container
            config: Any = json.loads(file.read(_CONFIG_BYTES))
        path = str(posixpath.join(bundle, config["root"]["path"]))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise HookError(
            f"the state on standard input: {type(err).__name__}: {err}; wanted the bundle of a container with a root"
        ) from err
    if posixpath.normpath(path) == "/":
        raise HookError("the container's root is the host's own")
    return path


def _libraries(root: ContainerRoot, folder: str) -> tuple[dict[str, str], int]:
    """Find the libraries of a folder (SONAME, or the name of a file, to path), and the machine that
    most of them are for.
    """
    libraries: dict[str, str] = {}
    machines: list[int] = []
    for name in root.names(folder)[:_NAMES_LIMIT]:
        facts = _facts(root, f"{folder}/{name}") if ".so" in name else None
        if facts is not None and facts.machine in _GLIBC_LOADERS:
            machines.append(facts.machine)
            # Programs open a library by its SONAME, and a few by its unversioned name.
            libraries[name] = f"{folder}/{name}"
    return libraries, max(machines, key=machines.count, default=X86_64)


def _compatibility_libraries(root: ContainerRoot, driver_version: str) -> dict[str, str]:
    names = root.names(_COMPATIBILITY_FOLDER)[:_NAMES_LIMIT]
    name = _compatibility_library(names)
    facts = _facts(root, f"{_COMPATIBILITY_FOLDER}/{name}") if name else None
    if facts is None or not _is_used(name, facts, driver_version):
        return {}
    return {
        library: f"{_COMPATIBILITY_FOLDER}/{library}"
        for library in names
        if ".so" in library
        and (of_library := _facts(root, f"{_COMPATIBILITY_FOLDER}/{library}")) is not None
        and of_library.machine == facts.machine
    }


def _facts(root: ContainerRoot, path: str) -> Elf | None:
    """Read a file of the container as a library. An image may have anything under such a name."""
    try:
        return read_elf(lambda offset, size: root.read(path, size, offset))
    except (OSError, OverflowError):
        return None


def _extend_cache(root: ContainerRoot, libraries: dict[str, str], machine: int, folders: Sequence[str]) -> None:
    try:
        data = root.read("/etc/ld.so.cache", _CACHE_BYTES)
    except FileNotFoundError:
        data = b""
    before = loader_cache.parse(data) if data else loader_cache.LoaderCache()
    if before is None:
        raise HookError(
            "/etc/ld.so.cache of the image has no form that this program reads; set "
            "hardware.driver_files.loader to variable"
        )
    cache = loader_cache.extend(before, libraries, machine)
    if cache is not None:
        root.write("/etc", "ld.so.cache", loader_cache.render(cache))
    if root.exists(_LISTS):
        # Used when a program of the container runs `ldconfig`.
        root.write(_LISTS, "00-topobus-driver.conf", "".join(f"{folder}\n" for folder in folders).encode())


def _extend_musl(root: ContainerRoot, folder: str, machine: str) -> None:
    name = f"ld-musl-{machine}.path"
    try:
        text = root.read(f"/etc/{name}", _PATHS_BYTES).decode("utf-8", "surrogateescape").strip()
    except FileNotFoundError:
        text = _MUSL_FOLDERS
    if folder not in re.split(r"[:\n]", text):
        root.write("/etc", name, f"{text}:{folder}\n".encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    main()


def _compatibility_library(names: Iterable[str]) -> str:
    """Choose libcuda among the names of the folder.

    Empty when there is none, or when there are several and the one in use is not known.

    >>> _compatibility_library(["libcuda.so", "libcuda.so.1", "libcuda.so.590.44.01"])
    'libcuda.so.590.44.01'
    """
    libraries = [name for name in names if _LIBRARY.fullmatch(name)]
    return libraries[0] if len(libraries) == 1 else ""


def _is_used(name: str, facts: Elf, driver_version: str) -> bool:
    """Return whether the libraries beside a compatibility libcuda serve a driver better than its
    own.

    >>> _is_used("libcuda.so.590.44.01", Elf(machine=62), "580.95.05"), _is_used("libcuda.so.570.86.10", Elf(machine=62), "580.95.05")
    (True, False)
    """  # noqa: E501
    match = _LIBRARY.fullmatch(name)
    if match is None:
        return False
    image, host = _numbers(match[1]), _numbers(driver_version)
    if facts.serves_drivers is not None:
        return host[:1] != () and host[0] in facts.serves_drivers and image > host
    return image[:1] > host[:1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
