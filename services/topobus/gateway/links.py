"""Resolves links in paths of the host, as far as this process sees them.

Functions that do not state otherwise block: call them in a thread. In a pod the gateway sees few of
the host's folders. A path that it does not see counts as its own target, so an operator's prefixes
must be folders that only root can write.
"""

from __future__ import annotations

import os
import os.path
import stat
import sys
from collections.abc import Iterable

import msgspec

from topobus.gateway.containers.rules.edit_limits import EditRights
from topobus.sysfs.driver_files import HOOK_PROGRAM

__all__ = ["groups_of_nodes", "in_memory", "real_paths", "with_own_hook", "with_real_folders"]


def real_paths(paths: Iterable[str]) -> dict[str, str]:
    """Follow all links in paths.

    Paths without links, and texts that cannot be a path, are left out.
    """
    plain: dict[str, bool] = {"": True}
    return {
        path: target
        for path in paths
        if "\0" not in path
        and path.startswith("/")
        and not _is_plain(path, plain)
        and (target := os.path.realpath(path)) != path
    }


def groups_of_nodes(paths: Iterable[str]) -> frozenset[int] | None:
    """Read the groups of device nodes on this host. None when none of the nodes exists here.

    This does not block, because /dev is in memory.
    """
    groups: set[int] = set()
    is_here = False
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - a text, as edits have it
        except (OSError, ValueError):
            continue
        is_here = True
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            groups.add(status.st_gid)
    return frozenset(groups) if is_here else None


def in_memory(paths: Iterable[str]) -> tuple[str, ...]:
    """List the paths that lie in /dev and have no link in them, so that they are their own target.

    This does not block, because /dev is in memory.
    """
    plain: dict[str, bool] = {"": True}
    return tuple(path for path in paths if path.startswith("/dev/") and "\0" not in path and _is_plain(path, plain))


def _is_plain(path: str, plain: dict[str, bool]) -> bool:
    """Return whether a path is in its shortest form and no part of it is a link. `plain` caches
    folders of the same batch.

    `os.path.realpath` gives the same path for those, and takes ten times as long.
    """
    folder, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        return False
    if folder not in plain:
        plain[folder] = _is_plain(folder, plain)
    if not plain[folder]:
        return False
    try:
        return not stat.S_ISLNK(os.lstat(path).st_mode)
    except FileNotFoundError:
        # A path that does not exist is no link, and nothing below it exists.
        return True
    except (OSError, ValueError):
        return False


def with_real_folders(rights: EditRights) -> EditRights:
    """Add to each prefix the same prefix in the folder that its own folder leads to (`/var/run` is
    `/run` on most hosts).
    """
    return msgspec.structs.replace(
        rights,
        device_nodes=_with_real(rights.device_nodes),
        mounts=_with_real(rights.mounts),
        libraries=_with_real(rights.libraries),
        writable_mounts=_with_real(rights.writable_mounts),
    )


def with_own_hook(device_class: str, rights: EditRights) -> EditRights:
    """Allow class gpu the hook of this installation, which is the same on a host as the one that
    its gpu service names.
    """
    program = f"{os.path.dirname(sys.executable)}/{HOOK_PROGRAM}"  # noqa: PTH120 - a text, as rights have it
    return msgspec.structs.replace(rights, hooks=(*rights.hooks, program)) if device_class == "gpu" else rights


def _with_real(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    # The last part is not resolved: it may be the beginning of a name, and a link there must not be
    # followed.
    parts = [os.path.split(prefix) for prefix in prefixes]
    leads_to = {folder: os.path.realpath(folder).rstrip("/") for folder in {folder for folder, _ in parts}}
    real = (f"{leads_to[folder]}/{name}" for folder, name in parts)
    return tuple(dict.fromkeys((*prefixes, *real)))
