"""The node checkpoint: a file of the claims that this node has prepared or has begun to prepare,
written before kubelet gets an answer.

It is versioned JSON, replaced as a whole and synced. A file that cannot be read stops the gateway,
because treating it as empty would forget devices that containers use. Another `version` number is
refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec import Struct

from topobus.devicekit.containers.cdi_files import remove_leftovers, write
from topobus.formats.messages.codec import decode, encode
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.disk import DiskWork
from topobus.process.broadcast import Broadcast
from topobus.process.tracing import span
from topobus.values.errors import ConfigError, ContractError
from topobus.values.names import ClaimUid

__all__ = ["Checkpoint"]

_VERSION = 1


class _File(Struct, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    entries: tuple[ClaimEntry, ...]
    undone: tuple[ClaimUid, ...] = ()


class _Version(Struct, frozen=True, kw_only=True):
    version: int


class Checkpoint:
    """All entries, in memory and on disk."""

    def __init__(self, path: Path, entries: dict[str, ClaimEntry], *, boot_id: str = "") -> None:
        self.boot_id = boot_id
        """The machine's present boot."""
        self.undone: frozenset[ClaimUid] = frozenset()
        """Claims that were undone here and hold their devices until the cluster has deallocated
        them."""
        self.undone_changed = Broadcast()
        self._path = path
        self._entries = entries
        self._disk = DiskWork()

    @classmethod
    def load(cls, path: Path, *, boot_id: str = "") -> Checkpoint:
        """Read the file in a boot of the machine. A missing file means a new node.

        Errors: raises ConfigError when the file cannot be read, is corrupt or comes from a newer
        version, or its folder cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A dangling link does not mean a new node: the file was configured elsewhere and is
            # missing there.
            data = path.read_bytes() if path.exists() or path.is_symlink() else None
        except OSError as err:
            raise ConfigError(
                f"gateway: checkpoint_path: cannot use {path}: {err.strerror}",
                next_step="set TOPOBUS_GATEWAY__CHECKPOINT_PATH",
            ) from err
        if data is None:
            return cls(path, {}, boot_id=boot_id)
        mend = f"restore {path}, or move it away when no container on this node uses a claim's device any more"
        try:
            stated = decode(data, _Version, where=str(path)).version
            if stated > _VERSION:
                raise ConfigError(
                    f"gateway: checkpoint_path: {path} has version {stated}, which a newer gateway wrote; "
                    f"wanted {_VERSION}",
                    next_step=f"start that gateway again, or {mend}",
                )
            file = decode(data, _File, where=str(path))
        except ContractError as err:
            raise ConfigError(f"gateway: checkpoint_path: {err.message}", next_step=mend) from err
        if file.version != _VERSION:
            raise ConfigError(
                f"gateway: checkpoint_path: {path} has version {file.version}, wanted {_VERSION}", next_step=mend
            )
        entries = {claim_entry.key: claim_entry for claim_entry in file.entries}
        checkpoint = cls(path, entries, boot_id=boot_id)
        checkpoint.undone = frozenset(file.undone)
        return checkpoint

    def sweep(self) -> None:
        """Remove a killed gateway's half-written files. Only the lock's holder may call it."""
        remove_leftovers(self._path.parent, self._path.name)

    def entries(self) -> tuple[ClaimEntry, ...]:
        """Return all entries, by claim and class."""
        return tuple(self._entries[key] for key in sorted(self._entries))

    def get(self, uid: ClaimUid, device_class: str) -> ClaimEntry | None:
        """Return the entry of one claim's devices of one class."""
        return self._entries.get(f"{uid}/{device_class}")

    def of_claim(self, uid: ClaimUid) -> tuple[ClaimEntry, ...]:
        """Return the entries of one claim, by class."""
        return tuple(entry for entry in self.entries() if entry.uid == uid)

    def is_ready(self, entry: ClaimEntry) -> bool:
        """Return whether containers may have an entry's devices: their preparation is complete and
        from the present boot.
        """
        return entry.is_running and entry.boot_id == self.boot_id

    def ready(self, uid: ClaimUid, device_class: str) -> ClaimEntry | None:
        """Return the entry of one claim's devices of one class if containers may have them.

        None: it is not prepared, or was prepared in an earlier boot.
        """
        entry = self.get(uid, device_class)
        return entry if entry is not None and self.is_ready(entry) else None

    async def put(self, *entries: ClaimEntry) -> None:
        """Store the entries of a claim. All of them are on disk when this returns.

        Errors: raises OSError when the disk refuses. Memory is then unchanged.
        """
        with span("write checkpoint", claim_uid=entries[0].uid):
            await self._disk.do(
                lambda: self._save(lambda: self._entries | {claim_entry.key: claim_entry for claim_entry in entries})
            )

    async def change(self, key: str, change: Callable[[ClaimEntry], ClaimEntry]) -> ClaimEntry | None:
        """Change an entry after all running writes have ended, and store it.

        None when the entry is gone by then.

        Errors: raises OSError when the disk refuses. Memory is then unchanged.
        """
        await self._change(lambda entry: entry.key == key, change)
        return self._entries.get(key)

    async def change_claim(self, uid: ClaimUid, change: Callable[[ClaimEntry], ClaimEntry]) -> tuple[ClaimEntry, ...]:
        """Change all entries of a claim after all running writes have ended, and store them.

        Errors: raises OSError when the disk refuses. Memory is then unchanged.
        """
        await self._change(lambda entry: entry.uid == uid, change)
        return self.of_claim(uid)

    async def _change(self, is_meant: Callable[[ClaimEntry], bool], change: Callable[[ClaimEntry], ClaimEntry]) -> None:
        await self._disk.do(
            lambda: self._save(
                lambda: {key: change(entry) if is_meant(entry) else entry for key, entry in self._entries.items()}
            )
        )

    async def remove(self, uid: ClaimUid, *, is_kept: bool = False) -> None:
        """Remove a claim's entries. That there are none is no error.

        `is_kept`: the claim still holds its devices, and is remembered in `undone`.
        """
        undone = frozenset({uid} if is_kept else ())
        with span("write checkpoint", claim_uid=uid):
            await self._disk.do(
                lambda: self._save(
                    lambda: {key: entry for key, entry in self._entries.items() if entry.uid != uid}, undone
                )
            )

    def keep_undone(self, held: Collection[ClaimUid]) -> None:
        """Forget claims that were undone here and hold nothing any more.

        It is on disk with the next write, because an entry that is kept too long does no harm.
        """
        self.undone &= {*held}

    async def finish(self) -> None:
        """Wait until all writes have ended. Another process may then use the file."""
        await self._disk.finish()

    async def _save(
        self, change: Callable[[], dict[str, ClaimEntry]], undone: frozenset[ClaimUid] = frozenset()
    ) -> None:
        entries = change()
        if entries == self._entries:
            return
        # A claim that was prepared again is no longer undone.
        undone = (self.undone | undone) - {entry.uid for entry in entries.values()}
        file = _File(
            version=_VERSION, entries=tuple(entries[key] for key in sorted(entries)), undone=tuple(sorted(undone))
        )
        await asyncio.to_thread(write, self._path.parent, self._path.name, encode(file))
        self._entries = entries
        if undone != self.undone:
            self.undone = undone
            self.undone_changed.announce()
