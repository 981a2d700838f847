"""The content of a tree before it is written: texts and links by path.

Building is pure up to here, so two trees (before and after a CPU went offline) are compared as
values and only the difference is written.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DEVICE_NODES", "Content", "place", "unplace"]

# A tree that holds this file has real device nodes below `dev` in place of empty files.
DEVICE_NODES = ".topobus/device-nodes"

_SHAREABLE = re.compile(r"/cpu\d+/(topology|cache)/")


@dataclass
class Content:
    """Texts by path and links by path.

    Both paths and link targets are relative to the tree's root.
    """

    texts: dict[str, str | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def text(self, path: str, value: object) -> None:
        """Add a file. Its text ends with a newline as the kernel's does."""
        self.texts[path] = value if isinstance(value, bytes) else f"{value}\n"

    def attributes(self, folder: str, values: dict[str, object]) -> None:
        """Add several files of one folder."""
        for name, value in values.items():
            self.text(f"{folder}/{name}", value)

    def link(self, path: str, target: str) -> None:
        """Add a link, relative on disk as the kernel makes it."""
        self.links[path] = target

    def add(self, other: Content) -> None:
        """Take over all of another content."""
        self.texts.update(other.texts)
        self.links.update(other.links)


def place(root: Path, content: Content, *, is_fresh: bool = False) -> None:
    """Write content below `root`.

    A file that may be read meanwhile is replaced in one step. `is_fresh` skips that for a new tree.
    """
    base = str(root)
    made: set[str] = set()
    shared: dict[tuple[str, bytes], str] = {}
    has_nodes = DEVICE_NODES in content.texts or (root / DEVICE_NODES).exists()
    for path, value in content.texts.items():
        full = f"{base}/{path}"
        _make_folder(full, made)
        data = value if isinstance(value, bytes) else value.encode()
        if has_nodes and path.startswith("dev/"):
            _make_node(full)
            continue
        if is_fresh and _SHAREABLE.search(path):
            # Thousands of equal files: a second name costs a fraction of a second file. They are
            # never written in place (`place` replaces).
            other = shared.setdefault((path.rpartition("/")[2], data), full)
            if other is not full:
                os.link(other, full)
                continue
        if is_fresh:
            Path(full).write_bytes(data)
        else:
            part = Path(f"{full}.part")
            part.write_bytes(data)
            part.replace(full)
    for path, target in content.links.items():
        full = f"{base}/{path}"
        _make_folder(full, made)
        if Path(full).is_symlink():
            Path(full).unlink()
        Path(full).symlink_to(os.path.relpath(f"{base}/{target}", Path(full).parent))


def _make_node(full: str) -> None:
    """Make a character device that swallows what is written and has nothing to read: the kernel's
    null device under another name.

    Errors: raises PermissionError unless the caller may make device nodes.
    """
    part = f"{full}.part"
    Path(part).unlink(missing_ok=True)
    os.mknod(part, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    Path(part).chmod(0o666)
    Path(part).replace(full)


def unplace(root: Path, paths: list[str]) -> None:
    """Remove files and links. Folders that become empty are removed as well, as in /sys.

    What is absent is no error.
    """
    for path in paths:
        full = root / path
        full.unlink(missing_ok=True)
        folder = full.parent
        while folder != root and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def _make_folder(full: str, made: set[str]) -> None:
    folder = full.rpartition("/")[0]
    if folder not in made:
        Path(folder).mkdir(parents=True, exist_ok=True)
        made.add(folder)
