"""Reads what this process may use of the machine: the cpuset of its cgroup.

It reads the mount table and the process's cgroup in the tree (a recorded machine has those of the
recording process). The result is the allowed CPUs and nodes, or None where the tree has no limit.
Source: cgroups(7), cpuset(7).
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct

from topobus.sysfs.tree import Tree
from topobus.values.idset import CpuSet, IdSet, NodeSet

__all__ = ["Limits", "read_limits"]

S = TypeVar("S", bound=IdSet)


class Limits(Struct, frozen=True, kw_only=True):
    """Allowed CPUs and nodes. None is no limit. `source` names the cgroup or cpuset."""

    cpus: CpuSet | None = None
    nodes: NodeSet | None = None
    source: str = ""


def read_limits(tree: Tree) -> Limits:
    """Read the limits of the process that reads (or recorded) the machine.

    No limits where the tree has none.
    """
    pattern = _find_files(tree)
    name = _own_group(tree)
    if pattern is None or name is None:
        return Limits()
    base = name.rstrip("/")
    cpus = _read_list(tree, pattern.format(group=base, what="cpus"), CpuSet)
    nodes = _read_list(tree, pattern.format(group=base, what="mems"), NodeSet)
    return Limits(cpus=cpus, nodes=nodes, source=name or "/")


def _find_files(tree: Tree) -> str | None:
    """Give the path pattern of the cpuset files: cgroup v2, v1, v1 without prefix, or the old
    cpuset file system.
    """
    for line in (tree.read("proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        folder, kind, options = fields[1].rstrip("/"), fields[2], fields[3].split(",")
        # A brace in a mount point would be taken for a field below.
        folder = folder.replace("{", "{{").replace("}", "}}")
        if kind == "cgroup2":
            if "cpuset" in (tree.read_mounted(f"{fields[1]}/cgroup.controllers") or "").split():
                return folder + "{group}/cpuset.{what}.effective"
        elif kind == "cpuset" or (kind == "cgroup" and "cpuset" in options and "noprefix" in options):
            return folder + "{group}/{what}"
        elif kind == "cgroup" and "cpuset" in options:
            return folder + "{group}/cpuset.{what}"
    return None


def _own_group(tree: Tree) -> str | None:
    name = tree.read("proc/self/cpuset")
    if name:
        return name
    for line in (tree.read("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers in ("", "cpuset"):
            return group
    return None


def _read_list(tree: Tree, path: str, kind: type[S]) -> S | None:
    text = tree.read_mounted(path)
    if text is None:
        return None
    try:
        return kind.parse(text)
    except ValueError:
        return None
