"""The journal of a device service: one file per device, written before and after each act, read at
the start.

It records what drivers and the host are about to do and have done, so that a crash leaves nothing
unknown. Every change is on the disk before the call returns, and a change that could not be written
does not count. One process has a folder at a time (a lock file), so two never undo each other's
work. An unreadable file is set aside in place: its device is out of use until the file is repaired
or removed, and all others stay usable. All methods block and may be called from several threads.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from topobus.devicekit.device_record import DeviceRecord, RecordState, Step
from topobus.devicekit.journal import durable_file
from topobus.devicekit.journal.journal_values import DeviceEntry, OwnerEntry
from topobus.formats.messages.codec import decode, encode
from topobus.sysfs.tree import Tree
from topobus.values.device import Device
from topobus.values.errors import ContractError, HardwareError
from topobus.values.request import Owner

__all__ = ["Journal", "JournalTaken", "PassedThrough", "journal_folder"]

_SUFFIX = ".json"
_LOCK = "lock"
_DEFAULT_FOLDER = Path("/var/lib/topobus")


class JournalTaken(HardwareError):
    """Raised when another process holds the folder."""


def journal_folder(folder: str, device_class: str, tree: Tree) -> Path:
    """Return a class's folder: the configured one, or the default.

    That of a recorded machine is within its tree, because its devices are not this machine's.
    """
    if folder:
        return Path(folder)
    usual = _DEFAULT_FOLDER / device_class
    return tree.root / usual.relative_to("/") if tree.is_recorded else usual


class PassedThrough(NamedTuple):
    """Which devices' functions are without their own kernel driver, or may be: switched to VFIO, or in
    a rebind.
    """

    turn: int
    """Grows with each that goes or comes back: two looks with the same number have nothing between
    them."""
    devices: Mapping[str, Device]
    """As they were before."""


class Journal:
    """The journal of one class's devices on this node."""

    def __init__(self, folder: Path) -> None:
        """Take a folder.

        It is made with the first entry, so a service whose drivers change nothing needs none.
        """
        self.folder = folder
        self._lock = threading.RLock()
        # Both are replaced, never changed: an event loop reads them while a
        # driver's thread writes to the disk.
        self._entries: Mapping[str, DeviceEntry] = {}
        self._unreadable: Mapping[str, str] = {}
        self._turn: int | None = None
        self._is_closed = False
        self._passed = PassedThrough(0, {})

    @property
    def entries(self) -> Mapping[str, DeviceEntry]:
        """All entries, by device. Read without waiting for a write that is under way."""
        return self._entries

    @property
    def unreadable(self) -> Mapping[str, str]:
        """By device, the reason why its file cannot be read."""
        return self._unreadable

    def away(self) -> dict[str, Device]:
        """Return the devices that are in a sandbox, or may be, as they were before."""
        return {name: entry.device for name, entry in self._entries.items() if entry.is_away}

    def passed(self) -> PassedThrough:
        """Return the devices that are in passthrough or in a rebind, as they were before."""
        return self._passed

    def load(self) -> None:
        """Read all files of the earlier run. Without a folder there are no entries.

        Errors: raises JournalTaken while another process has the folder, HardwareError when the
        folder cannot be read, or after `close`.
        """
        with self._lock:
            try:
                if self.folder.is_dir():
                    self._take_turn()
            except OSError as err:
                raise self._error("read", self.folder, err) from err

    def reread(self) -> list[str]:
        """Read again the files that could not be read.

        Return the devices whose files are readable now, or gone.
        """
        with self._lock:
            before = self._unreadable
            # Replaced at once at the end. In between, a device with an unreadable file must not
            # count as one without a journal.
            self._read_all(sorted(before))
            return sorted(before.keys() - self._unreadable.keys())

    def close(self) -> None:
        """Release the folder for good. A driver's thread that ends later writes no more, and the
        next start finishes or undoes what it did.
        """
        with self._lock:
            self._is_closed = True
            if self._turn is not None:
                os.close(self._turn)
                self._turn = None

    def owner_entry(self, device: str, owner: Owner) -> OwnerEntry:
        """Return an owner's entry of a device: an empty one where there is none."""
        entry = self._entries.get(device)
        return (entry.of(owner) if entry is not None else None) or OwnerEntry(owner=owner)

    def steps_of(self, device: str) -> tuple[Step, ...]:
        """Return the steps of `prepare` on a device, for any owner, that are not undone."""
        entry = self._entries.get(device)
        return tuple(step for owner in (entry.owners if entry is not None else ()) for step in owner.prepare.steps)

    def change(self, device: Device, change: Callable[[DeviceEntry], DeviceEntry]) -> None:
        """Change a device's entry. It is on the disk when this returns. An empty entry has no file.

        Errors: raises HardwareError when it cannot be written, after `close`, or when the device's
        file cannot be read. Nothing has changed then.
        """
        with self._lock:
            name = device.name
            path = self.folder / f"{name}{_SUFFIX}"
            after = change(self._entries.get(name, DeviceEntry(device=device)))
            if after == self._entries.get(name, DeviceEntry(device=device)):
                return
            try:
                if self._turn is None:
                    # Another process that had the folder since the start may have left entries.
                    self._take_turn()
                    after = change(self._entries.get(name, DeviceEntry(device=device)))
                if name in self._unreadable:
                    raise HardwareError(f"journal of {name}: {self._unreadable[name]}", device=name)
                others = {other: entry for other, entry in self._entries.items() if other != name}
                if after.is_empty:
                    durable_file.delete(self.folder, path.name)
                    self._keep_entries(others)
                else:
                    durable_file.write(self.folder, path.name, encode(after), mode=0o600)
                    self._keep_entries({**others, name: after})
            except OSError as err:
                raise self._error("write", path, err) from err

    def change_owner(self, device: Device, owner: Owner, change: Callable[[OwnerEntry], OwnerEntry]) -> None:
        """Change an owner's entry of a device, as `change` does."""
        self.change(device, lambda entry: entry.with_owner(change(entry.of(owner) or OwnerEntry(owner=owner))))

    def prepare_record(self, device: Device, owner: Owner) -> DeviceRecord:
        """Return the record into which `prepare` and `unprepare` write."""
        state = self.owner_entry(device.name, owner).prepare
        return DeviceRecord(
            state if state.owner is not None else RecordState(owner=owner), partial(self._keep_prepare, device, owner)
        )

    def attach_record(self, device: Device, owner: Owner) -> DeviceRecord:
        """Return the record into which `attach` and `detach` write."""
        state = msgspec.structs.replace(self.owner_entry(device.name, owner).attach, owner=owner)
        return DeviceRecord(state, partial(self._keep_attach, device, owner))

    def clean_record(self, device: Device) -> DeviceRecord:
        """Return the record into which `clean` writes. Its owner is the one who left the device."""
        entry = self.entries.get(device.name)
        state, owner = (entry.clean, entry.to_clean) if entry is not None else (RecordState(), None)
        return DeviceRecord(msgspec.structs.replace(state, owner=owner), partial(self._keep_clean, device))

    def operation_record(self, device: Device) -> DeviceRecord:
        """Return the record into which an operator's reset, rebind or burn-in writes. It has no
        owner.
        """
        entry = self.entries.get(device.name)
        state = entry.operation if entry is not None else RecordState()
        return DeviceRecord(state, partial(self._keep_operation, device))

    def _keep_operation(self, device: Device, state: RecordState) -> None:
        self.change(device, lambda entry: msgspec.structs.replace(entry, operation=state))

    def _keep_prepare(self, device: Device, owner: Owner, state: RecordState) -> None:
        # A completed entry that gets a further step is half done until it is completed again.
        self.change_owner(
            device,
            owner,
            lambda entry: msgspec.structs.replace(
                entry, prepare=state, is_prepared=entry.is_prepared and entry.prepare.steps == state.steps
            ),
        )

    def _keep_attach(self, device: Device, owner: Owner, state: RecordState) -> None:
        self.change_owner(device, owner, lambda entry: msgspec.structs.replace(entry, attach=state))

    def _keep_clean(self, device: Device, state: RecordState) -> None:
        self.change(device, lambda entry: msgspec.structs.replace(entry, clean=state))

    def _read_all(self, names: Iterable[str]) -> None:
        entries, unreadable = dict(self._entries), dict(self._unreadable)
        for name in names:
            unreadable.pop(name, None)
            path = self.folder / f"{name}{_SUFFIX}"
            try:
                entry = decode(path.read_bytes(), DeviceEntry, where=str(path))
                if entry.device.name != name:
                    raise ContractError(f"{path}: it is of device {entry.device.name[:80]!r}, wanted {name!r}")
            except FileNotFoundError:
                continue
            except (OSError, ContractError) as err:
                unreadable[name] = err.message if isinstance(err, ContractError) else f"{path}: {err.strerror or err}"
            else:
                entries[name] = entry
        self._unreadable = unreadable
        self._keep_entries(entries)

    def _keep_entries(self, entries: Mapping[str, DeviceEntry]) -> None:
        self._entries = entries
        devices = {name: entry.device for name, entry in entries.items() if entry.is_passed_through or entry.is_unbound}
        if devices.keys() != self._passed.devices.keys():
            self._passed = PassedThrough(self._passed.turn + 1, devices)

    def _take_turn(self) -> None:
        """Take the folder for this process, and read its files."""
        if self._turn is not None:
            return
        if self._is_closed:
            # Taken again, it would never be closed, and no other process could have it while this
            # one runs.
            raise HardwareError(
                f"journal {self.folder}: this service has ended",
                next_step="the next start finishes or undoes what is half done",
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        turn = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            os.close(turn)
            raise JournalTaken(
                f"journal {self.folder}: another process has it",
                next_step="end the other device service of this class on this node",
            ) from err
        except BaseException:
            os.close(turn)
            raise
        self._turn = turn
        durable_file.remove_leftovers(self.folder, "*")
        self._read_all(sorted(path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}")))

    def _error(self, verb: str, path: Path, err: OSError) -> HardwareError:
        return HardwareError(
            f"journal: cannot {verb} {path}: {err.strerror or err}",
            next_step="give this service the folder to write (setting journal.dir), and room on its disk",
            path=str(path),
        )
