"""Paths of device nodes as a container and its runtime use them.

A driver names a node relative to dev (`dri/renderD128`). The runtime creates it from the
host's own /dev, also where this process sees that folder elsewhere (a service in a
container reads it below another root).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

from topobus.sysfs.tree import Tree
from topobus.values.edits import DeviceNode

__all__ = ["device_node", "node_groups"]

# An access that every user has needs no group: read and write.
_EVERYBODY = stat.S_IROTH | stat.S_IWOTH
_GROUP = stat.S_IRGRP | stat.S_IWGRP


def device_node(name: str) -> DeviceNode:
    """Make the edit that gives a container one device node, under the same path as on the host.

    >>> device_node("infiniband/uverbs0").path
    '/dev/infiniband/uverbs0'
    """
    return DeviceNode(path=f"/dev/{name}")


def node_groups(tree: Tree, names: Iterable[str]) -> tuple[int, ...]:
    """Find the groups that may open nodes which not every user may (0660, root:render).

    Never root's.

    Shapes: names — relative to dev; what is absent or no device node is left out.
    Order: sorted.
    """
    groups: set[int] = set()
    for name in names:
        try:
            status = tree.path(f"dev/{name}").stat()
        except OSError:
            continue
        if stat.S_ISCHR(status.st_mode) and status.st_mode & _EVERYBODY != _EVERYBODY and status.st_mode & _GROUP:
            groups.add(status.st_gid)
    return tuple(sorted(groups - {0}))
