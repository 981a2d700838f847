"""Encodes values of a bucket as JSON, or as gzip where the JSON is larger than the bucket takes,
and decodes both.

The first byte distinguishes them: JSON begins with `{`, gzip with 0x1f. A value that fits is stored
uncompressed, so that people with NATS' own tools can read it.
"""

from __future__ import annotations

import zlib
from typing import Any, Generic, TypeVar

from msgspec import Struct

from topobus.formats.messages.codec import decode, encode
from topobus.formats.messages.entry_codec import EntryDecoder, EntryEncoder
from topobus.formats.messages.nouns import State
from topobus.values.errors import ContractError

__all__ = ["MAX_UNPACKED_BYTES", "StoredReader", "StoredWriter", "from_stored", "is_packed", "objection", "to_stored"]

M = TypeVar("M")

MAX_UNPACKED_BYTES = 16 * 1024 * 1024
"""The largest value, unpacked: 8,192 devices (bounds.MAX_ENTRIES) of 2 kB. A few kilobytes of gzip
could otherwise become gigabytes in each reader."""
_MAGIC = b"\x1f\x8b"
# zlib's window with a gzip header around it. Made so, the header has neither a time nor a name: the
# same value gives the same bytes.
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def to_stored(state: State[M], value: M, *, where: str) -> bytes:
    """Encode a value for its bucket.

    Errors: raises ContractError when it is larger than the bucket takes, also compressed where the
            state allows that.
    Cost: linear. 4 MB of JSON take some 50 ms to compress, which only values beyond the bucket's
            limit need.
    """
    return _fitting(state, encode(value), where)


def _fitting(state: State[Any], plain: bytes, where: str) -> bytes:
    if len(plain) <= state.max_value_bytes:
        return plain
    packed = plain
    if state.may_be_compressed and len(plain) <= MAX_UNPACKED_BYTES:
        compressor = zlib.compressobj(wbits=_GZIP_WINDOW)
        packed = compressor.compress(plain) + compressor.flush()
    if len(packed) > state.max_value_bytes:
        compressed = f", {len(packed)} compressed" if packed is not plain else ""
        raise ContractError(
            f"{where}: the value has {len(plain)} bytes{compressed}, the bucket takes {state.max_value_bytes}",
            size_bytes=len(plain),
        )
    return packed


def from_stored(state: State[M], data: bytes, *, where: str) -> M:
    """Read a stored value, compressed or not.

    Errors: raises ContractError when no contract accepts it, or when it unpacks to more than
    16 MiB (found while unpacking).
    """
    return decode(_plain(state, data, where), state.message, where=where)


class StoredReader(Generic[M]):
    """Reads the stored values of one key, one after the other.

    An entry whose bytes are unchanged is not decoded again.
    """

    def __init__(self, state: State[M]) -> None:
        """Make a reader for a state that has `entries`."""
        self._state = state
        self._decoder = EntryDecoder(state.message, state.entries)

    def read(self, data: bytes, *, where: str) -> M:
        """Read the next value.

        Errors: raises ContractError as `from_stored` does.
        """
        return self._decoder.decode(_plain(self._state, data, where), where=where)


def is_packed(state: State[Any], data: bytes) -> bool:
    """Say whether stored bytes are compressed, so that a reader that adds up sizes counts what they
    unpack to.

    Cost: O(1), nothing is unpacked.
    """
    return state.may_be_compressed and data[:2] == _MAGIC


def objection(state: State[Any], value: Any) -> str:
    """Explain why a value cannot be stored or could not be read again. Empty when it can.

    Errors: raises nothing.
    Cost: encodes and decodes the value once.
    """
    try:
        from_stored(state, to_stored(state, value, where=state.name), where=state.name)
    except ContractError as err:
        return err.message
    return ""


class StoredWriter(Generic[M]):
    """Encodes the values of one key, one after the other.

    An entry that is the same object as before is not encoded again.
    """

    def __init__(self, state: State[M]) -> None:
        """Make a writer for a state that has `entries`."""
        self._state = state
        self._encoder = EntryEncoder(state.entries)

    def write(self, value: M, *, where: str) -> bytes:
        """Encode the next value.

        Errors: raises ContractError as `to_stored` does.
        """
        assert isinstance(value, Struct)
        return _fitting(self._state, self._encoder.encode(value), where)


def _plain(state: State[Any], data: bytes, where: str) -> bytes:
    return _unpacked(data, where) if is_packed(state, data) else data


def _unpacked(data: bytes, where: str) -> bytes:
    reader = zlib.decompressobj(wbits=_GZIP_WINDOW)
    try:
        plain = reader.decompress(data, MAX_UNPACKED_BYTES + 1)
    except zlib.error as err:
        raise ContractError(f"{where}: cannot unpack the value: {err}", size_bytes=len(data)) from err
    if len(plain) > MAX_UNPACKED_BYTES:
        raise ContractError(f"{where}: the value unpacks to more than {MAX_UNPACKED_BYTES} bytes", size_bytes=len(data))
    if not reader.eof or reader.unused_data:
        what = "ends too early" if not reader.eof else "has more after its end"
        raise ContractError(f"{where}: cannot unpack the value: it {what}", size_bytes=len(data))
    return plain
