"""Adds a bitstream to a store and removes one.

The file is written first and its manifest last, and the manifest is removed first, so that a
concurrent reader sees a whole entry or none.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from topobus.devicekit.journal import durable_file
from topobus.fpga.bitstreams.byte_window import ByteWindow
from topobus.fpga.bitstreams.formats import image_of, read_bitstream
from topobus.fpga.bitstreams.store import StoreEntry, check_entry, manifest_name
from topobus.fpga.bitstreams.values import MOST_FILE_BYTES
from topobus.values.outcome import Refusal, refuse

__all__ = ["add_bitstream", "remove_bitstream"]

# Everybody may read a bitstream, and only the one who added it may write it: it is no secret, but
# its integrity counts.
_MODE = 0o644


def add_bitstream(
    folder: Path,
    source: Path,
    *,
    name: str,
    namespaces: tuple[str, ...],
    is_blank: bool = False,
    signer: str = "",
    notes: str = "",
) -> StoreEntry | Refusal:
    """Copy a file into a store. The same file again replaces its manifest.

    Errors: returns a Refusal for a file or a field that is wrong; raises OSError when the source
    cannot be read or the folder cannot be written. Blocks.
    """
    if source.stat().st_size > MOST_FILE_BYTES:
        return _refuse(f"{source} is larger than {MOST_FILE_BYTES} bytes")
    content = source.read_bytes()
    bitstream = read_bitstream(ByteWindow.of_bytes(content))
    if isinstance(bitstream, Refusal):
        return bitstream
    # The image behind the header must be whole as well: a truncated file is refused now, not when a
    # card is to be programmed.
    image = image_of(ByteWindow.of_bytes(content), bitstream.form)
    if isinstance(image, Refusal):
        return image
    entry = StoreEntry(
        digest=hashlib.sha256(content).hexdigest(),
        name=name,
        bitstream=bitstream,
        namespaces=tuple(sorted(set(namespaces))),
        is_blank=is_blank,
        signer=signer,
        notes=notes,
    )
    wrong = check_entry(entry)
    if wrong:
        return _refuse("; ".join(wrong))
    durable_file.write(folder, entry.file, content, mode=_MODE)
    durable_file.write(
        folder, manifest_name(entry.digest), msgspec.json.format(msgspec.json.encode(entry)) + b"\n", mode=_MODE
    )
    return entry


def remove_bitstream(folder: Path, digest: str) -> bool:
    """Remove a bitstream, its manifest first, and return whether it was there.

    A card that has the function keeps it.

    Errors: OSError when the folder cannot be written. Blocks.
    """
    names = [name for name in os.listdir(folder) if name.startswith(f"{digest}.")]  # noqa: PTH208 - names only
    manifest = manifest_name(digest)
    was_there = durable_file.delete(folder, manifest)
    for name in sorted(names):
        if name != manifest:
            durable_file.delete(folder, name)
    return was_there


def _refuse(message: str) -> Refusal:
    return refuse("bitstream-refused", message)
