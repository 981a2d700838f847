"""The cache by which glibc's loader finds libraries (`/etc/ld.so.cache`): read, extended with the
driver's libraries, and written. Pure.

An image's own entries stay, so that nothing of the image has to be scanned and no program of the
image or of the host runs. A cache without an image's entries is also complete: the loader searches
its own folders for what the cache lacks.
Source: glibc, sysdeps/generic/dl-cache.h (formats), elf/dl-cache.c (order and search), elf/cache.c
(what ldconfig writes).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct

from topobus.gpu.driver_root.elf import AARCH64, X86_64

__all__ = ["Entry", "LoaderCache", "extend", "parse", "render"]

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")
_LITTLE_ENDIAN = 2
_EXTENSION_MAGIC = 0xEAA42174
_EXTENSION = struct.Struct("<II")
_SECTION = struct.Struct("<IIII")
_GENERATOR, _HWCAPS = 0, 1
_GENERATED_BY = b"topobus"
# FLAG_ELF_LIBC6 with the machine's own flag. A loader takes entries of its own machine alone.
_FLAGS = {X86_64: 0x0303, AARCH64: 0x0A03}
# An image with a whole desktop has some thousand.
_ENTRIES_LIMIT = 1 << 17
# A path has at most as many (PATH_MAX, limits.h). The limit keeps many entries that point to one
# long text from filling the memory.
_TEXT_BYTES = 4096


class Entry(Struct, frozen=True):
    """One library."""

    flags: int
    soname: bytes
    path: bytes
    osversion: int = 0
    hwcap: int = 0


class LoaderCache(Struct, frozen=True):
    """A cache's content."""

    entries: tuple[Entry, ...] = ()
    hwcaps: tuple[bytes, ...] = ()
    """Names of processor levels (`x86-64-v3`), which entries mean by their numbers."""


def parse(data: bytes) -> LoaderCache | None:
    """Read a cache, or return None when present loaders do not read its form.

    >>> parse(render(LoaderCache((Entry(0x0303, b"libc.so.6", b"/lib/libc.so.6"),)))).entries[0].path
    b'/lib/libc.so.6'
    """
    # Older distributions write a cache of the previous form in front. Offsets count from the magic.
    start = data.find(_MAGIC)
    if start < 0 or len(data) - start < _HEADER.size:
        return None
    data = data[start:]
    _, count, _, byte_order, extension = _HEADER.unpack_from(data)
    if (
        byte_order not in (0, _LITTLE_ENDIAN)
        or count > _ENTRIES_LIMIT
        or _HEADER.size + count * _ENTRY.size > len(data)
    ):
        return None
    entries: list[Entry] = []
    for flags, key, value, osversion, hwcap in _ENTRY.iter_unpack(
        data[_HEADER.size : _HEADER.size + count * _ENTRY.size]
    ):
        soname, path = _text(data, key), _text(data, value)
        if not soname or not path:
            return None
        entries.append(Entry(flags, soname, path, osversion, hwcap))
    return LoaderCache(tuple(entries), _hwcaps(data, extension))


def extend(cache: LoaderCache, libraries: Mapping[str, str], machine: int) -> LoaderCache | None:
    """Add libraries, SONAME to path, each in place of the entries of its name.

    None for a machine that has no driver.
    """
    flags = _FLAGS.get(machine)
    if flags is None:
        return None
    added = tuple(Entry(flags, soname.encode(), path.encode()) for soname, path in sorted(libraries.items()))
    names = {entry.soname for entry in added}
    kept = (entry for entry in cache.entries if entry.flags != flags or entry.soname not in names)
    return LoaderCache((*added, *kept), cache.hwcaps)


def render(cache: LoaderCache) -> bytes:
    """Write a cache. The first entry of a name stays the first.

    Order: greatest name first, as the loader's binary search needs it.
    """
    entries = sorted(cache.entries, key=lambda entry: _order(entry.soname), reverse=True)
    strings_at = _HEADER.size + len(entries) * _ENTRY.size
    texts = dict.fromkeys(text for entry in entries for text in (entry.soname, entry.path))
    texts |= dict.fromkeys(cache.hwcaps)
    offsets: dict[bytes, int] = {}
    strings = bytearray()
    for text in texts:
        offsets[text] = strings_at + len(strings)
        strings += text + b"\0"
    rows = b"".join(
        _ENTRY.pack(entry.flags, offsets[entry.soname], offsets[entry.path], entry.osversion, entry.hwcap)
        for entry in entries
    )
    extension_at = (strings_at + len(strings) + 3) // 4 * 4
    header = _HEADER.pack(_MAGIC, len(entries), len(strings), _LITTLE_ENDIAN, extension_at)
    body = header + rows + bytes(strings)
    return body.ljust(extension_at, b"\0") + _extension(extension_at, [offsets[name] for name in cache.hwcaps])


def _extension(at: int, hwcaps: Sequence[int]) -> bytes:
    data_at = at + _EXTENSION.size + 2 * _SECTION.size
    numbers = struct.pack(f"<{len(hwcaps)}I", *hwcaps)
    sections = _SECTION.pack(_HWCAPS, 0, data_at, len(numbers)) + _SECTION.pack(
        _GENERATOR, 0, data_at + len(numbers), len(_GENERATED_BY)
    )
    return _EXTENSION.pack(_EXTENSION_MAGIC, 2) + sections + numbers + _GENERATED_BY


def _hwcaps(data: bytes, at: int) -> tuple[bytes, ...]:
    if not at or at + _EXTENSION.size > len(data):
        return ()
    magic, count = _EXTENSION.unpack_from(data, at)
    if magic != _EXTENSION_MAGIC or count > 64 or at + _EXTENSION.size + count * _SECTION.size > len(data):
        return ()
    for index in range(count):
        tag, _, offset, size = _SECTION.unpack_from(data, at + _EXTENSION.size + index * _SECTION.size)
        if tag == _HWCAPS and offset + size <= len(data) and size % 4 == 0:
            return tuple(_text(data, number) for (number,) in struct.iter_unpack("<I", data[offset : offset + size]))
    return ()


def _text(data: bytes, at: int) -> bytes:
    end = data.find(b"\0", at, at + _TEXT_BYTES + 1)
    return data[at:end] if end >= 0 else b""


def _order(name: bytes) -> tuple[tuple[int, int], ...]:
    """Order names as the loader does: a run of digits is one number, and greater than any other
    character.
    """
    parts = re.findall(rb"\d+|\D", name)
    return (*((2, int(part)) if part.isdigit() else (1, part[0]) for part in parts), (0, 0))
