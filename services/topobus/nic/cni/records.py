"""Keeps what was attached through CNI durably, because DEL needs it even after this process
died in the middle of an ADD.

Format (`topobus.dev/cni-attachment/v1`): one JSON file for each attachment,
`<network>@<container id>@<interface>.json` in one folder. It has the configuration list as it was
run, the version chosen, the target, the last result (null while ADD runs), whether ADD ended, and
how many plugins a failed DEL has undone. It is written before the first plugin of ADD runs, and
replaced in one step and synced before the next act. It is deleted when DEL has ended. The format is
Topobus' own: the caches of other runtimes (/var/lib/cni/results) are neither read nor written.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from topobus.devicekit.journal import durable_file
from topobus.formats.first_read import ready
from topobus.nic.cni.rules.chain import Chain
from topobus.nic.cni.rules.messages import Target
from topobus.nic.cni.rules.refusals import state_unreadable
from topobus.values.outcome import Refusal

__all__ = ["AttachmentRecord", "AttachmentRecords"]

# A record holds the configuration list and a result: some kilobytes.
_LIMIT_BYTES = 4 << 20


class AttachmentRecord(Struct, frozen=True, kw_only=True):
    """One attachment as its file has it."""

    format: Literal["topobus.dev/cni-attachment/v1"] = "topobus.dev/cni-attachment/v1"
    chain: Chain
    version: str
    target: Target
    namespace_inode: int = 0
    """Inode of the network namespace at ADD: another one at the same path is another sandbox's. 0:
    not known."""
    boot_id: str = ""
    """In which boot of the node it has that inode."""
    result: dict[str, Any] | None = None
    is_attached: bool = False
    """ADD ended well."""
    undone: int = 0
    """How many plugins, counted from the end of the chain, DEL has undone."""

    @property
    def key(self) -> str:
        """The name of the attachment and of its file."""
        return f"{self.chain.name}@{self.target.container_id}@{self.target.interface}"


class AttachmentRecords:
    """The folder of records, which one process writes. Every change is on disk when a method
    returns.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with suppress(OSError):
            durable_file.remove_leftovers(folder, "*@*@*.json")

    def read(self, network: str, container_id: str, interface: str) -> AttachmentRecord | Refusal | None:
        """Read the record of an attachment, or return None where nothing was attached.

        Errors: returns Refusal `cni-state-unreadable` with the file.
        """
        return self._read(self._folder / f"{network}@{container_id}@{interface}.json")

    def write(self, record: AttachmentRecord) -> Refusal | None:
        """Replace a record in one step.

        Errors: returns Refusal `cni-state-unreadable` when the folder cannot be written; the
        previous record is then intact.
        """
        name = f"{record.key}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            durable_file.write(self._folder, name, msgspec.json.encode(record), mode=0o600)
        except (OSError, TypeError, ValueError) as err:
            return state_unreadable(str(self._folder / name), str(err))
        return None

    def delete(self, record: AttachmentRecord) -> Refusal | None:
        """Delete a record. One that is gone already is no fault."""
        name = f"{record.key}.json"
        try:
            durable_file.delete(self._folder, name)
        except OSError as err:
            return state_unreadable(str(self._folder / name), str(err))
        return None

    def _read(self, path: Path) -> AttachmentRecord | Refusal | None:
        try:
            with path.open("rb") as file:
                content = file.read(_LIMIT_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as err:
            return state_unreadable(str(path), str(err))
        if len(content) > _LIMIT_BYTES:
            return state_unreadable(str(path), f"it has more than {_LIMIT_BYTES} bytes")
        try:
            record = msgspec.json.decode(content, type=ready(AttachmentRecord))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            return state_unreadable(str(path), str(err))
        if path.name != f"{record.key}.json":
            return state_unreadable(str(path), f"its content is the record of {record.key}")
        return record
