"""Where paths of the host lead, as far as this process sees them. All functions block: call them in a thread.

In a pod the gateway sees few of the host's folders; a path that it does not see leads to itself, so an operator's prefixes must be folders that only root
can write.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable

import msgspec

from topobus.gateway.core.edit_limits import EditRights

__all__ = ["real_paths", "with_real_folders"]


def real_paths(paths: Iterable[str]) -> dict[str, str]:
    """Follow all links in paths; those that lead to themselves, and what cannot be a path, are left out."""
    return {path: target for path in paths if "\0" not in path and path.startswith("/") and (target := os.path.realpath(path)) != path}


def with_real_folders(rights: EditRights) -> EditRights:
    """Add to each prefix the same prefix in the folder where its own leads (`/var/run` is `/run` on most hosts)."""
    return msgspec.structs.replace(
        rights,
        device_nodes=_with_real(rights.device_nodes),
        mounts=_with_real(rights.mounts),
        writable_mounts=_with_real(rights.writable_mounts),
    )


def _with_real(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    # The last part stays as it is: it may be the beginning of a name, and a link there is what must not be followed.
    real = (f"{os.path.realpath(folder).rstrip('/')}/{name}" for folder, name in map(os.path.split, prefixes))
    return tuple(dict.fromkeys((*prefixes, *real)))
