"""A recorded machine's tree in memory: what drivers and discovery read of a profile, without a file
on disk.

It gives the answers of `topobus.sysfs.tree.Tree` for the same content (`content_of`) on disk. A
test compares the two for every profile. It cannot change, so it is for a single look: planning, not
services. Device nodes are no files here: they have no group and no mode.
"""

from __future__ import annotations

import posixpath
from pathlib import Path

from topobus.simulation.machines.content import Content
from topobus.sysfs.tree import HardwareSettings, Tree, natural_key
from topobus.values.errors import HardwareError

__all__ = ["MemoryTree"]

# There is no machine: a path that is opened all the same does not exist.
_NOWHERE = "/dev/null/recorded-machine"
# As the kernel's own limit (MAXSYMLINKS); more are a loop.
_MAX_LINKS = 40


class MemoryTree(Tree):
    """Reads a content as if it were on disk below a root of its own."""

    def __init__(self, content: Content) -> None:
        super().__init__(HardwareSettings(root=_NOWHERE))
        self._texts = {path: text if isinstance(text, bytes) else text.encode() for path, text in content.texts.items()}
        self._links = content.links
        self._names: dict[str, set[str]] = {}
        for path in (*content.texts, *content.links):
            folder, _, name = path.rpartition("/")
            # A folder that is known has all of its parents.
            while name not in self._names.setdefault(folder, set()):
                self._names[folder].add(name)
                if not folder:
                    break
                folder, _, name = folder.rpartition("/")
        self._resolved: dict[str, str] = {}

    def for_scan(self) -> Tree:
        """Return this tree, because nothing in it changes."""
        return self

    def path(self, path: str) -> Path:
        """Return a path without a file."""
        return Path(_NOWHERE, self._follow(path))

    def read(self, path: str) -> str | None:
        """Read a text file, stripped. None when it is absent."""
        data = self._texts.get(self._follow(path))
        return None if data is None else data.decode("utf-8", errors="replace").strip(" \t\r\n\0")

    def read_bytes(self, path: str, limit: int = 4096) -> bytes | None:
        """Read the beginning of a binary file. None when it is absent."""
        data = self._texts.get(self._follow(path))
        return None if data is None else data[:limit]

    def read_mounted(self, path: str) -> str | None:
        """Read a file by its absolute path in the tree. None when absent."""
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        return self.read("/".join(parts)) if parts and parts[0] in self._tops else None

    def names(self, path: str) -> tuple[str, ...]:
        """List a folder's names in natural order. Empty when absent."""
        return tuple(sorted(self._names.get(self._follow(path), ()), key=natural_key))

    def exists(self, path: str) -> bool:
        """Say whether the file or folder is there."""
        at = self._follow(path)
        return at in self._texts or at in self._names

    def is_link(self, path: str) -> bool:
        """Say whether the last part of the path is a link."""
        return self._in_folder(path) in self._links

    def link_name(self, path: str) -> str:
        """Return the last part of a link's target. Empty when there is no such link."""
        at = self._in_folder(path)
        # As on disk, where a link is relative to its folder and may end with "..".
        return posixpath.relpath(self._links[at], at.rpartition("/")[0]).rpartition("/")[2] if at in self._links else ""

    def identity(self, path: str) -> str:
        """Identify a folder by its path, because no other one can replace it here."""
        return self._follow(path) if self.exists(path) else ""

    def real(self, path: str) -> str | None:
        """Resolve all links and return the path relative to the tree. None when absent."""
        return self._follow(path) if self.exists(path) else None

    def _in_folder(self, path: str) -> str:
        folder, _, name = "/".join(self._split(path)).rpartition("/")
        return f"{self._follow(folder)}/{name}" if folder else name

    def _follow(self, path: str) -> str:
        kept = self._resolved.get(path)
        if kept is None:
            kept = self._resolved[path] = "/".join(self._steps(self._split(path)))
        return kept

    def _steps(self, parts: list[str]) -> list[str]:
        done: list[str] = []
        todo = list(reversed(parts))
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                if len(done) > 1:
                    done.pop()
                continue
            done.append(part)
            target = self._links.get("/".join(done))
            if target is not None:
                links += 1
                if links > _MAX_LINKS:
                    raise HardwareError(f"too many links at {'/'.join(done)}", path="/".join(done))
                # Targets of a content are relative to the tree's root.
                done = []
                todo.extend(reversed([step for step in target.split("/") if step not in ("", ".")]))
        return done
