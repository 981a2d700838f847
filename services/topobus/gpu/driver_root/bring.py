"""Decides whether Topobus gives a container the driver's files, how its loader finds them, and which
edits do it.

What was found is kept until a folder changes. The files are not given where NVIDIA's container
runtime brings them. Each library is mounted under each of its names, so that no link has to be made
in the container. Where the loader's cache leads to the libraries, they are in a folder that no
image names. Then an image's compatibility libraries take precedence where they should, even where
the image sets `LD_LIBRARY_PATH` to NVIDIA's usual folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from topobus.gpu.driver_root.driver_files import SEARCHED_ROOTS, DriverFiles, File, find_driver_files, find_sockets
from topobus.gpu.driver_root.host_files import HostFiles
from topobus.gpu.driver_root.selection import LIBRARY_FOLDERS
from topobus.sysfs.driver_files import HOOK_PROGRAM, LIBRARY_PATH
from topobus.sysfs.tree import Tree
from topobus.values.edits import ContainerEdits, Hook, Mount
from topobus.values.outcome import Refusal, refuse
from topobus.values.request import Owner, OwnerKind

__all__ = ["CACHED_FOLDER", "IMAGES_FOLDER", "DriverFileSource", "file_edits"]

# Marks of Docker's and Podman's containers: a process in one does not see the host's files.
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
# A folder that changed less than this ago may change again without a new time: most file systems
# record times in steps of 10 ms.
_SETTLED_NS = 1_000_000_000
CACHED_FOLDER = "/opt/topobus/nvidia/lib64"
IMAGES_FOLDER = "/usr/local/nvidia/lib64"
"""In the `LD_LIBRARY_PATH` of NVIDIA's images."""
_Way = Literal["hook", "variable", "image"]
_SOCKET_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "bind")
# The hook runs as root beside the container and must not inherit the image's environment.
_HOOK_ENVIRONMENT = ("LC_ALL=C.UTF-8",)
# It takes a tenth of a second, and longer on a node under load.
_HOOK_TIMEOUT_S = 60


class DriverFileSource:
    """Finds the files of the loaded driver, again only when a folder of libraries has changed."""

    def __init__(self) -> None:
        """Begin with nothing found."""
        self._key: object = None
        self._answer: DriverFiles | Refusal | None = None

    def find(self, tree: Tree, version: str) -> DriverFiles | Refusal | None:
        """Find the files of a version.

        None where Topobus does not bring them, or no module is loaded.
        """
        if not version or not _is_asked(tree):
            return None
        settings = tree.settings.driver_files
        roots = (settings.root,) if settings.root else SEARCHED_ROOTS
        views = [HostFiles(settings.host_root, root) for root in roots]
        # Most roots are absent, so each costs one check.
        stamps = tuple(view.stamp(folder) for view in views if view.real("") for folder in LIBRARY_FOLDERS)
        key = (version, settings, stamps)
        if key != self._key:
            is_settled = all(changed_ns < time.time_ns() - _SETTLED_NS for _, changed_ns in stamps)
            self._key, self._answer = key if is_settled else None, find_driver_files(settings, version)
        return self._answer

    def warnings(self, tree: Tree, version: str) -> tuple[str, ...]:
        """List what is wrong with the files, for the inventory."""
        answer = self.find(tree, version)
        if not isinstance(answer, Refusal):
            return ()
        then = (
            "claims are refused"
            if tree.settings.driver_files.bring == "always"
            else "containers get them only where NVIDIA's container runtime brings them"
        )
        return tuple(f"{reason.message}; until then {then}" for reason in answer.reasons)

    def edits(self, tree: Tree, version: str, owner: Owner, *, has_storage: bool) -> ContainerEdits | Refusal | None:
        """Make the edits of a container, or return None where NVIDIA's container runtime brings the
        files.
        """
        settings = tree.settings.driver_files
        answer = self.find(tree, version)
        if answer is None and settings.bring == "always":
            return refuse(
                "driver-files-incomplete",
                "no NVIDIA kernel module is loaded: /proc/driver/nvidia/version names no version",
            )
        if answer is None or isinstance(answer, Refusal):
            return answer if settings.bring == "always" else None
        way = _way(tree, owner)
        if isinstance(way, Refusal):
            return way
        sockets = find_sockets(settings.host_root, answer.root)
        return file_edits(answer, sockets=sockets, way=way, hook=_hook_program(tree), has_storage=has_storage)


def _is_asked(tree: Tree) -> bool:
    settings = tree.settings.driver_files
    if settings.bring != "auto" or settings.root:
        return settings.bring != "never"
    sees_host = settings.host_root != "/" or (
        tree.is_live and not any(Path(mark).exists() for mark in _CONTAINER_MARKS)
    )
    return sees_host and not tree.is_recorded


def _way(tree: Tree, owner: Owner) -> _Way | Refusal:
    """Choose how the loader of a container finds the libraries."""
    settings = tree.settings.driver_files
    if settings.loader in ("variable", "image"):
        return settings.loader
    if owner.kind is not OwnerKind.CLAIM:
        # kubelet's device plugin API has no field for a hook.
        return "variable"
    if _hook_program(tree):
        return "hook"
    if settings.loader == "hook":
        return refuse(
            "loader-hook-missing",
            f"hardware.driver_files.loader is hook, and {HOOK_PROGRAM} is not beside {sys.executable}: name "
            "its path on the host in hardware.driver_files.hook",
        )
    return "variable"


def _hook_program(tree: Tree) -> str:
    """Find the hook program's path on the host, or "" when it is not known."""
    settings = tree.settings.driver_files
    if settings.hook:
        return settings.hook
    own = Path(sys.executable).parent / HOOK_PROGRAM
    return str(own) if tree.is_live and settings.host_root == "/" and own.exists() else ""


def file_edits(
    driver_files: DriverFiles, *, sockets: Sequence[File] = (), way: _Way, hook: str, has_storage: bool = False
) -> ContainerEdits:
    """Make the edits, common to all GPUs of a container.

    Shapes: hook — the program's path on the host, for the way `hook`; has_storage — with the files
    of GPUDirect Storage.
    """
    folder = CACHED_FOLDER if way == "hook" else IMAGES_FOLDER
    mounts = [
        Mount(host_path=library.host_path, container_path=f"{folder}/{name}")
        for library in driver_files.libraries
        for name in library.names
    ]
    others = (*driver_files.files, *(driver_files.storage if has_storage else ()))
    mounts += [Mount(host_path=file.host_path, container_path=file.container_path) for file in others]
    mounts += [
        Mount(host_path=file.host_path, container_path=file.container_path, options=_SOCKET_OPTIONS) for file in sockets
    ]
    hooks: tuple[Hook, ...] = ()
    if way == "hook":
        arguments = (HOOK_PROGRAM, "--folder", folder, "--driver-version", driver_files.version)
        hooks = (
            Hook(name="createContainer", path=hook, args=arguments, env=_HOOK_ENVIRONMENT, timeout_s=_HOOK_TIMEOUT_S),
        )
    env = {"LD_LIBRARY_PATH": LIBRARY_PATH} if way == "variable" else {}
    return ContainerEdits(env=env, mounts=tuple(mounts), hooks=hooks)
