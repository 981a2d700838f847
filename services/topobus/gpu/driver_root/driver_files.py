"""Finds the files of the loaded NVIDIA driver on this host: libraries, programs, firmware,
configuration and sockets, all of exactly the loaded version.

The result has the files' real paths on the host. A Refusal names what is missing in which root, and
what to do. Everything is read through `HostFiles`, below the configured roots.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from topobus.gpu.driver_root.host_files import HostFiles
from topobus.gpu.driver_root.selection import (
    BINARIES,
    CONFIGURATION,
    FIRMWARE_FOLDERS,
    LIBRARY_FOLDERS,
    SOCKETS,
    STORAGE_FILES,
    XORG_MODULES,
    driver_libraries,
    library_names,
    missing_libraries,
    other_versions,
)
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.outcome import Reason, Refusal

__all__ = ["SEARCHED_ROOTS", "DriverFiles", "File", "Library", "find_driver_files", "find_sockets"]

SEARCHED_ROOTS = ("/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/usr/local/nvidia", "/run/opengl-driver", "/")
"""Where a driver container, GKE, others with a plain folder, NixOS, and a driver of the
distribution have their files; the first one with the loaded version serves."""

_SUB_FOLDERS = ("", "vdpau")
_XORG_FOLDERS = tuple(
    f"{library}/{folder}"
    for library in ("usr/lib", "usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
    for folder in ("xorg/modules/drivers", "xorg/modules/extensions", "nvidia/xorg")
)


class Library(Struct, frozen=True, kw_only=True):
    """One library."""

    host_path: str
    names: tuple[str, ...]
    """Under which a container has it, relative to its folder of libraries."""


class File(Struct, frozen=True, kw_only=True):
    """One other file."""

    host_path: str
    container_path: str


class DriverFiles(Struct, frozen=True, kw_only=True):
    """What a container needs of the driver's user space."""

    root: str
    version: str
    libraries: tuple[Library, ...]
    files: tuple[File, ...] = ()
    storage: tuple[File, ...] = ()
    """For GPUDirect Storage alone."""


def find_driver_files(settings: DriverFilesSettings, version: str) -> DriverFiles | Refusal:
    """Find the files of the loaded version, in the configured root or in the first of the usual
    ones that has them.

    Errors: raises nothing; returns Refusal code driver-files-incomplete, with one reason for each
    root that has some driver.
    Cost: lists about twenty folders, and reads the headers of some forty libraries.
    """
    roots = (settings.root,) if settings.root else SEARCHED_ROOTS
    reasons: list[Reason] = []
    for path in roots:
        view = HostFiles(settings.host_root, path)
        libraries = _libraries(view, version)
        names = [name for library in libraries for name in library.names]
        missing = missing_libraries(names, version)
        if not missing:
            return DriverFiles(
                root=view.root,
                version=version,
                libraries=libraries,
                files=(*_binaries(view), *_firmware(view, version), *_configuration(view), *_xorg(view, version)),
                storage=tuple(
                    File(host_path=real, container_path=f"/{path}")
                    for path in STORAGE_FILES
                    if view.is_file(real := view.real(path))
                ),
            )
        others = other_versions(name for folder in LIBRARY_FOLDERS for name in view.names(folder))
        if others or len(missing) < 3 or settings.root:
            reasons.append(_incomplete(view.root, version, missing, others))
    return Refusal(reasons=tuple(reasons) or (_absent(roots, version),))


def _libraries(view: HostFiles, version: str) -> tuple[Library, ...]:
    """Find the libraries.

    Of two with one name the one in the first folder counts. Libraries for another machine than
    libcuda's are left out.
    """
    machines: dict[str, int] = {}
    libraries: dict[str, Library] = {}
    for folder in LIBRARY_FOLDERS:
        for sub in _SUB_FOLDERS:
            listed = view.names(f"{folder}/{sub}")
            for name in driver_libraries(listed, version):
                key = f"{sub}/{name}" if sub else name
                real = view.real(f"{folder}/{key}")
                elf = view.elf(real) if key not in libraries and view.is_file(real) else None
                if elf is None:
                    continue
                names = library_names(name, elf.soname, listed)
                machines[key] = elf.machine
                libraries[key] = Library(
                    host_path=real, names=tuple(f"{sub}/{name}" if sub else name for name in names)
                )
    machine = machines.get(f"libcuda.so.{version}")
    chosen = {key: library for key, library in libraries.items() if machine is None or machines[key] == machine}
    return _each_name_once([chosen[key] for key in sorted(chosen)])


