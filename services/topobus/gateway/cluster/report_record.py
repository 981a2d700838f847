"""Keeps the wanted status of claims on disk before it is written to them. A gateway that was killed
in between writes or removes it after its start.

The file is versioned JSON, replaced as a whole and synced. A file that cannot be read is set aside
with a warning and counts as empty. Entries of claims that were undone meanwhile may then stay in
their status until the claims are deallocated. No container depends on that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from topobus.devicekit.containers.cdi_files import remove_leftovers, write
from topobus.formats.messages.codec import decode, encode
from topobus.gateway.claims.rules.device_status import ClaimReport
from topobus.gateway.disk import DiskWork
from topobus.process.logging import get_logger
from topobus.values.errors import ContractError

__all__ = ["ReportRecord"]

_VERSION = 1


class _File(Struct, frozen=True, kw_only=True):
    version: int
    reports: tuple[ClaimReport, ...]


class ReportRecord:
    """Reports by claim and class, as they are on disk."""

    def __init__(self, path: Path, reports: Mapping[str, ClaimReport]) -> None:
        """`reports` is the present content of the file."""
        self.reports = dict(reports)
        self._path = path
        self._disk = DiskWork()

    @classmethod
    def open(cls, path: Path) -> ReportRecord:
        """Read the file.

        It blocks, and removes files that a killed gateway left half written. So only the gateway
        that holds the node lock may call it.
        """
        try:
            remove_leftovers(path.parent, path.name)
            file = (
                decode(path.read_bytes(), _File, where=str(path))
                if path.exists()
                else _File(version=_VERSION, reports=())
            )
            if file.version != _VERSION:
                raise ContractError(f"{path} has version {file.version}, wanted {_VERSION}")
        except (OSError, ContractError) as err:
            aside = path.with_name(f"{path.name}.unreadable")
            get_logger().warning("claims.reports-unreadable", file=str(path), aside=str(aside), error=str(err))
            try:
                path.rename(aside)
            except OSError as again:
                get_logger().warning("claims.reports-kept", file=str(path), error=str(again))
            file = _File(version=_VERSION, reports=())
        return cls(path, {report.key: report for report in file.reports})

    async def save(self, reports: Mapping[str, ClaimReport]) -> None:
        """Replace the reports of the file. They are on disk when this returns.

        Nothing is written when they are there already.

        Errors: raises OSError when the disk refuses.
        """
        wanted = dict(reports)
        await self._disk.do(lambda: self._save(wanted))

    async def finish(self) -> None:
        """Wait until all writes have ended. Another process may then use the file."""
        await self._disk.finish()

    async def _save(self, reports: dict[str, ClaimReport]) -> None:
        if reports == self.reports:
            return
        file = _File(version=_VERSION, reports=tuple(reports[key] for key in sorted(reports)))
        await asyncio.to_thread(write, self._path.parent, self._path.name, encode(file))
        self.reports = reports
