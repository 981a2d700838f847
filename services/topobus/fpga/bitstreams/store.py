"""The store of bitstreams: a folder in which each bitstream is a file named by its sha256.

A manifest beside it names its function and the namespaces that may use it. The folder is read again
at each look of a driver at its cards. A bitstream is read and hashed once more before it programs a
card, and the kernel gets the very bytes that were hashed: a file that was changed since it was
added programs nothing.

To add one, the file is written first and its manifest last, and to remove it the manifest is
removed first, so that a concurrent reader sees a whole entry or none.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from pathlib import Path

import msgspec
from msgspec import Struct

from topobus.devicekit.journal import durable_file
from topobus.formats.first_read import ready
from topobus.fpga.bitstreams.byte_window import ByteWindow
from topobus.fpga.bitstreams.formats import image_of, read_bitstream
from topobus.fpga.bitstreams.values import MOST_FILE_BYTES, Bitstream
from topobus.values.outcome import Refusal, refuse

__all__ = [
    "DEFAULT_STORE",
    "EVERYBODY",
    "BitstreamStore",
    "StoreContent",
    "StoreEntry",
    "add_bitstream",
    "check_entry",
    "load_image",
    "manifest_name",
    "remove_bitstream",
]

DEFAULT_STORE = "/var/lib/topobus/bitstreams"
EVERYBODY = "*"
"""In `namespaces`: claims of every namespace."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
# `fits_` and the name are one attribute of a device, of at most 32 characters (resource.k8s.io).
_NAME = re.compile(r"[a-z][a-z0-9_]{0,26}")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# The manifests that `topobus-fpga-store` writes have some 500 bytes.
_MOST_MANIFEST_BYTES = 64 * 1024
_MOST_ENTRIES = 1024
_CHUNK_BYTES = 1024 * 1024
# Everybody may read a bitstream, and only the one who added it may write it: it is no secret, but
# its integrity counts.
_MODE = 0o644


class StoreEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bitstream, as its manifest describes it."""

    digest: str
    """sha256 of the file, hexadecimal; also the file's name, before its format."""
    name: str
    """What claims call the function. Files for different cards may have one name."""
    bitstream: Bitstream
    """What the file's header had when it was added."""
    namespaces: tuple[str, ...]
    """The namespaces whose claims may have it, or `*`."""
    is_blank: bool = False
    """True: it is loaded into a region that its last user has left, and no claim can ask for it."""
    signer: str = ""
    """Who vouches for it; only shown to people."""
    notes: str = ""

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.digest}.{self.bitstream.form}"

    def is_for(self, namespace: str) -> bool:
        """Whether claims of a namespace may have it."""
        return EVERYBODY in self.namespaces or namespace in self.namespaces


class StoreContent(Struct, frozen=True, kw_only=True):
    """The entries of a store at one look."""

    entries: tuple[StoreEntry, ...] = ()
    """By name and digest."""
    left_out: tuple[str, ...] = ()
    """Why entries cannot be used, sorted."""

    def find(self, digest: str) -> StoreEntry | None:
        """Find an entry by its digest."""
        return next((entry for entry in self.entries if entry.digest == digest), None)


class BitstreamStore:
    """A store that is read again and again. Threads may share it."""

    def __init__(self, folder: str) -> None:
        """Use this folder. A folder that does not exist is an empty store, and so is no folder
        ("").
        """
        self.folder = Path(folder)
        self._is_given = folder != ""
        self._lock = threading.Lock()
        self._seen: tuple[tuple[str, int, int, int], ...] | None = None
        self._content = StoreContent()

    def look(self) -> StoreContent:
        """Return what is in the store now.

        Manifests and headers are read again only when a name, size or time in the folder has
        changed.
        """
        if not self._is_given:
            return StoreContent()
        with self._lock:
            try:
                seen = _signature(self.folder)
            except FileNotFoundError:
                seen = ()
            except OSError as err:
                self._seen = None
                return StoreContent(
                    left_out=(f"the bitstream store {self.folder} cannot be read: {err.strerror or err}",)
                )
            if seen != self._seen:
                self._content = _read_all(self.folder, [name for name, *_ in seen if name.endswith(".json")])
                self._seen = seen
            return self._content


def manifest_name(digest: str) -> str:
    """Return the file name of a digest's manifest."""
    return f"{digest}.json"