def _each_name_once(libraries: Sequence[Library]) -> tuple[Library, ...]:
    """Give each name to one library, first to those that have it as their own file name: two mounts
    on one path would contradict each other.
    """
    taken = {library.names[0] for library in libraries}
    distinct: list[Library] = []
    for library in libraries:
        names = [library.names[0], *(name for name in library.names[1:] if name not in taken)]
        taken.update(names)
        distinct.append(Library(host_path=library.host_path, names=tuple(names)))
    return tuple(distinct)


def _binaries(view: HostFiles) -> tuple[File, ...]:
    # The last folder is Debian's: links in /etc lead to it, and a container does not see those.
    folders = ("usr/bin", "bin", "usr/sbin", "sbin", "usr/local/bin", "usr/lib/nvidia/current")
    return tuple(
        File(host_path=real, container_path=f"/usr/bin/{name}")
        for name in BINARIES
        if (real := next((path for folder in folders if view.is_file(path := view.real(f"{folder}/{name}"))), ""))
    )


def _firmware(view: HostFiles, version: str) -> tuple[File, ...]:
    for folder in FIRMWARE_FOLDERS:
        names = [name for name in view.names(f"{folder}/{version}") if name.startswith("gsp") and name.endswith(".bin")]
        if names:
            return tuple(
                File(
                    host_path=view.real(f"{folder}/{version}/{name}"),
                    container_path=f"/lib/firmware/nvidia/{version}/{name}",
                )
                for name in names
            )
    return ()


def _configuration(view: HostFiles) -> tuple[File, ...]:
    return tuple(
        File(host_path=real, container_path=inside)
        for inside, places in CONFIGURATION.items()
        if (real := next((path for place in places if view.is_file(path := view.real(place))), ""))
    )


def _xorg(view: HostFiles, version: str) -> tuple[File, ...]:
    files: dict[str, File] = {}
    for folder in _XORG_FOLDERS:
        for name in (XORG_MODULES[0], f"{XORG_MODULES[1]}.{version}"):
            real = view.real(f"{folder}/{name}")
            if name not in files and view.is_file(real):
                files[name] = File(host_path=real, container_path=f"/{folder}/{name}")
    extension = files.get(f"{XORG_MODULES[1]}.{version}")
    if extension is not None:
        plain = f"{extension.container_path.rpartition('/')[0]}/{XORG_MODULES[1]}"
        files[XORG_MODULES[1]] = File(host_path=extension.host_path, container_path=plain)
    return tuple(files.values())


def find_sockets(host_root: str, root: str) -> tuple[File, ...]:
    """Find the daemons' sockets, which come and go: below its own /run for a driver container, else
    in the host's.
    """
    view = HostFiles(host_root, root)
    return tuple(
        File(host_path=real, container_path=f"/run/{name}")
        for name in SOCKETS
        if view.is_socket(real := view.real(f"run/{name}") or view.host_path(f"/run/{name}"))
    )


def _incomplete(root: str, version: str, missing: Sequence[str], others: Sequence[str]) -> Reason:
    got = f"libraries of {', '.join(others)}" if others else "some libraries of it"
    step = (
        "load the module of the installed driver (a reboot), or install the user space of the loaded one"
        if others and version not in others
        else "install all of the driver's packages, or name another folder in hardware.driver_files.root"
    )
    text = (
        f"the driver's files at {root} are incomplete: got {got}, wanted {', '.join(missing)} as the loaded "
        f"module is {version}; {step}"
    )
    return Reason(
        code="driver-files-incomplete",
        message=text,
        facts={"root": root, "wanted": tuple(missing), "got": tuple(others)},
    )


def _absent(roots: Sequence[str], version: str) -> Reason:
    text = (
        f"no files of driver {version} are at {', '.join(roots)}: got no libcuda.so, wanted "
        f"libcuda.so.{version}; name the folder in hardware.driver_files.root, "
        "and where this process sees the host in hardware.driver_files.host_root"
    )
    return Reason(code="driver-files-incomplete", message=text, facts={"roots": tuple(roots), "wanted": version})
