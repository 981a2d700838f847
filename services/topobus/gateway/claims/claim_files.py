"""The CDI files of claims: one file for each claim and class, written whole or not at all, and
always reproducible from the checkpoint.

The container runtime reads the files. At start, a file without a checkpoint entry is removed,
because the runtime would continue to give its devices to every container that names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from topobus.devicekit.containers.cdi_files import check_writable, delete, restore_files, write, write_missing
from topobus.formats.containers.cdi import CdiSpec, file_name, render
from topobus.gateway.claims.claim_metadata import ClaimMetadata
from topobus.gateway.claims.rules.claim_cdi import CDI_VENDOR
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.containers.rules.container_guard import guarded
from topobus.gateway.disk import DiskWork
from topobus.gateway.metrics import ClaimMetrics
from topobus.process.logging import get_logger
from topobus.process.tracing import span
from topobus.values.errors import ConfigError

if TYPE_CHECKING:
    from topobus.gateway.containers.cpu_pinning import CpuPinning

__all__ = ["ClaimFiles", "why_unwritable"]


class ClaimFiles:
    """The folder of CDI files. Writes are serialized, so that an older write never ends last."""

    def __init__(
        self,
        folder: Path,
        *,
        metadata: ClaimMetadata,
        pinning: CpuPinning | None,
        metrics: ClaimMetrics,
        tell: Callable[[str], None],
    ) -> None:
        """`pinning` is None where kubelet alone manages CPUs. `tell` gets what is wrong with the
        folder, or an empty text when it is usable.
        """
        self._folder = folder
        self._metadata = metadata
        self._pinning = pinning
        self._metrics = metrics
        self._tell = tell
        self._disk = DiskWork()

    async def restore(self, entries: Iterable[ClaimEntry], wanted: Iterable[ClaimEntry]) -> None:
        """Write the metadata of these entries and the CDI files of those that are wanted, as far as
        they are missing, and remove files that belong to none.

        Errors: raises ConfigError when there is something to write and the folder cannot be
        written.
        """
        await self._metadata.restore(entries)
        try:
            written, orphans = await asyncio.to_thread(restore_files, self._folder, CDI_VENDOR, self._rendered(wanted))
        except OSError as err:
            raise ConfigError(
                f"gateway: cdi_dir: cannot use {self._folder}: {err}", next_step="set TOPOBUS_GATEWAY__CDI_DIR"
            ) from err
        if written or orphans:
            get_logger().info("claims.restored", written=written, orphans_removed=orphans)

    async def check(self) -> None:
        """Check whether a file can be written now, log it and pass it to `tell`. Raises nothing."""
        try:
            await asyncio.to_thread(check_writable, self._folder, CDI_VENDOR)
        except OSError as err:
            get_logger().error(
                "cdi.unwritable", folder=str(self._folder), error=str(err), next_step="set TOPOBUS_GATEWAY__CDI_DIR"
            )
            self._tell(why_unwritable(err))
        else:
            self._tell("")

    async def describe(self, entry: ClaimEntry) -> bool:
        """Write the metadata of a claim that is being prepared. False when it gets none."""
        return await self._metadata.describe(entry)

    async def mend(self, entry: ClaimEntry) -> None:
        """Write an entry's files that are missing.

        Errors: raises OSError, after passing it to `tell`.
        """
        await self._metadata.mend(entry)
        wanted = self._rendered([entry])
        if wanted:
            await self._write(lambda: write_missing(self._folder, wanted))

    async def write(self, entries: Sequence[ClaimEntry]) -> None:
        """Write the files of a claim's entries in one turn.

        Errors: raises OSError, after passing it to `tell`.
        """
        wanted = self._rendered(entries)
        if wanted:
            with span("write CDI file", claim_uid=entries[0].uid), self._metrics.writing():
                await self._write(lambda: [write(self._folder, name, data) for name, data in wanted.items()])

    async def _write(self, work: Callable[[], object]) -> None:
        try:
            await self._disk.do(lambda: asyncio.to_thread(work))
        except OSError as err:
            self._tell(why_unwritable(err))
            raise
        self._tell("")

    def _rendered(self, entries: Iterable[ClaimEntry]) -> dict[str, bytes]:
        return {
            _file(entry): self._render(entry, spec)
            for entry in entries
            if (spec := self._metadata.described(entry)) is not None
        }

    async def delete(self, entry: ClaimEntry) -> None:
        """Remove an entry's files, if they are there.

        Errors: raises OSError.
        """
        await self._disk.do(lambda: asyncio.to_thread(delete, self._folder, _file(entry)))
        await self._metadata.delete(entry)

    def _render(self, entry: ClaimEntry, spec: CdiSpec) -> bytes:
        # Its containers start only with the gateway's consent. The guard is not in the checkpoint,
        # because the edits there came from a device service, which may not make such a mount, and
        # are checked again.
        is_guarded = bool(
            entry.to_attach or entry.to_adjust or (self._pinning is not None and self._pinning.pins(entry))
        )
        return render(guarded(spec, entry.uid, entry.device_class) if is_guarded else spec)

    async def finish(self) -> None:
        """Wait until all writes have ended."""
        await self._metadata.finish()
        await self._disk.finish()


def why_unwritable(err: OSError) -> str:
    """Describe which file could not be written, and why.

    >>> why_unwritable(PermissionError(13, "Permission denied", "/etc/cdi/a.json"))
    'cannot write /etc/cdi/a.json: Permission denied'
    """
    return f"cannot write {err.filename}: {err.strerror}"


def _file(entry: ClaimEntry) -> str:
    return file_name(CDI_VENDOR, entry.device_class, entry.uid)