def check_entry(entry: StoreEntry) -> list[str]:
    """List what is wrong with the fields of an entry, or nothing when all are right."""
    wrong = []
    if _DIGEST.fullmatch(entry.digest) is None:
        wrong.append(f"digest is {entry.digest[:80]!r}, wanted 64 hexadecimal digits")
    if _NAME.fullmatch(entry.name) is None:
        wrong.append(
            f"name is {entry.name[:60]!r}, wanted a small letter and up to 26 small letters, digits and underscores"
        )
    if not entry.namespaces and not entry.is_blank:
        wrong.append(f"namespaces is empty: wanted names of namespaces, or {EVERYBODY!r} for all")
    wrong += [
        f"namespaces has {namespace[:70]!r}, which is no name of a namespace"
        for namespace in entry.namespaces
        if namespace != EVERYBODY and _NAMESPACE.fullmatch(namespace) is None
    ]
    return wrong


def load_image(folder: Path, entry: StoreEntry) -> bytes | Refusal:
    """Read a bitstream whole, hash it, and return what the kernel's programming call takes.

    Errors: returns a Refusal when the file cannot be read, has another hash, or differs from its
    manifest.
    """
    try:
        descriptor = _open(folder / entry.file)
    except OSError as err:
        return _refuse("bitstream-missing", f"{folder / entry.file}: {err.strerror or err}", entry)
    try:
        size = os.fstat(descriptor).st_size
        if size > MOST_FILE_BYTES:
            return _refuse(
                "bitstream-unreadable", f"{entry.file} has {size} bytes, wanted at most {MOST_FILE_BYTES}", entry
            )
        content = _read_whole(descriptor, size)
    except OSError as err:
        return _refuse("bitstream-missing", f"{folder / entry.file}: {err.strerror or err}", entry)
    finally:
        os.close(descriptor)
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry.digest:
        text = f"{entry.file} of function {entry.name} has sha256 {digest}: it was changed since it was added"
        return _refuse("bitstream-changed", text, entry)
    file = ByteWindow.of_bytes(content)
    if read_bitstream(file) != entry.bitstream:
        return _refuse("bitstream-changed", f"{entry.file} of function {entry.name} does not match its manifest", entry)
    return image_of(file, entry.bitstream.form)


def _signature(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    entries = []
    with os.scandir(folder) as names:
        for file in names:
            if not file.name.startswith("."):
                status = file.stat(follow_symlinks=False)
                entries.append((file.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(sorted(entries))


def _read_all(folder: Path, names: list[str]) -> StoreContent:
    entries: list[StoreEntry] = []
    left_out = (
        [f"{folder}: {len(names)} manifests, of which only {_MOST_ENTRIES} are read"]
        if len(names) > _MOST_ENTRIES
        else []
    )
    for name in names[:_MOST_ENTRIES]:
        try:
            entry = _read_entry(folder, name)
        except (OSError, ValueError, RecursionError) as err:
            # ValueError: bad content, reported by msgspec or by the checks here.
            left_out.append(f"{name} of the bitstream store is left out: {err}")
            continue
        entries.append(entry)
    return StoreContent(
        entries=tuple(sorted(entries, key=lambda entry: (entry.name, entry.digest))), left_out=tuple(sorted(left_out))
    )


def _read_entry(folder: Path, name: str) -> StoreEntry:
    descriptor = _open(folder / name)
    try:
        text = os.read(descriptor, _MOST_MANIFEST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > _MOST_MANIFEST_BYTES:
        raise ValueError(f"it is longer than {_MOST_MANIFEST_BYTES} bytes")
    entry = msgspec.json.decode(text, type=ready(StoreEntry))
    wrong = check_entry(entry)
    if name != manifest_name(entry.digest):
        wrong.append(f"its digest is {entry.digest[:80]}, wanted the one of its own name")
    if wrong:
        raise ValueError("; ".join(wrong))
    descriptor = _open(folder / entry.file)
    try:
        header = read_bitstream(ByteWindow.of_file(descriptor))
    finally:
        os.close(descriptor)
    if isinstance(header, Refusal):
        raise ValueError(f"{entry.file}: {header.reasons[0].message}")
    if header != entry.bitstream:
        raise ValueError(f"{entry.file} does not match its manifest: its header has {header}")
    return entry


def _open(path: Path) -> int:
    """Open a plain file: no link, which could lead elsewhere, and nothing that blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is no plain file", str(path))
    return descriptor


def _read_whole(descriptor: int, size: int) -> bytes:
    """Read as much as the file had when it was measured. A file that grew since has another
    hash.
    """
    pieces = []
    while size > 0 and (piece := os.read(descriptor, min(size, _CHUNK_BYTES))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _refuse(code: str, message: str, entry: StoreEntry) -> Refusal:
    return refuse(code, message, digest=entry.digest, function=entry.name)


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
        return refuse("bitstream-refused", f"{source} is larger than {MOST_FILE_BYTES} bytes")
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
        return refuse("bitstream-refused", "; ".join(wrong))
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
