"""Records what Allocate gave to each container, across restarts.

Kubelet replays an Allocate answer from its own checkpoint at each container start, for weeks. The
recorded edits are compared before a container starts again. They are written at the container's
first start and not in Allocate, because the answer is not used earlier and Allocate must not wait
for a disk. A file that cannot be read stops the gateway, because treating it as empty would accept
the next start of each container unchecked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from topobus.devicekit.containers.cdi_files import remove_leftovers, write
from topobus.formats.messages.codec import decode, encode
from topobus.gateway.boot import boot_id
from topobus.gateway.device_plugins.rules.edits import foreign_variables
from topobus.gateway.disk import DiskWork
from topobus.process.logging import get_logger
from topobus.values.edits import ContainerEdits
from topobus.values.errors import ConfigError, ContractError

__all__ = ["AllocationRecord"]

_VERSION = 1


class _Given(Struct, frozen=True, kw_only=True):
    """One allocation: what was given, and the boot of the machine in which it was last verified."""

    edits: ContainerEdits
    boot_id: str


class _File(Struct, frozen=True, kw_only=True):
    version: int
    entries: dict[str, _Given]


class AllocationRecord:
    """The given edits, by owner key."""

    def __init__(self, path: Path, is_holder: Callable[[str], bool], *, boot_id: str) -> None:
        """Read the file. A missing file means a new node.

        `is_holder` returns whether an owner's key may still hold something.

        Errors: raises ConfigError when the file cannot be read, is corrupt or comes from a newer
        version.
        """
        self._path = path
        self._is_holder = is_holder
        self._boot_id = boot_id
        self._disk = DiskWork()
        self._variables: dict[str, str] = {}
        """By variable: the class that set it first."""
        self._fresh: dict[str, ContainerEdits] = {}
        self._entries: dict[str, _Given] = _load(path)

    @classmethod
    def open(cls, path: Path, is_holder: Callable[[str], bool]) -> AllocationRecord:
        """Read the file and this boot's id.

        It removes files that a killed gateway left half written, so only the gateway that holds the
        node lock may call it.

        Errors: raises ConfigError as the constructor does.
        """
        remove_leftovers(path.parent, path.name)
        return cls(path, is_holder, boot_id=boot_id())

    def note(self, owner_key: str, edits: ContainerEdits, device_class: str) -> None:
        """Remember an answer of Allocate, which replaces what is stored."""
        self._fresh[owner_key] = edits
        for key in foreign_variables(edits, device_class, self._variables):
            # kubelet keeps the first of two classes' values and reports nothing.
            get_logger().warning(
                "variable.shared", variable=key, device_class=device_class, other_class=self._variables[key]
            )
        for key in edits.env:
            self._variables.setdefault(key, device_class)

    def of(self, owner_key: str) -> ContainerEdits | None:
        """Return what was given. None when that is not known."""
        if owner_key in self._fresh:
            return self._fresh[owner_key]
        entry = self._entries.get(owner_key)
        return entry.edits if entry is not None else None

    def is_of_this_boot(self, owner_key: str) -> bool:
        """Return whether it was given or verified since the boot, which renumbers devices."""
        entry = self._entries.get(owner_key)
        return owner_key in self._fresh or (entry is not None and entry.boot_id == self._boot_id)

    def is_of_earlier_boot(self, owner_key: str) -> bool:
        """Return whether a container had it before the boot, and none has since: none starts without
        being verified.
        """
        return owner_key in self._entries and not self.is_of_this_boot(owner_key)

    async def confirm(self, owner_key: str, edits: ContainerEdits) -> None:
        """Store what a container starts with, and forget what is no longer held.

        It is on disk when this returns.

        Errors: raises OSError when the disk refuses.
        """
        await self._disk.do(lambda: self._confirm(owner_key, _Given(edits=edits, boot_id=self._boot_id)))

    async def finish(self) -> None:
        """Wait until all writes have ended. Another process may then use the file."""
        await self._disk.finish()

    async def _confirm(self, owner_key: str, entry: _Given) -> None:
        if self._entries.get(owner_key) != entry:
            kept = {key: record for key, record in self._entries.items() if self._is_holder(key)}
            entries = dict(sorted({**kept, owner_key: entry}.items()))
            await asyncio.to_thread(
                write, self._path.parent, self._path.name, encode(_File(version=_VERSION, entries=entries))
            )
            self._entries = entries
            self._fresh = {key: container_edits for key, container_edits in self._fresh.items() if self._is_holder(key)}
        if self._fresh.get(owner_key) == entry.edits:
            del self._fresh[owner_key]


def _load(path: Path) -> dict[str, _Given]:
    mend = f"restore {path}, or move it away when no container on this node has devices by a device plugin any more"
    try:
        file = decode(path.read_bytes(), _File, where=str(path)) if path.exists() else None
    except OSError as err:
        raise ConfigError(f"gateway: cannot read {path}: {err.strerror}", next_step=mend) from err
    except ContractError as err:
        raise ConfigError(f"gateway: {err.message}", next_step=mend) from err
    if file is not None and file.version != _VERSION:
        raise ConfigError(f"gateway: {path} has version {file.version}, wanted {_VERSION}", next_step=mend)
    return file.entries if file is not None else {}
