"""Decodes and encodes the successive values of one key, and of each only the entries that are new.

A ledger is one value, is written with every decision, and each decision changes one or two of its
allocations. The decoder keeps the bytes of each entry of the previous value. An entry with the same
bytes is reused as it was decoded then, when it was also held to its limits. Unchanged entries are
the same objects as in the previous value, so a reader finds the changed ones by identity. The
encoder keeps the bytes of each entry, and encodes an entry again when it is another object. The
results equal those of `codec.decode` and `codec.encode`.
"""

from __future__ import annotations

import typing
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from topobus.formats.first_read import ready
from topobus.formats.messages.bounds import bounded
from topobus.formats.messages.codec import decode, decode_within, encode

__all__ = ["EntryDecoder", "EntryEncoder"]

M = TypeVar("M")


class EntryDecoder(Generic[M]):
    """Decodes the values of one key. It remembers the last one."""

    def __init__(self, wanted: type[M], field: str) -> None:
        """Make a decoder of a message whose `field` is a map from names to structs."""
        assert issubclass(wanted, Struct)
        self._entry: type[Struct] = typing.get_args(typing.get_type_hints(wanted)[field])[1]
        self._wanted = wanted
        self._field = field
        self._limits = bounded(wanted, field)
        self._entry_limits = bounded(self._entry)
        self._rest = _without(wanted, field)
        self._raw_entries: dict[str, Raw] = {}
        self._entries: dict[str, Struct] = {}

    def decode(self, data: bytes, *, where: str) -> M:
        """Decode and validate JSON.

        Errors: raises ContractError as `codec.decode` does, with the same message. The remembered
                value stays. Of an entry that is written twice the last one counts, and the first is
                not checked.
        Cost: one pass over the bytes, and the decoding of the entries that are new. The bytes are
                kept until the next value is decoded.
        """
        try:
            raw_entries: dict[str, Raw] = (
                getattr(msgspec.json.decode(data, type=ready(self._limits)), self._field) or {}
            )
            rest = decode_within(data, self._rest, None)
            entries = {
                key: self._entries[key]
                if self._raw_entries.get(key) == raw
                else decode_within(raw, self._entry, self._entry_limits)
                for key, raw in raw_entries.items()
            }
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # The ordinary decoder finds which entry is wrong, and where in it.
            return decode(data, self._wanted, where=where)
        # Keep the new bytes instead of the equal old ones: otherwise each entry would keep the
        # whole value alive that it first came with.
        self._raw_entries, self._entries = raw_entries, entries
        return self._wanted(**msgspec.structs.asdict(rest), **{self._field: dict(entries)})


class EntryEncoder:
    """Encodes the values of one key. It remembers the last one."""

    def __init__(self, field: str) -> None:
        """Make an encoder of a message whose `field` is a map from names to structs that never
        change.
        """
        self._field = field
        self._raw_entries: dict[str, Raw] = {}
        self._entries: dict[str, Struct] = {}

    def encode(self, value: Struct) -> bytes:
        """Encode a value.

        Errors: raises NotImplementedError as `codec.encode` does.
        Cost: a copy of all bytes, and the encoding of the entries that are other objects than in
                the previous value.
        """
        entries: dict[str, Struct] = getattr(value, self._field)
        raw_entries = {
            key: self._raw_entries[key] if self._entries.get(key) is entry else Raw(encode(entry))
            for key, entry in entries.items()
        }
        self._raw_entries, self._entries = raw_entries, dict(entries)
        return encode(msgspec.structs.replace(value, **{self._field: raw_entries}))


def _without(kind: type[Struct], field: str) -> type[Struct]:
    """Make a type with all fields but one, as they are."""
    fields = [(each.name, each.type, _optional(each)) for each in msgspec.structs.fields(kind) if each.name != field]
    return msgspec.defstruct(f"{kind.__name__}Without{field.title()}", fields, kw_only=True)


def _optional(field: msgspec.structs.FieldInfo) -> object:
    """Keep the name on the wire, and the default of a field that is left out."""
    if field.required:
        return msgspec.field(name=field.encode_name)
    if field.default is not msgspec.NODEFAULT:
        return msgspec.field(name=field.encode_name, default=field.default)
    return msgspec.field(name=field.encode_name, default_factory=field.default_factory)
