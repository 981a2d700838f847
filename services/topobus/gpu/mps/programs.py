"""Finds the programs of MPS in the driver root, and the driver's libraries that they load.

Paths are those that this process sees. A Refusal names what is missing. Where the root is not this
process's own, its folder of libraries is not searched as a whole: it also has the host's C library,
which fits another loader than that of this process.
"""

from __future__ import annotations

from topobus.gpu.driver_root.driver_files import SEARCHED_ROOTS, DriverFiles, find_driver_files
from topobus.gpu.driver_root.host_files import HostFiles
from topobus.gpu.mps.daemon_state import Programs
from topobus.sysfs.driver_files import DriverFilesSettings
from topobus.values.outcome import Refusal, refuse

__all__ = ["find_programs"]

_CONTROL, _SERVER, _SMI = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi"
_FOLDERS = ("usr/bin", "bin", "usr/sbin", "sbin", "usr/local/bin")


def find_programs(settings: DriverFilesSettings, version: str, *, wants_smi: bool) -> Programs | Refusal:
    """Find the programs in the configured root, in that of the driver's files, or in the first of
    the usual ones that has them.

    Cost: where the root is not this process's own, that of `find_driver_files`.
    """
    # The driver's files are searched even where containers get none of them (`bring`).
    searched = (
        find_driver_files(settings, version) if version and (settings.root or settings.host_root != "/") else None
    )
    files = searched if isinstance(searched, DriverFiles) else None
    roots = (settings.root,) if settings.root else (files.root,) if files is not None else SEARCHED_ROOTS
    host = settings.host_root.rstrip("/")
    wanted = (_CONTROL, _SERVER, _SMI) if wants_smi else (_CONTROL, _SERVER)
    missing: tuple[str, ...] = wanted
    for root in roots:
        view = HostFiles(settings.host_root, root)
        paths = {name: path for name in wanted if (path := _find(view, name))}
        if len(paths) == len(wanted):
            is_own = not host and view.root == "/"
            libraries = (
                {}
                if is_own or files is None
                else {name: host + library.host_path for library in files.libraries for name in library.names}
            )
            return Programs(
                control=host + paths[_CONTROL], smi=host + paths[_SMI] if wants_smi else "", libraries=libraries
            )
        missing = min(missing, tuple(name for name in wanted if name not in paths), key=len)
    text = (
        f"{', '.join(missing)} of NVIDIA's driver: not below {', '.join(roots)}; install the driver's package "
        "with MPS on the node, or name its folder in hardware.driver_files.root"
    )
    return refuse("mps-program-missing", text, missing=missing, roots=tuple(roots))


def _find(view: HostFiles, name: str) -> str:
    return next((path for folder in _FOLDERS if view.is_file(path := view.real(f"{folder}/{name}"))), "")
