"""Promises of the node's files when the disk is slow or full: nothing overtakes, nothing half done
stays, and what failed is named.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import msgspec
import pytest

from topobus.devicekit.containers import cdi_files
from topobus.gateway.claims.checkpoint import Checkpoint
from topobus.gateway.claims.rules.claim_entry import ClaimEntry
from topobus.gateway.device_plugins.allocation_record import AllocationRecord
from topobus.values.edits import ContainerEdits

LIMIT_S = 60.0


class SlowDisk:
    """A disk whose next sync takes until it is let go; every later one is as quick as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._is_first = True
        self._sync = os.fsync
        monkeypatch.setattr(cdi_files.os, "fsync", self._slow)

    def _slow(self, handle: int) -> None:
        if self._is_first:
            self._is_first = False
            self.reached.set()
            assert self.go_on.wait(LIMIT_S)
        self._sync(handle)


def entry(uid: str) -> ClaimEntry:
    """An entry."""
    return ClaimEntry(namespace="default", name=uid, uid=uid, device_class="gpu", attempt="a")


async def given_up(work: asyncio.Task[None], disk: SlowDisk) -> None:
    """Give a write up while it is in the disk's hands, as a deadline does."""
    assert await asyncio.to_thread(disk.reached.wait, LIMIT_S)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_checkpoint_keeps_the_later_state_when_an_earlier_write_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline ends the wait and not the write: the next entry is written after it, so that file
    and memory both have both.
    """
    path = tmp_path / "checkpoint.json"
    checkpoint = Checkpoint.load(path)
    disk = SlowDisk(monkeypatch)
    await given_up(asyncio.create_task(checkpoint.put(entry("u-1"))), disk)

    later = asyncio.create_task(checkpoint.put(entry("u-2")))
    await asyncio.wait({later}, timeout=0.05)
    disk.go_on.set()
    await later
    await checkpoint.finish()

    assert [claim_entry.uid for claim_entry in checkpoint.entries()] == ["u-1", "u-2"]
    assert Checkpoint.load(path).entries() == checkpoint.entries()


async def test_checkpoint_is_finished_only_when_nobody_writes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's turn is let go after that: a write that came later would fall upon the next
    gateway's file.
    """
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.json")
    disk = SlowDisk(monkeypatch)
    await given_up(asyncio.create_task(checkpoint.put(entry("u-1"))), disk)

    finishing = asyncio.create_task(checkpoint.finish())
    await asyncio.wait({finishing}, timeout=0.05)
    was_early = finishing.done()
    disk.go_on.set()
    await asyncio.wait_for(finishing, LIMIT_S)

    assert not was_early
    assert (tmp_path / "checkpoint.json").exists()


async def test_given_answer_is_still_known_when_the_disk_refused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be stored is compared from memory, and stored with
    the container's next start.
    """
    store = AllocationRecord(tmp_path / "given.json", lambda _: True, boot_id="b")
    edits = ContainerEdits(env={"A": "1"})
    store.note("o", edits, "gpu")
    with monkeypatch.context() as full:
        full.setattr(cdi_files.os, "fsync", _no_room)
        with pytest.raises(OSError, match="No space left"):
            await store.confirm("o", edits)
        container_edits = store.of("o")
    await store.confirm("o", edits)

    assert container_edits == edits
    assert AllocationRecord(tmp_path / "given.json", lambda _: True, boot_id="b").of("o") == edits


def _no_room(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_write_names_its_file_and_leaves_nothing_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own error names no file; what was there before stays as it was."""
    cdi_files.write(tmp_path, "a.json", b"before")
    monkeypatch.setattr(cdi_files.os, "fsync", _no_room)

    with pytest.raises(OSError, match="No space left") as refused:
        cdi_files.write(tmp_path, "a.json", b"after")

    assert refused.value.filename == str(tmp_path / "a.json")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"before"}


async def test_checkpoint_writes_nothing_when_nothing_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again after a crash, the same entry costs no sync."""
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.json")
    await checkpoint.put(entry("u-1"))
    monkeypatch.setattr(cdi_files.os, "fsync", _no_room)

    await checkpoint.put(entry("u-1"))
    await checkpoint.remove("u-9")

    with pytest.raises(OSError, match="No space left"):
        await checkpoint.put(msgspec.structs.replace(entry("u-1"), is_prepared=True))
